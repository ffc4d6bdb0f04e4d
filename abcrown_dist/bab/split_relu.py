"""Splitting by the signs of pre-activations, bounds by beta-CROWN."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from abcrown_dist.bab.combination import Combination, averaged, judge_combined, judge_shifted, sharpened
from abcrown_dist.bab.domains import Domains, child_ident, concatenate, pad_last
from abcrown_dist.bab.flat import flat_points
from abcrown_dist.bab.goals import Goals
from abcrown_dist.bab.heuristics import Branching, Chooser, Rows
from abcrown_dist.bab.judge import Judge, lost_by_rounding, stays_finite
from abcrown_dist.bab.leaves import Leaf, LeafPrograms
from abcrown_dist.bab.neurons import Neurons
from abcrown_dist.bab.slices import slices
from abcrown_dist.bab.snapshot import root_tensors
from abcrown_dist.bab.splitter import Bounded, Branched, Examined, by_levels, joined
from abcrown_dist.bounds.backward import Start, lower_bound
from abcrown_dist.bounds.beta import BetaSettings, Problem, Splits, cut_interval, impose, maximise
from abcrown_dist.bounds.concretize import Box
from abcrown_dist.bounds.intervals import combine
from abcrown_dist.bounds.propagate import bound_intermediate
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.bounds.types import Interval, Relaxed, RowBounds
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.weights.base import Weights
from abcrown_dist.weights.evaluate import split_inputs


@dataclass(frozen=True)
class ReluSettings:
    """How neurons are chosen and domains bounded.

    Attributes:
        beta: the optimisation in every domain.
        root: the same at the root.
        bounds: how pre-activations are bounded at the root.
        branching: how neurons are chosen.
        recompute: how later pre-activations are bounded anew in every domain; None: they are not.
        slice: domains bounded at once, filled up where there are fewer, so that results do not depend on
            how many come together; None: all of them.
    """

    beta: BetaSettings
    root: BetaSettings
    bounds: BoundSettings
    branching: Branching = field(default_factory=Branching)
    recompute: BoundSettings | None = None
    slice: int | None = None


class ReluSplitter:
    """Domains of one box, cut out by decisions  sign z_i >= 0.

    State of a domain: `neuron` and `sign` (D) of its decisions (sign 0: none), their multipliers `beta`
    (R, D), slopes `alpha` (R, U) of the neurons that are loose at the root, and `row` (1), the row of its
    goal that is nearest to proof. Where a goal has several rows, the last of the R rows is a combination of
    the others with the multipliers `lambda`. `settled` (1) marks domains that splitting will never decide.

    Args:
        weights: of the network.
        box: one domain.
        relaxed: bounds of all pre-activations over the box.
        goals: about this box.
        largest: greatest finite number of the model's own dtype.
    """

    def __init__(
        self,
        weights: Weights,
        box: Box,
        relaxed: Relaxed,
        goals: Goals,
        largest: float,
        settings: ReluSettings,
        deadline: Deadline,
    ) -> None:
        self.weights, self.box, self.relaxed, self.goals = weights, box, relaxed, goals
        self.settings, self.deadline = settings, deadline
        self.disjuncts = goals.disjunct
        self.neurons = Neurons.of(weights, relaxed, everywhere=settings.slice is not None)
        self.chooser = Chooser(self.neurons, settings.branching)
        sane = stays_finite(weights, relaxed, largest)[:, None].expand(len(goals), 1)
        lost = lost_by_rounding(weights, goals.lost, relaxed, box, goals.rhs)
        self.judge = Judge(goals.rhs, lost, sane, goals.strict, goals.groups)
        self.combination = Combination.of(weights, goals)
        self._programs: LeafPrograms | None = None

    def roots(self) -> Domains:
        """The whole box, once for every goal, with CROWN's slopes."""
        count, rows = self.goals.rhs.shape
        lam = torch.zeros(count, 0, dtype=self.weights.dtype, device=self.weights.device)
        if self.combination is not None:
            every = torch.arange(count, device=self.weights.device)
            lam = self.combination.first(self.weights, self.relaxed, self.box, every)
            rows += 1
        device = self.weights.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(count, *shape, dtype=dtype, device=device)

        return Domains(
            margin=torch.full((count,), -torch.inf, dtype=torch.float64, device=device),
            goal=torch.arange(count, device=device),
            ident=child_ident(zeros(), torch.tensor(self.disjuncts, device=device)),
            depth=zeros(),
            state={
                "neuron": zeros(0, dtype=torch.int32),
                "sign": zeros(0, dtype=torch.int8),
                "alpha": self.neurons.movable.default(self.relaxed, rows, count).clone(),
                "beta": zeros(rows, 0, dtype=self.weights.dtype),
                "row": zeros(1),
                "lambda": lam,
                "settled": zeros(1, dtype=torch.bool),
            },
        )

    def bound(self, domains: Domains) -> Bounded:
        """Optimise slopes and multipliers, starting from the parents'."""
        pieces = slices(_without_gaps(domains), self.settings.slice)
        return joined([self._bound(piece).first(real) for piece, real in pieces])

    def branch(self, domains: Domains, levels: int) -> Branched:
        """Decide on the best `levels` neurons of each domain, both ways."""
        domains = _without_gaps(domains)
        # Where the model's own numbers may overflow, no decision will prove anything.
        free = self._free(domains).sum(1) * self.judge.sane[domains.goal, 0]
        free = free * ~domains.state["settled"][:, 0]
        leaves, domains = domains.select(free == 0), domains.select(free > 0)
        if not len(domains):
            return Branched(domains, leaves)
        children = []
        for part, count in by_levels(domains, free[free > 0], levels):
            pieces = slices(part, self.settings.slice)
            chosen = [self.chooser.choose(self._rows(piece), count)[:real] for piece, real in pieces]
            children.append(_children(part, torch.cat(chosen)))
        return Branched(concatenate(children), leaves)

    def examine(self, leaves: Domains) -> Examined:
        """By linear programs over all constraints of each leaf, in which the network is affine."""
        domains = _without_gaps(leaves)
        if self._programs is None:
            self._programs = LeafPrograms(self.weights, self.box, self.goals)
        each = [self._leaf(domains.select(slice(i, i + 1))) for i in range(len(domains))]
        found = self._programs.examine(each, self.deadline)
        # The program knows nothing of a model whose own numbers overflow.
        return dataclasses.replace(found, proven=found.proven & self.judge.sane[domains.goal, 0])

    def columns(self) -> dict[str, Tensor]:
        """Slopes: the numbers of this rank's loose neurons among all neurons of all nonlinear nodes."""
        parts, first = [], 0
        for name, index in self.neurons.movable.index.items():
            node = self.weights.graph[name]
            numbers = torch.arange(node.size, device=index.device).reshape(node.shape)
            parts.append(first + self.weights.own(name, numbers).flatten()[index])
            first += node.size
        return {"alpha": torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)}

    def root(self) -> dict[str, Tensor]:
        """Bounds over the whole box."""
        return root_tensors(self.weights, self.relaxed)

    def _leaf(self, domain: Domains) -> Leaf:
        splits = self._splits(domain)
        relaxed = self._relax(splits, 1) if self.settings.recompute else self.relaxed
        return Leaf(int(domain.goal[0]), relaxed, splits)

    def _bound(self, domains: Domains) -> Bounded:
        state, goal, count = domains.state, domains.goal, len(domains)
        splits = self._splits(domains)
        judge = shifted = self.judge.select(goal)
        if self.combination is not None:
            shifted = judge_shifted(judge, self.combination.unit[goal])

        def decided(best: RowBounds, index: Tensor) -> Tensor:
            here = shifted.select(index)
            margin, error = here.weigh(best)
            return here.refuted(margin > 2 * error)  # twice: the error is measured again at the end

        at_root = bool((domains.depth == 0).all())
        problem = self._problem(self.goals.start(goal), splits, count)
        if self.combination is not None:
            problem = dataclasses.replace(problem, mixture=self.combination.mixture(goal))
        found = maximise(
            problem,
            state["alpha"],
            state["beta"],
            self.settings.root if at_root else self.settings.beta,
            decided,
            self.deadline,
            state["lambda"],
        )
        bounds, combined = found.bounds, None
        if problem.mixture is not None and found.lam is not None:
            combined = problem.mixture.combined(found.lam)
            judge = judge_combined(self.weights, judge, combined, self.relaxed, self.box)
            bounds = sharpened(self.weights, bounds, combined)
        margin, error = judge.weigh(bounds)
        proven, doubtful = judge.verdicts(margin, error)
        margin = margin if combined is None else averaged(margin, combined)
        best, row = judge.nearest(margin)
        every = torch.arange(count, device=row.device)
        points = {
            name: part.expand(count, *part.shape[1:])[every, row] for name, part in found.points.items()
        }
        new = {**state, "alpha": found.alpha, "beta": found.beta, "row": row[:, None]}
        if found.lam is not None:
            new["lambda"] = found.lam
        found_points = flat_points(self.weights, self.box, points, count)
        if self.weights.group.any_true(bool(doubtful.any())):
            start = problem.at(found.lam).start
            touching = self._touching(start, splits, judge, found_points)
            new["settled"] = new["settled"] | (touching & doubtful)[:, None]
        return Bounded(
            # What was shown of the parent holds in its parts.
            dataclasses.replace(domains, margin=torch.maximum(domains.margin, best), state=new),
            proven,
            doubtful,
            found_points,
        )

    def _touching(self, start: Start, splits: Splits, judge: Judge, points: Tensor) -> Tensor:
        """Mask (N,) of domains that hold a point over which alone bounds prove nothing either.

        Any cover of the domain contains it. Where the domain's own bound is within rounding of proof, what is
        asked for holds on an edge at most.
        """
        weights = self.weights
        parts = split_inputs(weights.graph, points.to(weights.dtype))
        at = {name: weights.own(name, part) for name, part in parts.items()}
        at = {
            name: torch.clamp(part, self.box.lower[name], self.box.upper[name]) for name, part in at.items()
        }
        box = Box(at, at)
        relaxed = bound_intermediate(weights, box, BoundSettings(method="ibp"), self.deadline)
        margin, error = judge.weigh(lower_bound(weights, start, relaxed, box))
        outside = torch.zeros(len(points), dtype=weights.dtype, device=weights.device)
        for name, split in splits.items():
            item = relaxed.intervals[name]
            low, high = ((side.flatten(1)).gather(1, split.index) for side in (item.lower, item.upper))
            against = torch.where(split.sign > 0, high < 0, low > 0) & (split.sign != 0)
            outside += against.sum(1).to(weights.dtype)
        return ~judge.refuted(judge.proves(margin, error)) & (weights.total(outside) == 0)

    def _rows(self, domains: Domains) -> Rows:
        """The row of each domain that is nearest to proof."""
        state, goal = domains.state, domains.goal
        every = torch.arange(len(domains), device=goal.device)
        row = state["row"][:, 0]
        start, enough = self._chosen(goal, row, state["lambda"])
        return Rows(
            problem=self._problem(start, self._splits(domains), len(domains)),
            neuron=state["neuron"],
            sign=state["sign"],
            alpha=state["alpha"][every, row][:, None],
            beta=state["beta"][every, row][:, None],
            enough=enough,
            free=self._free(domains),
        )

    def _chosen(self, goal: Tensor, row: Tensor, lam: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """One row (B, 1, *shape) of each domain, or the combination, and the bound (B,) that refutes it."""
        last = self.goals.rhs.shape[1]
        single = row.clamp(max=last - 1)
        start, enough = self.goals.start(goal, single), self.goals.rhs[goal, single]
        if self.combination is None or not bool((row == last).any()):
            return start, enough
        mixed = self.combination.mixture(goal, alone=True).combined(lam)
        for name, part in mixed.rows.items():
            here = (row == last).reshape(-1, *[1] * part.dim())
            start[name] = torch.where(here, part[:, None], start[name])
        return start, torch.where(row == last, mixed.rhs, enough)

    def _problem(self, start: dict[str, Tensor], splits: Splits, count: int) -> Problem:
        relaxed = self._relax(splits, count)
        return Problem(self.weights, start, relaxed, self.box, splits, self.neurons.movable)

    def _splits(self, domains: Domains) -> Splits:
        return self.neurons.splits(domains.state["neuron"].long(), domains.state["sign"])

    def _free(self, domains: Domains) -> Tensor:
        """(N, neurons), which a domain may still decide on."""
        neuron, sign = domains.state["neuron"].long(), domains.state["sign"]
        taken = torch.zeros(len(domains), len(self.neurons.loose), dtype=torch.int8, device=sign.device)
        taken.scatter_reduce_(1, neuron, sign.abs(), "amax")
        return self.neurons.loose & (taken == 0)

    def _relax(self, splits: Splits, count: int) -> Relaxed:
        if self.settings.recompute is None or not splits:
            return impose(self.relaxed, splits)

        def refine(name: str, interval: Interval) -> Interval:
            known = self.relaxed.intervals[name]
            if name in splits:
                known = cut_interval(known, splits[name])
            found = combine(known, interval, True)
            # Bounds cross where no input makes all decisions: what is known of the root holds there too.
            lost = found.lower.isnan() | found.upper.isnan()
            return Interval(
                torch.where(lost, known.lower, found.lower), torch.where(lost, known.upper, found.upper)
            )

        every = torch.zeros(count, dtype=torch.int64, device=self.weights.device)
        boxes = self.box.select(every)
        return bound_intermediate(self.weights, boxes, self.settings.recompute, self.deadline, refine)


def _children(domains: Domains, chosen: Tensor) -> Domains:
    """All sign patterns of the neurons `chosen` (N, levels), N 2^levels domains."""
    levels = chosen.shape[1]
    patterns = torch.tensor(list(itertools.product((1, -1), repeat=levels)), device=chosen.device)
    parents = torch.arange(len(domains), device=chosen.device).repeat_interleave(len(patterns))
    neurons, signs = chosen[parents], patterns.repeat(len(domains), 1)
    born = domains.select(parents)
    state = dict(born.state)
    state["neuron"] = torch.cat([state["neuron"], neurons.to(torch.int32)], dim=1)
    state["sign"] = torch.cat([state["sign"], signs.to(torch.int8)], dim=1)
    state["beta"] = pad_last(state["beta"], state["sign"].shape[1])
    ident = born.ident
    for level in range(levels):
        ident = child_ident(ident, neurons[:, level], signs[:, level])
    return Domains(born.margin, born.goal, ident, born.depth + levels, state)


def _without_gaps(domains: Domains) -> Domains:
    """The same domains with their decisions moved to the front, in no more columns than are needed."""
    state = dict(domains.state)
    sign = state["sign"]
    if not sign.shape[1]:
        return domains
    width = int((sign != 0).sum(1).max()) if len(sign) else 0
    order = (sign == 0).to(torch.int8).argsort(dim=1, stable=True)[:, :width]
    state["sign"], state["neuron"] = sign.gather(1, order), state["neuron"].gather(1, order)
    columns = order[:, None].expand(-1, state["beta"].shape[1], -1)
    state["beta"] = state["beta"].gather(2, columns)
    return dataclasses.replace(domains, state=state)
