"""The boxes of a property in the main flow: their rows, and the bounds that searches begin with."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from abcrown_dist.bab.clauses import Clauses, batches
from abcrown_dist.bab.root import OneBox, Root, from_first
from abcrown_dist.bounds.propagate import bound_intermediate
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.problem import Problem
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.weights.base import Weights


class Boxes:
    """All boxes of a problem.

    Attributes:
        roots: bounds of the boxes that the last bound method left open.
    """

    def __init__(self, problem: Problem, batch_size: int, deadline: Deadline) -> None:
        self.problem, self.batch_size, self.deadline = problem, batch_size, deadline
        self.roots: list[Root] = []

    def keep(self, roots: list[Root]) -> None:
        """Remember what a bound method found."""
        self.roots = [self._alike(root) for root in roots]

    def open(self, settings: BoundSettings, wanted: set[int]) -> Iterator[OneBox]:
        """Boxes of the disjuncts `wanted`: with the bounds that are there, or with new ones."""
        if not self.roots:
            yield from self.bounded(settings, self.problem.weights, wanted)
        for root in self.roots:
            yield from OneBox.each(root, wanted)

    def bounded(self, settings: BoundSettings, weights: Weights, wanted: set[int]) -> Iterator[OneBox]:
        """The same, bounded now."""
        for clauses in self.clauses(weights, wanted, self.batch_size):
            found: list[Root] = []

            def work(clauses: Clauses = clauses, found: list[Root] = found) -> None:
                with torch.no_grad():  # not around the yield: it would hold for whoever asks for the next one
                    relaxed = bound_intermediate(weights, clauses.box, settings, self.deadline)
                found.append(Root(clauses, relaxed))

            self.problem.mesh.together(work)
            yield from OneBox.each(self._alike(found[0]), wanted)

    def clauses(self, weights: Weights, wanted: set[int], boxes: int) -> Iterator[Clauses]:
        """Rows of the disjuncts `wanted`, up to `boxes` boxes at a time."""
        yield from batches(self.problem.prop, weights, sorted(wanted), boxes, self.problem.model.dtype)

    def _alike(self, root: Root) -> Root:
        """A root with the very same bounds on all copies of the weights."""
        return Root(root.clauses, from_first(root.relaxed, self.problem.mesh.across))
