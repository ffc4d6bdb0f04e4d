"""Incomplete verification: refute disjuncts by bounds over their whole boxes (design rules 7.1, 7.2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from abcrown_dist.bab.clauses import Clauses, batches
from abcrown_dist.bab.combination import refute_combined
from abcrown_dist.bab.judge import Judge, lost_by_rounding, stays_finite
from abcrown_dist.bounds.backward import back_substitute
from abcrown_dist.bounds.propagate import bound_intermediate, bound_rows
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.bounds.types import Relaxed, RowBounds
from abcrown_dist.parallel.group import Group
from abcrown_dist.spec.junctions import fold
from abcrown_dist.spec.property import Property
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.weights.base import Weights

_MOST_SUSPECTS = 64  # points per batch that are worth trying as counterexamples


@dataclass(frozen=True)
class Root:
    """A batch of boxes that bounds leave open, for branching to begin with.

    Attributes:
        clauses: the boxes' rows.
        relaxed: bounds of all pre-activations over each box.
    """

    clauses: Clauses
    relaxed: Relaxed


@dataclass(frozen=True)
class OneBox:
    """One box of a root.

    Attributes:
        root: of this box alone.
        disjuncts: those of its disjuncts that are open.
    """

    root: Root
    disjuncts: tuple[int, ...]

    @classmethod
    def each(cls, root: Root, is_open: set[int]) -> Iterator[OneBox]:
        """The boxes of a batch that have open disjuncts."""
        for b in range(root.clauses.box.domains):
            mine = tuple(sorted(is_open & set(root.clauses.disjunct[b].tolist())))
            if mine:
                here = torch.tensor([b], device=root.clauses.rhs.device)
                yield cls(Root(root.clauses.select(here), root.relaxed.select(here)), mine)


@dataclass
class Refutation:
    """What one bounding of some disjuncts found.

    Attributes:
        refuted: disjuncts that cannot be fulfilled.
        doubtful: disjuncts that are open only because a bound is within its rounding error of proof.
        margins: by disjunct, lower bound minus right-hand side of each of its rows (of each row's factor);
            then, where it took a combination of these to refute it, that of their average.
        suspects: (disjunct, flat input in float64): minimisers of open rows, possible counterexamples.
        roots: the batch of boxes; none where the property has several, whose bounds together may take more
            memory than there is.
    """

    refuted: set[int] = field(default_factory=set)
    doubtful: set[int] = field(default_factory=set)
    margins: dict[int, list[float]] = field(default_factory=dict)
    suspects: list[tuple[int, np.ndarray]] = field(default_factory=list)
    roots: list[Root] = field(default_factory=list)

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
    deadline: Deadline,
    model_dtype: torch.dtype | None = None,
    largest: float | None = None,
) -> Refutation:
    """Bound the disjuncts `wanted` with one method.

    Args:
        weights: of a network whose nonlinear ops all have relaxations.
        batch_size: boxes bounded at once.
        model_dtype: type in which the model takes its inputs; default that of the weights.
        largest: greatest number that the model knows; default that of `model_dtype`. A network that may
            exceed it computes infinities where real arithmetic does not, so that bounds prove nothing.

    Raises:
        DeadlineExceeded: between two chunks of rows.
    """
    result = Refutation()
    largest = torch.finfo(model_dtype or weights.dtype).max if largest is None else largest
    batch = 0
    with torch.no_grad():
        for clauses in batches(prop, weights, wanted, batch_size, model_dtype):
            deadline.check()
            relaxed = bound_intermediate(weights, clauses.box, settings, deadline)
            sane = stays_finite(weights, relaxed, largest)[:, None]
            lost = lost_by_rounding(weights, clauses.lost, relaxed, clauses.box, clauses.rhs)
            judge = Judge(clauses.rhs, lost, sane, clauses.strict, clauses.groups)

            def enough(
                best: RowBounds, rows: Tensor, clauses: Clauses = clauses, judge: Judge = judge
            ) -> bool:
                margin, error = judge.weigh(best, rows)
                return clauses.content(judge.proves(margin, error, rows), rows)

            bounds = bound_rows(weights, clauses.box, relaxed, clauses.rows, settings, deadline, enough)
            margin, error = judge.weigh(bounds)
            proven = clauses.refuted(judge.proves(margin, error))
            part = Refutation(proven, margins=_by_disjunct(clauses, margin))
            part.doubtful = clauses.refuted(margin + error > 0)
            left = set(clauses.disjunct.flatten().tolist()) - {-1} - proven
            combined = refute_combined(weights, clauses, relaxed, sane, left, settings, deadline)
            for index, average in combined[0].items():
                part.refuted.add(index)
                part.margins[index].append(average)
            part.doubtful = (part.doubtful | combined[1]) - part.refuted
            part.suspects = _suspects(weights, clauses, relaxed, part.refuted)
            result.absorb(part)
            batch += 1
            result.roots = [Root(clauses, relaxed)] if batch == 1 else []
    return result


def from_first(relaxed: Relaxed, group: Group) -> Relaxed:
    """The first rank's bounds on every rank of a group: on another kind of processor they may differ."""
    if group.size == 1:
        return relaxed

    def sent(value: Tensor) -> Tensor:
        return group.send_from_first(None, value.contiguous())

    return relaxed.map(sent)


def _by_disjunct(clauses: Clauses, margin: Tensor) -> dict[int, list[float]]:
    margin = fold(margin.nan_to_num(nan=-torch.inf), clauses.groups)
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
