"""alpha-CROWN: the free lower slopes, optimised for every row by itself.

Xu et al., "Fast and Complete: Enabling Complete Verification with Rapid and Massively Parallel
Incomplete Verifiers", ICLR 2021. Differences here:

* One start node and one chunk of rows at a time, over intermediate bounds that are already final
  (design section 4): no slope outlives its chunk, and no gradient crosses layers.
* The gradient is taken in closed form. With the input minimiser fixed, the bound of a row is
  linear in each slope: d bound / d alpha_i = max(A_i, 0) z_i, where z is the pre-activation that
  the minimiser reaches when every neuron follows its chosen line. One backward pass gives A, one
  forward sweep gives z; autograd holds nothing, so gathered weights may be dropped in between.
* Slopes are projected outside of any graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from abcrown_dist.bounds.backward import Start, back_substitute, concretize, row_count, sweep
from abcrown_dist.bounds.concretize import InputSet
from abcrown_dist.bounds.types import Relaxed, RowBounds, ancestors
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.weights.base import Weights


@dataclass(frozen=True)
class AlphaSettings:
    """How slopes are optimised; names as in `solver.alpha-crown`."""

    iteration: int = 20
    lr_alpha: float = 0.1
    lr_decay: float = 0.98
    early_stop_patience: int = 10


@dataclass(frozen=True)
class Optimised:
    """Best bounds of every row, and the slopes (B, R, *shape) that gave them, if they were kept."""

    bounds: RowBounds
    alphas: Mapping[str, Tensor]


def initial_alphas(start: Start, relaxed: Relaxed, weights: Weights) -> dict[str, Tensor]:
    """CROWN's own slopes, one set per row, for every movable nonlinearity below `start`."""
    rows = row_count(start)
    below = ancestors(weights.graph, tuple(start))
    alphas = {}
    for name, node in relaxed.nodes.items():
        if name in below and node.lines.alpha_range is not None:
            slope = node.lines.lower_slope
            alphas[name] = slope[:, None].repeat(1, rows, *[1] * (slope.dim() - 1))
    return alphas


def gradients(
    weights: Weights,
    start: Start,
    relaxed: Relaxed,
    inputs: InputSet,
    alphas: Mapping[str, Tensor],
    track_error: bool = False,
) -> tuple[RowBounds, dict[str, Tensor]]:
    """Bounds at `alphas` and their derivative with respect to each, in the same shapes."""
    tape: dict[str, Tensor] = {}
    linear = back_substitute(weights, start, relaxed, alphas=alphas, tape=tape, track_error=track_error)
    bounds = concretize(weights, linear, inputs, track_error)
    points = inputs.minimiser(linear.A)
    del linear
    slopes = {}
    for name, z in sweep(weights, start, relaxed, points, tape, alphas):
        if name in alphas:
            A = tape[name].clamp(min=0)
            slopes[name] = A.mul_(z) if A.shape == z.shape else A * z  # rows may serve all domains
            del A
        del z
    return bounds, slopes


def maximise(
    weights: Weights,
    start: Start,
    relaxed: Relaxed,
    inputs: InputSet,
    settings: AlphaSettings,
    *,
    keep_alphas: bool = False,
    stop: Callable[[RowBounds], bool] | None = None,
    deadline: Deadline | None = None,
) -> Optimised:
    """Maximise the lower bound of every row of `start` over its own slopes.

    Args:
        keep_alphas: also return the best slopes of every row.
        stop: asked after every iteration with the best bounds; True ends the search.

    Raises:
        DeadlineExceeded: between two iterations.
    """
    alphas = initial_alphas(start, relaxed, weights)
    if not alphas or settings.iteration == 0:
        linear = back_substitute(weights, start, relaxed, alphas=alphas)
        return Optimised(concretize(weights, linear, inputs), alphas if keep_alphas else {})
    search = _Search(alphas, relaxed, settings, keep_alphas)
    finished = all_finished = False
    for step in range(settings.iteration):
        # Rounding depends little on the slopes: where no verdict hangs on every step, the first pass
        # and the last measure it for all of them.
        track_error = step == 0 or stop is not None
        bounds, slopes = gradients(weights, start, relaxed, inputs, alphas, track_error)
        if not finished:
            search.record(bounds)
            finished = bool(search.settled().all())
            finished = finished or (stop is not None and stop(search.best))
        if not finished:
            search.move(slopes)
        del slopes  # before the next ones exist
        # Ranks that share weights pass them together: who is done goes on until all are.
        all_finished = weights.group.all_true(finished)
        if all_finished:
            break
        if deadline is not None:
            deadline.check()
    if stop is None or not all_finished:
        last = concretize(weights, back_substitute(weights, start, relaxed, alphas=alphas), inputs)
        search.record(last)
    return Optimised(search.best, search.best_alphas)


class _Search:
    """Adam (Kingma and Ba, 2015, algorithm 1) on the slopes, with the best bound of every row kept.

    Written out because `torch.optim` imports half of the compiler, which takes longer than most runs.
    """

    BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8

    def __init__(
        self, alphas: dict[str, Tensor], relaxed: Relaxed, settings: AlphaSettings, keep_alphas: bool
    ) -> None:
        self.alphas, self.settings, self.keep_alphas = alphas, settings, keep_alphas
        self.ranges = {name: relaxed.nodes[name].lines.alpha_range for name in alphas}
        self.first = {name: torch.zeros_like(alpha) for name, alpha in alphas.items()}
        self.second = {name: torch.zeros_like(alpha) for name, alpha in alphas.items()}
        self.steps = 0
        self.best: RowBounds
        self.best_alphas: dict[str, Tensor] = {}
        self.stalled: Tensor
        self.gained: Tensor

    def record(self, bounds: RowBounds) -> None:
        """Keep what is better than before, row by row. A NaN stays NaN."""
        if not hasattr(self, "best"):
            self.best = bounds
            self.stalled = torch.zeros_like(bounds.lower, dtype=torch.long)
            self.gained = torch.zeros_like(bounds.lower)
            if self.keep_alphas:
                self.best_alphas = {name: alpha.clone() for name, alpha in self.alphas.items()}
            return
        # A row that has stalled is settled, whatever else is in its chunk: bounds must not depend on that.
        gain = (bounds.lower - self.best.lower).clamp(min=0).masked_fill(self.settled(), 0)
        better = gain > 0
        self.gained += gain
        # Less than a hundredth of all that a row has gained so far is no progress.
        self.stalled = torch.where(gain > 1e-2 * self.gained, 0, self.stalled + 1)
        error = torch.maximum(self.best.error, bounds.error)
        self.best = RowBounds(torch.where(better, bounds.lower, self.best.lower), error)
        if self.keep_alphas:
            for name, alpha in self.alphas.items():
                mask = better.reshape(*better.shape, *[1] * (alpha.dim() - 2))
                self.best_alphas[name] = torch.where(mask, alpha, self.best_alphas[name])

    def settled(self) -> Tensor:
        """Mask (B, R) of rows that made no progress for `early_stop_patience` steps."""
        return self.stalled >= self.settings.early_stop_patience

    def move(self, slopes: Mapping[str, Tensor]) -> None:
        """One projected step uphill. Uses up the slopes' memory."""
        rate = self.settings.lr_alpha * self.settings.lr_decay**self.steps
        self.steps += 1
        correction = math.sqrt(1 - self.BETA2**self.steps)
        for name, alpha in self.alphas.items():
            slope, first, second = slopes[name], self.first[name], self.second[name]
            first.lerp_(slope, 1 - self.BETA1)
            second.mul_(self.BETA2).addcmul_(slope, slope, value=1 - self.BETA2)
            size = torch.sqrt(second, out=slope).add_(self.EPSILON * correction)
            alpha.addcdiv_(first, size, value=rate * correction / (1 - self.BETA1**self.steps))
            span = self.ranges[name]
            assert span is not None
            torch.clamp(alpha, span[0][:, None], span[1][:, None], out=alpha)
