"""Counterexamples from bounds: the minimisers of open domains, and a short descent from the best of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from abcrown_dist.attack.descent import Network, Schedule, evaluate, refine
from abcrown_dist.attack.objective import Objective
from abcrown_dist.attack.starts import Region
from abcrown_dist.spec.property import Property, Witness
from abcrown_dist.util.deadline import Deadline

Confirm = Callable[[np.ndarray, int], "Witness | None"]

_DESCENTS = 16  # points to descend from in one call
_STEPS = 12
_MOST_CONFIRMED = 8  # candidates that are replayed in one call


class Probe:
    """Tries points that branch and bound comes across.

    Args:
        network: (B, inputs) to (B, outputs) in `dtype`, each point on its own.
        prop: the property.
        confirm: replays a flat input (float64) as a counterexample to a disjunct.
        seed: of the descents.
        agree: makes every rank's list of promising points that of the first one: they confirm together.
    """

    def __init__(
        self,
        network: Network,
        prop: Property,
        confirm: Confirm,
        dtype: torch.dtype,
        seed: int,
        deadline: Deadline,
        agree: Callable[[list[int]], list[int]] = lambda hits: hits,
    ) -> None:
        self._network, self._property, self._confirm = network, prop, confirm
        self._dtype, self._seed, self._deadline = dtype, seed, deadline
        self._agree = agree

    def __call__(self, disjuncts: Sequence[int], points: Tensor) -> Witness | None:
        """Try points (N, inputs), each against the disjunct at its place in the list."""
        owners = np.asarray(disjuncts)
        objective, region = self._setting(owners, points.device)
        x = region.project(points.to(self._dtype)[:, None])
        with torch.no_grad():
            missing = objective.violations(x, evaluate(self._network, x)).amax(2)[:, 0]
        found = self._confirmed(owners, x[:, 0], missing)
        if found is not None:
            return found
        best = missing.argsort(stable=True)[:_DESCENTS]
        with torch.enable_grad():
            x, missing = refine(
                self._network,
                objective.select(best),
                region.select(best),
                x[best],
                Schedule(_STEPS),
                seed=self._seed,
                deadline=self._deadline,
            )
        return self._confirmed(owners[best.cpu().numpy()], x[:, 0], missing[:, 0])

    def _setting(self, owners: np.ndarray, device: torch.device) -> tuple[Objective, Region]:
        """Constraints and boxes of the disjuncts `owners`, one each."""
        different, inverse = np.unique(owners, return_inverse=True)
        items = [self._property.disjuncts[index] for index in different]
        where = torch.from_numpy(inverse).to(device)
        objective = Objective.of(items, device).select(where)
        return objective, Region.of([item.box for item in items], device, self._dtype).select(where)

    def _confirmed(self, owners: np.ndarray, x: Tensor, missing: Tensor) -> Witness | None:
        """The first of the points (N, inputs) that look like counterexamples to be confirmed."""
        hits = torch.nonzero(missing <= 0).flatten()[:_MOST_CONFIRMED].tolist()
        for index in self._agree(hits):
            witness = self._confirm(x[index].double().cpu().numpy(), int(owners[index]))
            if witness is not None:
                return witness
        return None
