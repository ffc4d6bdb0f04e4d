"""beta-CROWN: bounds over domains that branching has cut out by the signs of pre-activations.

Wang et al., "Beta-CROWN: Efficient Bound Propagation with Per-neuron Split Constraints for Neural
Network Robustness Verification", NeurIPS 2021. A decision  s z_i >= 0  with s = +1 or -1 does two things:
it makes a ReLU linear in its domain, and it enters the bound through a multiplier beta >= 0, since

    min { a x : s z_i >= 0 }  >=  min { a x - beta s z_i }          for every beta >= 0 (weak duality),

so that a backward pass subtracts  beta s  from the coefficient of z_i. At a fixed minimiser the bound is
linear in beta with derivative -s z_i, and the sweep that gives the slopes of alpha yields z_i as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from abcrown_dist.bounds.ascent import Ascent, Variable
from abcrown_dist.bounds.backward import LinearBound, Push, Start, back_substitute, concretize, sweep
from abcrown_dist.bounds.concretize import InputSet
from abcrown_dist.bounds.mixture import Mixture
from abcrown_dist.bounds.slopes import Movable
from abcrown_dist.bounds.types import Interval, OneHot, Relaxed, RelaxedNode, RowBounds
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.weights.base import Weights

_ALPHA, _BETA, _LAMBDA = "alpha", "beta", "lambda"

# Which of the domains `index` (n,) are decided, given bounds (n, R) that are at most `error` (n, R) off.
Decided = Callable[[RowBounds, Tensor], Tensor]


@dataclass(frozen=True)
class BetaSettings:
    """How slopes and multipliers are optimised in branch and bound; names as in `solver.beta-crown`.

    Attributes:
        prune: share of decided domains above which they leave the optimisation; None: never.
    """

    iteration: int = 50
    lr_alpha: float = 0.01
    lr_beta: float = 0.05
    lr_lambda: float = 0.1
    lr_decay: float = 0.98
    early_stop_patience: int = 10
    prune: float | None = 0.2


@dataclass(frozen=True)
class Split:
    """Decisions  sign z[index] >= 0  on one pre-activation, in each of B domains.

    Attributes:
        index: (B, D) flat own neurons, 0 where a column is not about one of them.
        sign: (B, D) +1 or -1, 0 in such columns.
    """

    index: Tensor
    sign: Tensor

    def select(self, domains: Tensor) -> Split:
        """The decisions of some domains (n,)."""
        return Split(self.index[domains], self.sign[domains])


Splits = Mapping[str, Split]  # by name of the pre-activation; all have the same D columns


@dataclass(frozen=True)
class Optimised:
    """Best bounds (B, R) with their rounding errors, and what gave them.

    Attributes:
        alpha: lower slopes (B, R, U), packed.
        beta: multipliers (B, R, D) of the splits.
        points: minimisers of the bounds over the input set (B, R, *shape), by input.
        lam: multipliers (B, R) of the rows in their combination, where there is one.
    """

    bounds: RowBounds
    alpha: Tensor
    beta: Tensor
    points: dict[str, Tensor]
    lam: Tensor | None = None


def impose(relaxed: Relaxed, splits: Splits) -> Relaxed:
    """The relaxation in each domain: a neuron on which it has decided is linear there.

    Intervals and sensitivities stay those of the whole, which hold in every domain.
    """
    nodes = dict(relaxed.nodes)
    for name, node in relaxed.nodes.items():
        source = node.node.inputs[0]
        if source in splits:
            cut = cut_interval(relaxed.intervals[source], splits[source])
            lines = node.relaxation.lines(node.node.attrs, cut.lower, cut.upper)
            nodes[name] = RelaxedNode(node.node, lines)
    return dataclasses.replace(relaxed, nodes=nodes)


def cut_interval(known: Interval, split: Split) -> Interval:
    """Pre-activation bounds (B, *shape) in each domain, given those of the whole or of each domain."""
    count = len(split.index)
    shape = known.lower.shape[1:]
    ends = []
    for side, reduce, gone, sign in (
        (known.lower, "amax", -torch.inf, 1),
        (known.upper, "amin", torch.inf, -1),
    ):
        flat = side.expand(count, *shape).flatten(1).clone()
        if flat.numel():
            wall = torch.zeros_like(split.sign).masked_fill(split.sign != sign, gone)
            flat.scatter_reduce_(1, split.index, wall.to(flat.dtype), reduce)
        ends.append(flat.reshape(count, *shape))
    return Interval(ends[0], ends[1])


def pushes(splits: Splits, beta: Tensor) -> dict[str, Push]:
    """What the multipliers (B, R, D) add to the coefficients of every split pre-activation."""
    return {name: Push(split.index, -beta * split.sign[:, None]) for name, split in splits.items()}


@dataclass(frozen=True)
class Problem:
    """Rows over B domains, to be bounded from below.

    Attributes:
        start: (B or 1, R, *shape) by output node; where rows are combined, that follows from the multipliers.
        relaxed: in each domain, see `impose`.
        inputs: the box that all domains are parts of.
        splits: the decisions that cut them out.
        movable: neurons whose slopes are given, packed as (B, R, U).
        mixture: of which the last row is a combination, with multipliers that are optimised as well.
    """

    weights: Weights
    start: Start
    relaxed: Relaxed
    inputs: InputSet
    splits: Splits
    movable: Movable
    mixture: Mixture | None = None

    def select(self, domains: Tensor) -> Problem:
        """The same for some domains (n,); what all share stays shared."""
        return dataclasses.replace(
            self,
            start={name: _select(rows, domains) for name, rows in self.start.items()},
            relaxed=self.relaxed.select(domains),
            splits={name: split.select(domains) for name, split in self.splits.items()},
            mixture=None if self.mixture is None else self.mixture.select(domains),
        )

    def at(self, lam: Tensor | None) -> Problem:
        """The same rows with the combination at multipliers (B, R)."""
        if self.mixture is None or lam is None:
            return self
        return dataclasses.replace(self, start=self.mixture.start(lam))

    def linear(
        self, alpha: Tensor | None, beta: Tensor, tape: dict[str, Tensor] | None, track_error: bool
    ) -> tuple[LinearBound, dict[str, Tensor]]:
        """Linear bounds at given slopes and multipliers, and the slopes by node; None: CROWN's slopes."""
        alphas = {} if alpha is None else self.movable.unpack(alpha, self.relaxed)
        linear = back_substitute(
            self.weights, self.start, self.relaxed,
            alphas=alphas, tape=tape, track_error=track_error, pushes=pushes(self.splits, beta),
        )  # fmt: skip
        return linear, alphas


def evaluate(problem: Problem, alpha: Tensor, beta: Tensor) -> tuple[RowBounds, dict[str, Tensor]]:
    """Bounds at given slopes and multipliers with their rounding error, and their minimisers."""
    linear, _ = problem.linear(alpha, beta, None, track_error=True)
    return concretize(problem.weights, linear, problem.inputs), problem.inputs.minimiser(linear.A)


def gradients(
    problem: Problem,
    alpha: Tensor,
    beta: Tensor,
    track_error: bool = False,
    ends: dict[str, Tensor] | None = None,
) -> tuple[RowBounds, Tensor, Tensor]:
    """Bounds, and their derivative with respect to each slope (B, R, U) and each multiplier (B, R, D).

    Args:
        ends: filled with what the rows' nodes are (B, R, *shape) where each bound takes its minimum.
    """
    weights, relaxed, movable = problem.weights, problem.relaxed, problem.movable
    tape: dict[str, Tensor] = {}
    linear, alphas = problem.linear(alpha, beta, tape, track_error)
    bounds = concretize(weights, linear, problem.inputs, track_error)
    points = problem.inputs.minimiser(linear.A)
    del linear
    # Nodes that no row depends on keep their zeros.
    by_alpha = {name: alpha.new_zeros(*alpha.shape[:2], len(index)) for name, index in movable.index.items()}
    by_beta = torch.zeros_like(beta)
    seen: set[str] = set()
    for name, z in sweep(weights, problem.start, relaxed, points, tape, alphas, ends):
        source = relaxed.nodes[name].node.inputs[0]
        if source in problem.splits and source not in seen:
            seen.add(source)
            by_beta -= _at(z, problem.splits[source])
        if name in by_alpha:
            slope = movable.take(name, tape[name]).clamp(min=0) * movable.take(name, z)
            by_alpha[name] = slope.expand(len(alpha), -1, -1)
        del z
    total = torch.cat(list(by_alpha.values()), dim=2) if by_alpha else torch.zeros_like(alpha)
    return bounds, total, weights.total(by_beta)


def _at(z: Tensor, split: Split) -> Tensor:
    """s z at the split neurons, (B, R, D)."""
    flat = z.flatten(2)
    if not flat.shape[2]:
        return torch.zeros((), dtype=z.dtype, device=z.device)
    index = split.index[:, None].expand(-1, flat.shape[1], -1)
    return flat.expand(len(index), -1, -1).gather(2, index) * split.sign[:, None]


def maximise(
    problem: Problem,
    alpha: Tensor,
    beta: Tensor,
    settings: BetaSettings,
    decided: Decided,
    deadline: Deadline | None = None,
    lam: Tensor | None = None,
) -> Optimised:
    """Maximise the lower bounds of every row over slopes and multipliers, from given ones.

    Args:
        alpha: (B, R, U); what is not sound in a domain is moved to where it is.
        beta: (B, R, D), not negative.
        decided: a domain of which it is true is not optimised any more. Of a combination it is told by how
            much the bound exceeds the right-hand side.
        lam: (B, R), not negative, multipliers of the rows in their combination.

    Returns:
        The best bounds that were met, measured once more with their rounding error.

    Raises:
        DeadlineExceeded: between two iterations.
    """
    group = problem.weights.group
    race = _Race(problem, alpha, beta, settings, lam)
    for step in range(settings.iteration):
        bounds, slopes = race.gradients(step == 0)
        race.ascent.record(bounds, race.over)
        race.over = over = decided(race.ascent.best, race.index)
        finished = bool((over | race.ascent.settled().all(1)).all()) or step + 1 == settings.iteration
        # Ranks that share weights pass them together: who is done goes on until all are.
        if group.all_true(finished):
            break
        race.ascent.move(slopes)
        del slopes
        if settings.prune is not None and group.size == 1:
            race.drop(over, settings.prune)
        if deadline is not None:
            deadline.check()
    best = race.finish()
    found = best[_LAMBDA][:, -1] if _LAMBDA in best else None
    bounds, points = evaluate(problem.at(found), best[_ALPHA], best[_BETA])
    return Optimised(bounds, best[_ALPHA], best[_BETA], points, found)


class _Race:
    """An optimisation that domains leave when they are decided.

    Attributes:
        index: (n,) the domains that are still in it.
        over: (n,) bool, which of them are decided; None before the first step.
        problem, ascent: theirs.
    """

    def __init__(
        self,
        problem: Problem,
        alpha: Tensor,
        beta: Tensor,
        settings: BetaSettings,
        lam: Tensor | None,
    ) -> None:
        self.problem = problem
        self.index = torch.arange(len(beta), device=beta.device)
        self.over: Tensor | None = None
        lower, upper = problem.movable.limits(problem.relaxed, len(alpha))
        # What was free in the parent may be decided here.
        variables = {
            _ALPHA: Variable(torch.clamp(alpha, lower, upper), settings.lr_alpha, lower, upper),
            _BETA: Variable(beta.clone(), settings.lr_beta, lower=0.0),
        }
        if problem.mixture is not None and lam is not None:
            # Only the last row has multipliers: zeros stay with the others.
            full = lam.new_zeros(*beta.shape[:2], lam.shape[1])
            full[:, -1] = lam
            total = lam.sum(1)[:, None, None]
            variables[_LAMBDA] = Variable(full, settings.lr_lambda, lower=0.0, total=total)
        self.ascent = Ascent(
            variables, decay=settings.lr_decay, patience=settings.early_stop_patience, keep=True
        )
        self.results = {name: item.value.clone() for name, item in variables.items()}

    @property
    def alpha(self) -> Tensor:
        return self.ascent.variables[_ALPHA].value

    @property
    def beta(self) -> Tensor:
        return self.ascent.variables[_BETA].value

    def gradients(self, track_error: bool) -> tuple[RowBounds, dict[str, Tensor]]:
        """Bounds of the domains that are left, and their derivatives by variable."""
        mixture, item = self.problem.mixture, self.ascent.variables.get(_LAMBDA)
        if mixture is None or item is None:
            bounds, by_alpha, by_beta = gradients(self.problem, self.alpha, self.beta, track_error)
            return bounds, {_ALPHA: by_alpha, _BETA: by_beta}
        lam, ends = item.value[:, -1], dict[str, Tensor]()
        combined = mixture.combined(lam)
        problem = dataclasses.replace(self.problem, start=mixture.with_last(combined.rows))
        bounds, by_alpha, by_beta = gradients(problem, self.alpha, self.beta, track_error, ends)
        by_lam = torch.zeros_like(item.value)
        last = {name: value[:, -1] for name, value in ends.items()}
        by_lam[:, -1] = mixture.slope(problem.weights, lam, last)
        lower = bounds.lower.expand(len(lam), -1).clone()
        lower[:, -1] = (lower[:, -1].double() - combined.rhs).to(lower.dtype)
        bounds = RowBounds(lower, bounds.error.expand(len(lam), -1))
        return bounds, {_ALPHA: by_alpha, _BETA: by_beta, _LAMBDA: by_lam}

    def drop(self, over: Tensor, share: float) -> None:
        """Let the domains `over` (mask) leave, if they are many enough to be worth the copy."""
        if int(over.sum()) < max(1, share * len(over)) or bool(over.all()):
            return
        self._keep_results(over)
        stay = torch.nonzero(~over).flatten()
        self.index, self.over = self.index[stay], over[stay]
        self.ascent = self.ascent.select(stay)
        self.problem = self.problem.select(stay)

    def finish(self) -> dict[str, Tensor]:
        """The variables that gave every domain its best bounds."""
        self._keep_results(torch.ones_like(self.index, dtype=torch.bool))
        return self.results

    def _keep_results(self, chosen: Tensor) -> None:
        where = self.index[chosen]
        for name, values in self.ascent.best_values.items():
            self.results[name][where] = values[chosen]


def _select(rows: Tensor | OneHot, domains: Tensor) -> Tensor | OneHot:
    return rows if isinstance(rows, OneHot) or len(rows) == 1 else rows[domains]
