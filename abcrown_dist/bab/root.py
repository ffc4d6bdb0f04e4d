"""Incomplete verification: refute disjuncts by bounds over their whole boxes (design rules 7.1, 7.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from abcrown_dist.bab.clauses import Clauses, batches
from abcrown_dist.bounds.backward import back_substitute
from abcrown_dist.bounds.concretize import contract
from abcrown_dist.bounds.propagate import bound_intermediate, bound_rows
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.bounds.types import Relaxed, RowBounds
from abcrown_dist.spec.property import Property
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.util.numerics import unit_roundoff
from abcrown_dist.weights.base import Weights

_MOST_SUSPECTS = 64  # points per batch that are worth trying as counterexamples


@dataclass
class Refutation:
    """What one bounding of some disjuncts found.

    Attributes:
        refuted: disjuncts that cannot be fulfilled.
        doubtful: disjuncts that are open only because a bound is within its rounding error of proof.
        margins: by disjunct, lower bound minus right-hand side of each of its rows.
        suspects: (disjunct, flat input in float64): minimisers of open rows, possible counterexamples.
    """

    refuted: set[int] = field(default_factory=set)
    doubtful: set[int] = field(default_factory=set)
    margins: dict[int, list[float]] = field(default_factory=dict)
    suspects: list[tuple[int, np.ndarray]] = field(default_factory=list)

    def absorb(self, other: Refutation) -> None:
        """Add what a further bounding found; its margins replace older ones."""
        self.refuted |= other.refuted
        self.doubtful = (self.doubtful | other.doubtful) - self.refuted
        self.margins.update(other.margins)
        self.suspects += other.suspects


def refute(
    weights: Weights,
    prop: Property,
    wanted: Sequence[int],
    settings: BoundSettings,
    *,
    batch_size: int,
    largest: float,
    deadline: Deadline,
    model_dtype: torch.dtype | None = None,
) -> Refutation:
    """Bound the disjuncts `wanted` with one method.

    Args:
        weights: of a network whose nonlinear ops all have relaxations.
        batch_size: boxes bounded at once.
        largest: greatest finite number of the model's own dtype. A network that may exceed it
            computes infinities where real arithmetic does not, so that bounds prove nothing.
        model_dtype: type in which the model takes its inputs; default that of the weights.

    Raises:
        DeadlineExceeded: between two chunks of rows.
    """
    result = Refutation()
    with torch.no_grad():
        for clauses in batches(prop, weights, wanted, batch_size, model_dtype):
            deadline.check()
            relaxed = bound_intermediate(weights, clauses.box, settings, deadline)
            sane = _stays_finite(weights, relaxed, largest)[:, None]
            judge = _Judge(clauses.rhs, _lost(weights, clauses, relaxed), sane)

            def enough(
                best: RowBounds, rows: Tensor, clauses: Clauses = clauses, judge: _Judge = judge
            ) -> bool:
                margin, error = judge.weigh(best, rows)
                return clauses.content(margin > error, rows)

            bounds = bound_rows(weights, clauses.box, relaxed, clauses.rows, settings, deadline, enough)
            margin, error = judge.weigh(bounds)
            part = Refutation(clauses.refuted(margin > error), margins=_by_disjunct(clauses, margin))
            part.doubtful = clauses.refuted(margin + error > 0) - part.refuted
            part.suspects = _suspects(weights, clauses, relaxed, part.refuted)
            result.absorb(part)
    return result


@dataclass(frozen=True)
class _Judge:
    """What bounds of some clauses prove.

    Attributes:
        rhs: (B, R) float64.
        lost: (B, R) float64, by how much rounded coefficients may have moved a row.
        sane: (B, 1), whether bounds over the domain prove anything.
    """

    rhs: Tensor
    lost: Tensor
    sane: Tensor

    def weigh(self, bounds: RowBounds, rows: Tensor | slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Margins lower - rhs of some rows and their errors, in float64; NaN where nothing is proven."""
        lower, rhs = bounds.lower.double(), self.rhs[:, rows]
        margin = lower - rhs
        subtraction = 2 * unit_roundoff(torch.float64) * (lower.abs() + rhs.abs())
        error = bounds.error.double() + self.lost[:, rows] + subtraction
        return margin, torch.where(margin.isfinite() & self.sane, error, torch.nan)


def _lost(weights: Weights, clauses: Clauses, relaxed: Relaxed) -> Tensor:
    """By how much rounding the coefficients to the dtype may have moved a row, (B, R)."""
    total = torch.zeros_like(clauses.rhs)
    for name, lost in clauses.lost.items():
        interval = relaxed.intervals.get(name) or clauses.box.interval(name)
        total += contract(lost.flatten(2), interval.magnitude).double()
    return weights.total(total)


def _stays_finite(weights: Weights, relaxed: Relaxed, largest: float) -> Tensor:
    """Bool (B,): no value that the network computes in a domain can reach `largest`."""
    sane: Tensor | None = None
    for interval in relaxed.intervals.values():
        good = (interval.magnitude < largest).flatten(1).all(1)
        sane = good if sane is None else sane & good
    for rate in relaxed.sensitivity.values():
        # A sensitivity is at least 4 u times the magnitudes that its node sums up.
        good = (rate < 4 * unit_roundoff(rate.dtype) * largest).flatten(1).all(1)
        sane = good if sane is None else sane & good
    assert sane is not None
    return weights.total((~sane).to(weights.dtype)) == 0


def _by_disjunct(clauses: Clauses, margin: Tensor) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for owner, value in zip(clauses.disjunct.flatten().tolist(), margin.flatten().tolist(), strict=True):
        if owner >= 0:
            found.setdefault(owner, []).append(value)
    return found


def _suspects(
    weights: Weights, clauses: Clauses, relaxed: Relaxed, refuted: set[int]
) -> list[tuple[int, np.ndarray]]:
    """Minimisers of the plain CROWN bounds of the first open rows."""
    is_open = clauses.disjunct >= 0
    for index in refuted:
        is_open &= clauses.disjunct != index
    columns = torch.nonzero(is_open.any(0)).flatten()[:_MOST_SUSPECTS]
    if not len(columns):
        return []
    start = {name: rows[:, columns] for name, rows in clauses.rows.items()}
    linear = back_substitute(weights, start, relaxed, track_error=False)
    points = clauses.box.minimiser(linear.A)
    graph = weights.graph
    for name in graph.inputs:  # an input that the rows do not depend on may be anywhere
        if name not in points:
            low = clauses.box.lower[name][:, None]
            points[name] = low.expand(len(low), len(columns), *low.shape[2:])
    parts = [weights.whole(name, points[name]).flatten(2) for name in graph.inputs]
    flat = torch.cat(parts, dim=2).double().cpu().numpy()
    found = []
    for b, column in torch.nonzero(is_open[:, columns])[:_MOST_SUSPECTS].tolist():
        found.append((int(clauses.disjunct[b, columns[column]]), flat[b, column]))
    return found
