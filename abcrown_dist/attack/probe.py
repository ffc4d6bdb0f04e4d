"""Counterexamples from bounds: the minimisers of open domains, and a short descent from the best of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from abcrown_dist.attack.descent import Network, Schedule, evaluate, refine
from abcrown_dist.attack.objective import Objective
from abcrown_dist.attack.starts import Region
from abcrown_dist.spec.property import Property
from abcrown_dist.util.deadline import Deadline

Candidate = tuple[int, np.ndarray]
"""A disjunct, and a flat input (float64) that looks like a counterexample to it."""

_STEPS = 12
_MOST_CONFIRMED = 8  # candidates that are replayed in one round


@dataclass(frozen=True)
class Tried:
    """N points, each against one disjunct.

    Attributes:
        owners: (N,) int64, the disjuncts.
        x: (N, inputs), the points inside the disjuncts' boxes.
        missing: (N,) float64, largest scaled violation; where it is <= 0, it looks like a counterexample.
    """

    owners: Tensor
    x: Tensor
    missing: Tensor

    def select(self, index: Tensor) -> Tried:
        """The points `index` (n,)."""
        return Tried(self.owners[index], self.x[index], self.missing[index])

    def promising(self) -> list[Candidate]:
        """The first few that look like counterexamples."""
        hits = torch.nonzero(self.missing <= 0).flatten()[:_MOST_CONFIRMED].tolist()
        return [(int(self.owners[i]), self.x[i].double().cpu().numpy()) for i in hits]


class Probe:
    """Tries points that branch and bound comes across.

    Args:
        network: (B, inputs) to (B, outputs) in `dtype`, each point on its own.
        prop: the property.
        seed: of the descents.
        slice: points at once, filled up where there are fewer, so that bits do not depend on how many come
            together; None: all.
        most: points to descend from in one round.
    """

    def __init__(
        self,
        network: Network,
        prop: Property,
        dtype: torch.dtype,
        seed: int,
        deadline: Deadline,
        slice: int | None = None,
        most: int = 16,
    ) -> None:
        self.most = most
        self._network, self._property = network, prop
        self._dtype, self._seed, self._deadline, self._slice = dtype, seed, deadline, slice

    def measure(self, disjuncts: Sequence[int], points: Tensor) -> Tried:
        """Try points (N, inputs), each against the disjunct at its place in the list."""
        owners = torch.tensor(disjuncts, dtype=torch.int64)
        parts = []
        for piece, real in self._pieces(len(owners), self._slice):
            objective, region = self._setting(owners[piece], points.device)
            x = region.project(points[piece].to(self._dtype)[:, None])
            with torch.no_grad():
                missing = objective.worst(x, evaluate(self._network, x))[:, 0]
            parts.append(Tried(owners[piece][:real], x[:real, 0], missing[:real]))
        return _joined(parts)

    def descend(self, tried: Tried) -> Tried:
        """Descend from some points, `most` of them."""
        parts = []
        for piece, real in self._pieces(len(tried.owners), self._slice and self.most):
            start = tried.select(piece)
            objective, region = self._setting(start.owners, start.x.device)
            with torch.enable_grad():
                x, missing = refine(
                    self._network,
                    objective,
                    region,
                    start.x[:, None],
                    Schedule(_STEPS),
                    seed=self._seed,
                    deadline=self._deadline,
                )
            parts.append(Tried(start.owners[:real], x[:real, 0], missing[:real, 0]))
        return _joined(parts)

    def _pieces(self, count: int, size: int | None) -> Iterator[tuple[Tensor, int]]:
        """Index pieces, and how many of each count."""
        for piece in torch.arange(count).split(size or count):
            real = len(piece)
            yield torch.cat([piece, piece[-1:].expand((size or count) - real)]), real

    def _setting(self, owners: Tensor, device: torch.device) -> tuple[Objective, Region]:
        """Constraints and boxes of the disjuncts `owners`, one each."""
        different, where = owners.unique(return_inverse=True)
        items = [self._property.disjuncts[index] for index in different.tolist()]
        where = where.to(device)
        objective = Objective.of(items, device).select(where)
        return objective, Region.of([item.box for item in items], device, self._dtype).select(where)


def _joined(parts: Sequence[Tried]) -> Tried:
    return Tried(
        torch.cat([part.owners for part in parts]),
        torch.cat([part.x for part in parts]),
        torch.cat([part.missing for part in parts]),
    )
