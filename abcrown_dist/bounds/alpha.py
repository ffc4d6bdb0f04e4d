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

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from abcrown_dist.bounds.ascent import Ascent, Variable
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


def slope_variables(alphas: Mapping[str, Tensor], relaxed: Relaxed, rate: float) -> dict[str, Variable]:
    """Slopes by node name as variables of an ascent."""
    variables = {}
    for name, alpha in alphas.items():
        span = relaxed.nodes[name].lines.alpha_range
        assert span is not None
        variables[name] = Variable(alpha, rate, span[0][:, None], span[1][:, None])
    return variables


def gradients(
    weights: Weights,
    start: Start,
    relaxed: Relaxed,
    inputs: InputSet,
    alphas: Mapping[str, Tensor],
) -> tuple[RowBounds, dict[str, Tensor]]:
    """Bounds at `alphas` with their rounding error, and their derivatives with respect to each of these."""
    tape: dict[str, Tensor] = {}
    linear = back_substitute(weights, start, relaxed, alphas=alphas, tape=tape)
    bounds = concretize(weights, linear, inputs)
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
    search = Ascent(
        slope_variables(alphas, relaxed, settings.lr_alpha),
        decay=settings.lr_decay,
        patience=settings.early_stop_patience,
        keep=keep_alphas,
    )
    finished = all_finished = False
    for _ in range(settings.iteration):
        bounds, slopes = gradients(weights, start, relaxed, inputs, alphas)
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
    return Optimised(search.best, search.best_values)
