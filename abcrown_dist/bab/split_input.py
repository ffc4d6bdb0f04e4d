"""Splitting boxes: every domain is a smaller box, bounded from scratch.

What a bound shows of a part of a box is used at once: a counterexample must fulfil every row, and
A x + b lies below a row, so that it can only be where  A x + b <= rhs  (a contraction of the box by linear
constraints, as in interval constraint programming; for verification Zhou et al., "Clip-and-Verify", 2025).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from abcrown_dist.bab.combination import Combination, averaged, judge_combined, sharpened
from abcrown_dist.bab.domains import Domains, child_ident, concatenate
from abcrown_dist.bab.flat import flat, flat_points, flat_rows
from abcrown_dist.bab.goals import Goals
from abcrown_dist.bab.judge import Judge, lost_by_rounding, stays_finite
from abcrown_dist.bab.slices import best, slices
from abcrown_dist.bab.splitter import Bounded, Branched, Examined, by_levels, joined
from abcrown_dist.bounds import alpha
from abcrown_dist.bounds.backward import LinearBound, Start, back_substitute, concretize
from abcrown_dist.bounds.concretize import Box
from abcrown_dist.bounds.mixture import normalised
from abcrown_dist.bounds.multipliers import best_multipliers
from abcrown_dist.bounds.propagate import bound_intermediate
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.bounds.types import Relaxed
from abcrown_dist.spec.junctions import fulfilled_by_all
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.util.numerics import round_down, round_up, unit_roundoff
from abcrown_dist.weights.base import Weights
from abcrown_dist.weights.evaluate import split_inputs

_DEEPEST_INSANE = 12  # decisions
_NARROW = 16  # roundings: an edge of fewer is not worth splitting


@dataclass(frozen=True)
class InputSettings:
    """How boxes are split and bounded.

    Attributes:
        bounds: how pre-activations are bounded; rows are always bounded backwards, with optimised slopes
            if the method says so for them.
        method: sb (the input that the bound depends on most) or naive (the longest edge).
        clip: contract boxes by the rows' own linear bounds.
        slice: as for `split_relu.ReluSettings`.
    """

    bounds: BoundSettings
    method: str = "sb"
    clip: bool = True
    slice: int | None = None


class InputSplitter:
    """Domains that are boxes: state `lower` and `upper` (inputs), and `score` (inputs) of their edges.

    Where a goal has several rows, state `lambda` (R) are their multipliers in a combination, which is one
    row more. State `settled` (1) marks boxes that splitting will never decide.

    Args:
        weights: of the network.
        box: one box for every entry of `goals.box` to name.
        goals: what is to be refuted.
        largest: greatest finite number of the model's own dtype.
    """

    def __init__(
        self,
        weights: Weights,
        box: Box,
        goals: Goals,
        largest: float,
        settings: InputSettings,
        deadline: Deadline,
    ) -> None:
        self.weights, self.box, self.goals, self.largest = weights, box, goals, largest
        self.settings, self.deadline = settings, deadline
        self.disjuncts = goals.disjunct
        self._precise: Weights | None = None
        self.combination = Combination.of(weights, goals)

    def roots(self) -> Domains:
        """The box of every goal."""
        count, device = len(self.goals), self.weights.device
        lower, upper = (flat(self.weights, side)[self.goals.box] for side in (self.box.lower, self.box.upper))
        disjuncts = torch.tensor(self.disjuncts, dtype=torch.int64, device=device)
        lam = torch.zeros(count, 0, dtype=self.weights.dtype, device=device)
        if self.combination is not None:
            every = torch.arange(count, device=device)
            lam = self.combination.mixture(every).uniform(self.weights.dtype)
        return Domains(
            margin=torch.full((count,), -torch.inf, dtype=torch.float64, device=device),
            goal=torch.arange(count, device=device),
            ident=child_ident(torch.zeros_like(disjuncts), disjuncts),
            depth=torch.zeros(count, dtype=torch.int64, device=device),
            state={
                "lower": lower,
                "upper": upper,
                "score": upper - lower,
                "sane": torch.ones(count, 1, dtype=torch.bool, device=device),
                "lambda": lam,
                "settled": torch.zeros(count, 1, dtype=torch.bool, device=device),
            },
        )

    def bound(self, domains: Domains) -> Bounded:
        """Bound boxes, in float64 where rounding alone leaves them open, and cut off what is refuted."""
        pieces = slices(domains, self.settings.slice)
        bounded = joined([self._bound(piece).first(real) for piece, real in pieces])
        doubtful = torch.nonzero(bounded.doubtful).flatten()
        again = self._in_float64(domains.select(doubtful)) if len(doubtful) else None
        if again is not None:
            bounded.proven[doubtful], bounded.doubtful[doubtful] = again.proven, again.doubtful
            bounded.domains.margin[doubtful] = again.domains.margin
            bounded.domains.state["settled"][doubtful] = again.domains.state["settled"]
        elif len(doubtful):
            bounded.domains.state["settled"][doubtful] = self._touching(bounded, doubtful)
        return bounded

    def _touching(self, bounded: Bounded, index: Tensor) -> Tensor:
        """Mask (n, 1) of the boxes `index` that no splitting will decide.

        Their bounds are within rounding of proof, and so is the bound over nothing but their minimiser, which
        every cover of the box contains: what is asked for holds on an edge at most.
        """
        domains = bounded.domains.select(index)
        lower, upper = domains.state["lower"], domains.state["upper"]
        x = torch.clamp(bounded.points[index].to(lower.dtype), lower, upper)
        point = replace(domains, state={**domains.state, "lower": x, "upper": x})
        pieces = slices(point, self.settings.slice)
        proven = torch.cat([self._bound(piece).first(real).proven for piece, real in pieces])
        return ~proven[:, None]

    def branch(self, domains: Domains, levels: int) -> Branched:
        """Halve the `levels` most promising edges of each box."""
        lower, upper = domains.state["lower"], domains.state["upper"]
        least = _NARROW * unit_roundoff(lower.dtype) * torch.maximum(lower.abs(), upper.abs())
        least = least.clamp(min=torch.finfo(lower.dtype).tiny)  # halves of subnormal numbers may be whole
        wide = (upper - lower > least) & ~domains.state["settled"]
        # Where the model may overflow, halving seldom helps, and never ends by itself.
        wide &= domains.state["sane"] | (domains.depth < _DEEPEST_INSANE)[:, None]
        count = wide.sum(1)
        leaves, domains = domains.select(count == 0), domains.select(count > 0)
        if not len(domains):
            return Branched(domains, leaves)
        width = domains.state["upper"] - domains.state["lower"]
        score = width if self.settings.method == "naive" else domains.state["score"]
        score = score.nan_to_num(nan=0.0).masked_fill(~wide[count > 0], -torch.inf)
        domains = replace(domains, state={**domains.state, "score": score})  # children get their own
        parts = by_levels(domains, count[count > 0], levels)
        steady = self.settings.slice is not None
        children = [_halves(part, best(part.state["score"], often, steady)) for part, often in parts]
        return Branched(concatenate(children), leaves)

    def examine(self, leaves: Domains) -> Examined:
        """Boxes too narrow to be split: bounded once more in float64."""
        bounded = self._in_float64(leaves)
        if bounded is None:
            middle = (leaves.state["lower"] / 2 + leaves.state["upper"] / 2).double()
            return Examined(torch.zeros_like(leaves.goal, dtype=torch.bool), leaves.margin, middle)
        return Examined(bounded.proven, bounded.domains.margin, bounded.points)

    def columns(self) -> dict[str, Tensor]:
        """Boxes are whole on every rank."""
        return {}

    def root(self) -> dict[str, Tensor]:
        """A box is all that is needed."""
        return {}

    def _in_float64(self, domains: Domains) -> Bounded | None:
        """The same boxes bounded in float64; None if they are already, or the weights cannot be."""
        if self.weights.dtype == torch.float64:
            return None
        if self._precise is None:
            self._precise = self.weights.to(torch.float64)
        if self._precise is None:
            return None
        goals = replace(self.goals, rows=_double(self.goals.rows), lost=_double(self.goals.lost))
        box = Box(_double(self.box.lower), _double(self.box.upper))
        twin = InputSplitter(self._precise, box, goals, self.largest, self.settings, self.deadline)
        return twin.bound(replace(domains, state=_double(domains.state)))

    def _bound(self, domains: Domains) -> Bounded:
        weights, goal, count = self.weights, domains.goal, len(domains)
        lower, upper = domains.state["lower"], domains.state["upper"]
        box = Box(self._own(lower), self._own(upper))
        relaxed = bound_intermediate(weights, box, self.settings.bounds, self.deadline)
        start, combined, lam = self.goals.start(goal), None, domains.state["lambda"]
        if self.combination is not None:
            mixture, at_root = self.combination.mixture(goal), (domains.depth == 0)[:, None]
            if bool(at_root.any()):
                lam = torch.where(at_root, self.combination.first(weights, relaxed, box, goal), lam)
            combined = mixture.combined(lam)
            start = mixture.with_last(combined.rows)
        linear = self._rows(start, relaxed, box)
        bounds = concretize(weights, linear, box)
        rhs = self.goals.rhs[goal]
        lost = {name: value[goal] for name, value in self.goals.lost.items()}
        judge = Judge(
            rhs,
            lost_by_rounding(weights, lost, relaxed, box, rhs),
            stays_finite(weights, relaxed, self.largest)[:, None],
            self.goals.strict[goal],
            self.goals.of_domains(goal),
        )
        if combined is not None:
            judge = judge_combined(weights, judge, combined, relaxed, box)
            bounds = sharpened(weights, bounds, combined)
        margin, error = judge.weigh(bounds)
        proven, doubtful = judge.verdicts(margin, error)
        compared = margin if combined is None else averaged(margin, combined)
        most, row = judge.nearest(compared)
        every = torch.arange(count, device=row.device)
        points = {
            name: part.expand(count, *part.shape[1:])[every, row]
            for name, part in box.minimiser(linear.A).items()
        }
        A = flat_rows(weights, linear, count)
        # Only of what every counterexample fulfils can be said where it must lie.
        shared = fulfilled_by_all(judge.proves(margin, error), judge.groups)
        error = error.masked_fill(~shared, torch.nan)
        if self.combination is not None and combined is not None:
            together = _Together.of(lower, upper, A, margin, error)
            found = together.tried(~proven, everywhere=self.settings.slice is not None)
            size = found.lam[:, :-1].sum(1) + found.lam[:, -1] * combined.factor.sum(1)
            most = torch.maximum(most, torch.where(size > 0, found.margin / size, -torch.inf))
            proven = proven | (found.margin > found.error)
            doubtful = (doubtful | (found.margin + found.error > 0)) & ~proven
            lam = _inherited(lam, found.lam, self.combination.unit[goal])
        if self.settings.clip:
            lower, upper = contracted(lower, upper, A, margin, error)
        weight = A[every, row].abs()
        # An input that the bound ignores here may matter in a part of the box.
        weight = torch.maximum(weight, 1e-3 * weight.amax(1, keepdim=True))
        state = {"lower": lower, "upper": upper, "score": weight * (upper - lower), "sane": judge.sane}
        state |= {"lambda": lam, "settled": domains.state["settled"]}
        return Bounded(
            # What was shown of the parent holds in its parts.
            replace(domains, margin=torch.maximum(domains.margin, most), state=state),
            proven,
            doubtful,
            flat_points(weights, box, points, count),
        )

    def _rows(self, start: Start, relaxed: Relaxed, box: Box) -> LinearBound:
        slopes: Mapping[str, Tensor] = {}
        if self.settings.bounds.final == "alpha-crown":
            slopes = alpha.maximise(
                self.weights, start, relaxed, box, self.settings.bounds.alpha,
                keep_alphas=True, deadline=self.deadline,
            ).alphas  # fmt: skip
        return back_substitute(self.weights, start, relaxed, alphas=slopes)

    def _own(self, flat: Tensor) -> dict[str, Tensor]:
        parts = split_inputs(self.weights.graph, flat)
        return {name: self.weights.own(name, part) for name, part in parts.items()}


@dataclass(frozen=True)
class _Found:
    """Combinations of the linear functions of N boxes.

    Attributes:
        margin, error: (N,) float64, their minima over the boxes and by how much they may be off; -inf and 0
            where none was looked for.
        lam: (N, R) float64, the multipliers; zeros there.
    """

    margin: Tensor
    error: Tensor
    lam: Tensor


@dataclass(frozen=True)
class _Together:
    """Linear functions below the rows of N boxes, in float64:  c + G u  for u in [-1, 1]^inputs.

    Attributes:
        G, c: (N, R, inputs) and (N, R), less the rows' right-hand sides.
        error: (N, R), by how much they may be off; NaN where they say nothing.
    """

    G: Tensor
    c: Tensor
    error: Tensor

    @classmethod
    def of(cls, lower: Tensor, upper: Tensor, A: Tensor, margin: Tensor, error: Tensor) -> _Together:
        """Arguments as for `contracted`."""
        low, high, slope = lower.double(), upper.double(), A.double()
        G = slope * (high / 2 - low / 2)[:, None]
        c = margin + G.abs().sum(2)
        size = torch.maximum(low.abs(), high.abs())
        # As in `contracted`: what float64 may round here.
        slack = 1e-12 * ((slope.abs() * size[:, None]).sum(2) + margin.abs() + c.abs())
        return cls(G, c, error + slack)

    def tried(self, wanted: Tensor, everywhere: bool) -> _Found:
        """The best combinations in the boxes `wanted` (mask), if any can prove something.

        Args:
            everywhere: work on all boxes, so that bits do not depend on the others.
        """
        allowed = self.error.isfinite() & self.c.isfinite()
        # In the middle of the box every function is negative: so is every combination.
        hopeful = (self.c > 0).logical_and(allowed).any(1) & (allowed.sum(1) > 1)
        here = torch.nonzero((wanted & hopeful) | everywhere).flatten()
        margin = torch.full_like(self.c[:, 0], -torch.inf)
        error, lam = torch.zeros_like(margin), torch.zeros_like(self.c)
        if len(here):
            G, c, allowed = self.G[here], self.c[here], allowed[here]
            found = best_multipliers(G, c, allowed)
            G, c = torch.where(allowed[:, :, None], G, 0.0), torch.where(allowed, c, 0.0)
            off = torch.where(allowed, self.error[here], 0.0)
            some = allowed.any(1)
            value = (found * c).sum(1) - torch.einsum("brn,br->bn", G, found).abs().sum(1)
            lam[here] = found
            margin[here] = value.masked_fill(~some | ~value.isfinite(), -torch.inf)
            error[here] = (found * off).sum(1) * (1 + 1e-12)
        return _Found(margin, error, lam)


def _inherited(lam: Tensor, found: Tensor, unit: Tensor) -> Tensor:
    """Multipliers (N, R) of the children's combination, whose parents' was a row of the one that was found.

    Args:
        lam: (N, R) that the parents' combination had.
        found: (N, R + 1) float64, zero where nothing was looked for.
        unit: (N, R), see `Mixture`.
    """
    new = found[:, :-1] / unit.clamp(min=1e-300) + found[:, -1:] * lam.double()
    new = torch.where(unit > 0, new, 0.0)
    count = (unit > 0).sum(1, keepdim=True)
    usable = new.isfinite().all(1, keepdim=True) & (new.sum(1, keepdim=True) > 0)
    return torch.where(usable, normalised(new, count).to(lam.dtype), lam)


def contracted(
    lower: Tensor, upper: Tensor, A: Tensor, margin: Tensor, error: Tensor
) -> tuple[Tensor, Tensor]:
    """The smallest boxes (N, inputs) that hold every point at which no row is refuted.

    Args:
        A: (N, R, inputs), slopes of linear functions below the rows over each box.
        margin, error: (N, R) float64, their minima over the box minus the rows' right-hand sides, and by
            how much these may be off; NaN where they say nothing.

    A row is refuted at x when its linear function exceeds it by more than the error. Moving one input i
    from where the function is least adds |A_i| times the way, and may add no more than what is missing.
    """
    low, high, slope = lower.double(), upper.double(), A.double()
    size = torch.maximum(low.abs(), high.abs())
    # Float64 rounds these sums by less than 1e-12 of their terms.
    slack = 1e-12 * ((slope.abs() * size[:, None]).sum(2) + margin.abs())
    missing = error + slack - margin
    way = missing[:, :, None] / slope.abs()  # infinite where the slope is zero
    way = way.nan_to_num(nan=torch.inf, posinf=torch.inf).clamp(min=0)
    infinite = torch.full_like(way, torch.inf)
    rise = torch.where(slope > 0, way, infinite).amin(1)
    fall = torch.where(slope < 0, way, infinite).amin(1)
    new_high = torch.minimum(high, low + rise + 1e-15 * size)
    new_low = torch.maximum(low, high - fall - 1e-15 * size)
    new_low, new_high = torch.minimum(new_low, high), torch.maximum(new_high, low)
    crossed = new_low > new_high  # nothing is left, which the next bound will show
    new_low, new_high = torch.where(crossed, low, new_low), torch.where(crossed, high, new_high)
    return (
        torch.maximum(round_down(new_low, lower.dtype), lower),
        torch.minimum(round_up(new_high, upper.dtype), upper),
    )


def _halves(domains: Domains, edges: Tensor) -> Domains:
    """All combinations of halves along the edges (N, levels)."""
    levels = edges.shape[1]
    sides = torch.tensor(list(itertools.product((0, 1), repeat=levels)), device=edges.device)
    parents = torch.arange(len(domains), device=edges.device).repeat_interleave(len(sides))
    chosen, side = edges[parents], sides.repeat(len(domains), 1)
    born = domains.select(parents)
    lower, upper = born.state["lower"].clone(), born.state["upper"].clone()
    low, high = lower.gather(1, chosen), upper.gather(1, chosen)
    middle = low / 2 + high / 2
    lower.scatter_(1, chosen, torch.where(side == 0, low, middle))
    upper.scatter_(1, chosen, torch.where(side == 0, middle, high))
    ident = born.ident
    for level in range(levels):
        ident = child_ident(ident, chosen[:, level], side[:, level])
    state = {**born.state, "lower": lower, "upper": upper}
    return Domains(born.margin, born.goal, ident, born.depth + levels, state)


def _double(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() if value.is_floating_point() else value for name, value in parts.items()}
