"""Rows of one disjunct combined: what judges the combination, and the pass over whole boxes that tries it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from abcrown_dist.bab.clauses import Clauses
from abcrown_dist.bab.goals import Goals
from abcrown_dist.bab.judge import Judge, lost_by_rounding
from abcrown_dist.bounds.beta import BetaSettings, Optimised, Problem, maximise
from abcrown_dist.bounds.concretize import Box
from abcrown_dist.bounds.mixture import Combined, Mixture, normalised, units
from abcrown_dist.bounds.multipliers import best_multipliers
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.bounds.slopes import Movable
from abcrown_dist.bounds.types import Relaxed, RowBounds
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.weights.base import Weights

_GOALS = 64  # disjuncts whose combinations are bounded at once
_NEAR, _LARGEST = 1e-5, 1e3  # of multipliers that count as whole numbers
_SURE = 2  # times the error: it is measured again at the end


@dataclass(frozen=True)
class Combination:
    """How the rows of goals are combined.

    Attributes:
        goals: with several rows each, some of them at least.
        unit: (G, R) float64, see `Mixture`.
    """

    goals: Goals
    unit: Tensor

    @classmethod
    def of(cls, weights: Weights, goals: Goals) -> Combination | None:
        """None where no goal has more than one row."""
        several = goals.combinable()
        if not bool(several.any()):
            return None
        return cls(goals, units(weights, goals.rows, several))

    def first(self, weights: Weights, relaxed: Relaxed, box: Box, goal: Tensor) -> Tensor:
        """Multipliers (B, R) to begin with, of domains with the goals (B,): one for every row.

        Where the outputs' own bounds show that rows contradict each other, those that show it best.
        """
        mixture, dtype = self.mixture(goal), weights.dtype
        uniform = mixture.uniform(dtype)
        rows, centre = [], []
        for name, part in mixture.rows.items():
            interval = relaxed.intervals.get(name) or box.interval(name)
            low, high = (weights.whole(name, side).flatten(1) for side in (interval.lower, interval.upper))
            whole = weights.whole(name, part).flatten(2).double().expand(len(goal), -1, -1)
            rows.append(whole * (high.double() / 2 - low.double() / 2)[:, None])
            centre.append((whole * (high.double() / 2 + low.double() / 2)[:, None]).sum(2))
        allowed = self.unit[goal] > 0
        c = torch.stack(centre).sum(0) - mixture.rhs.masked_fill(~allowed, 0.0)
        G, unit = torch.cat(rows, dim=2), self.unit[goal]
        lam = _plain(best_multipliers(G * unit[:, :, None], c * unit, allowed))
        value = (lam * unit * c).sum(1) - torch.einsum("brn,br->bn", G, lam * unit).abs().sum(1)
        count = allowed.sum(1, keepdim=True)
        return torch.where((value > 0)[:, None], normalised(lam, count).to(dtype), uniform)

    def mixture(self, goal: Tensor, alone: bool = False) -> Mixture:
        """The rows of domains with the goals (B,), to be combined."""
        rows = self.goals.start(goal)
        return Mixture(rows, self.goals.rhs[goal], self.unit[goal], alone)


def _plain(lam: Tensor) -> Tensor:
    """Multipliers (B, R) as small whole numbers, times a common factor, where they nearly are.

    Rows that cancel each other mostly do so with such numbers, which rounding must not spoil.
    """
    least = lam.masked_fill(lam <= 0, torch.inf).amin(1, keepdim=True)
    times = (lam / least).nan_to_num(0.0, 0.0, 0.0)
    near = ((times - times.round()).abs() < _NEAR * times.clamp(min=1)).all(1, keepdim=True)
    return torch.where(near & (times.amax(1, keepdim=True) < _LARGEST), times.round(), lam)


def judge_combined(
    weights: Weights, judge: Judge, combined: Combined, relaxed: Relaxed, box: Box, alone: bool = False
) -> Judge:
    """The judge of rows and their combination, or of this alone, given that of the rows by themselves."""
    several = combined.factor > 0
    # 1e-12: roundings of these few sums in float64.
    lost = (combined.factor * judge.lost.masked_fill(~several, 0.0)).sum(1) * (1 + 1e-12)
    gap = {name: part[:, None] for name, part in combined.gap.items()}
    like = combined.rhs[:, None]
    lost = lost[:, None] + lost_by_rounding(weights, gap, relaxed, box, like)
    rhs = like.masked_fill(~several.any(1, keepdim=True), torch.inf)
    strict = (several & judge.strict).any(1, keepdim=True)
    last = Judge(rhs, lost, judge.sane, strict)
    return last if alone else _joined(judge, last)


def judge_shifted(judge: Judge, unit: Tensor, alone: bool = False) -> Judge:
    """A judge of margins while multipliers move: of the combination, the right-hand side is off already.

    What its coefficients lose to rounding is not counted yet: the end measures it.
    """
    several = unit > 0
    count = several.sum(1, keepdim=True)
    lost = (judge.lost.masked_fill(~several, 0.0) * unit).amax(1, keepdim=True) * count
    rhs = torch.zeros_like(lost).masked_fill(count == 0, torch.inf)
    strict = torch.zeros_like(rhs, dtype=torch.bool)
    last = Judge(rhs, lost, judge.sane, strict)
    return last if alone else _joined(judge, last)


def _joined(judge: Judge, last: Judge) -> Judge:
    """The judge of the rows of both."""
    pairs = ((judge.rhs, last.rhs), (judge.lost, last.lost), (judge.strict, last.strict))
    rhs, lost, strict = (torch.cat(pair, dim=1) for pair in pairs)
    groups = judge.groups
    if groups is not None:
        own = torch.full_like(groups[..., :1], groups.shape[-1])
        groups = torch.cat([groups, own], dim=2)
    return Judge(rhs, lost, judge.sane, strict, groups)


def averaged(margin: Tensor, combined: Combined) -> Tensor:
    """Margins (B, R + 1) of which the last is that of an average of rows: at most the greatest of theirs."""
    size = combined.factor.sum(1, keepdim=True)
    last = torch.where(size > 0, margin[:, -1:] / size.clamp(min=1e-300), -torch.inf)
    return torch.cat([margin[:, :-1], last], dim=1)


def sharpened(weights: Weights, bounds: RowBounds, combined: Combined) -> RowBounds:
    """Bounds whose last row is a combination, which is 0 without error where all its coefficients are."""
    parts = [*combined.rows.values(), *combined.gap.values()]
    size = torch.stack([part.double().abs().flatten(1).sum(1) for part in parts]).sum(0)
    nothing = weights.total(size) == 0
    lower, error = (side.expand(len(nothing), -1).clone() for side in (bounds.lower, bounds.error))
    lower[:, -1] = torch.where(nothing, 0.0, lower[:, -1])
    error[:, -1] = torch.where(nothing, 0.0, error[:, -1])
    return RowBounds(lower, error)


def refute_combined(
    weights: Weights,
    clauses: Clauses,
    relaxed: Relaxed,
    sane: Tensor,
    wanted: set[int],
    settings: BoundSettings,
    deadline: Deadline,
) -> tuple[dict[int, float], set[int]]:
    """Disjuncts that a combination of their rows refutes, and those that only rounding leaves open.

    The former with the margin of an average of their rows.

    Args:
        sane: (B, 1), whether bounds over each of the clauses' boxes prove anything.

    Raises:
        DeadlineExceeded: between two iterations.
    """
    refuted: dict[int, float] = {}
    doubtful: set[int] = set()
    wanted = {index for index in wanted if int((clauses.disjunct == index).sum()) > 1}
    if not wanted:
        return refuted, doubtful
    goals = Goals.of(clauses, wanted)
    combination = Combination.of(weights, goals)
    if combination is None:
        return refuted, doubtful
    for piece in torch.arange(len(goals), device=goals.box.device).split(_GOALS):
        deadline.check()
        boxes = goals.box[piece]
        box, here = clauses.box.select(boxes), relaxed.select(boxes)
        mixture = combination.mixture(piece, alone=True)
        coefficients, rhs = {name: part[piece] for name, part in goals.lost.items()}, goals.rhs[piece]
        lost = lost_by_rounding(weights, coefficients, here, box, rhs)
        part = Judge(rhs, lost, sane[boxes], goals.strict[piece])
        lam = combination.first(weights, here, box, piece)
        found = _optimised(weights, mixture, lam, here, box, part, settings, deadline)
        assert found.lam is not None
        combined = mixture.combined(found.lam)
        last = judge_combined(weights, part, combined, here, box, alone=True)
        margin, error = last.weigh(sharpened(weights, found.bounds, combined))
        proven, open_by_rounding = last.verdicts(margin, error)
        size = combined.factor.sum(1)
        for i, g in enumerate(piece.tolist()):
            if proven[i]:
                refuted[goals.disjunct[g]] = float(margin[i, 0] / size[i])
            elif open_by_rounding[i]:
                doubtful.add(goals.disjunct[g])
    return refuted, doubtful


def _optimised(
    weights: Weights,
    mixture: Mixture,
    lam: Tensor,
    relaxed: Relaxed,
    box: Box,
    judge: Judge,
    settings: BoundSettings,
    deadline: Deadline,
) -> Optimised:
    """Better multipliers and slopes, if the method optimises, over whole boxes."""
    count, movable = len(mixture.unit), Movable.of(relaxed)
    alpha = movable.default(relaxed, 1, count).clone()
    steps, best = settings.alpha, settings.final == "alpha-crown"
    race = BetaSettings(
        iteration=max(1, steps.iteration if best else 1),
        lr_alpha=steps.lr_alpha,
        lr_decay=steps.lr_decay,
        early_stop_patience=steps.early_stop_patience,
    )
    shifted = judge_shifted(judge, mixture.unit, alone=True)

    def decided(best: RowBounds, index: Tensor) -> Tensor:
        margin, error = shifted.select(index).weigh(best)
        return (margin > _SURE * error).any(1)

    return maximise(
        Problem(weights, mixture.start(lam), relaxed, box, {}, movable, mixture),
        alpha, alpha.new_zeros(count, 1, 0), race, decided, deadline, lam,
    )  # fmt: skip
