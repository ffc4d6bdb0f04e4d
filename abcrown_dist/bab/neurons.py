"""Which neurons branching may split, and their numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from abcrown_dist.bounds.beta import Split, Splits
from abcrown_dist.bounds.slopes import Movable
from abcrown_dist.bounds.types import Relaxed
from abcrown_dist.relax import REGISTRY
from abcrown_dist.weights.base import Weights


@dataclass(frozen=True)
class Neurons:
    """All neurons of the splittable pre-activations, numbered through in topological order.

    Attributes:
        weights: of the network.
        offset: first number of each pre-activation's neurons, by name.
        size: their count, by name.
        loose: (total,) bool, which neurons the root leaves open; only these are ever split.
        movable: those whose slopes are free at the root.
        everywhere: let decisions enter at every pre-activation, also where none of the domains that come
            together has any: the bits of a domain must not depend on the others.
    """

    weights: Weights
    offset: Mapping[str, int]
    size: Mapping[str, int]
    loose: Tensor
    movable: Movable
    everywhere: bool = False

    @classmethod
    def of(cls, weights: Weights, relaxed: Relaxed, everywhere: bool = False) -> Neurons:
        """Number the neurons of a network whose root bounds are those of one domain."""
        graph = weights.graph
        offset: dict[str, int] = {}
        size: dict[str, int] = {}
        masks: list[Tensor] = []
        total = 0
        for node in relaxed.nodes.values():
            source = node.node.inputs[0]
            interval = relaxed.intervals[source]
            loose = REGISTRY[node.node.op].is_loose(node.node.attrs, interval.lower, interval.upper)
            if source not in offset and splittable(node.node.op):
                offset[source], size[source] = total, graph[source].size
                masks.append(weights.whole(source, loose).flatten())
                total += graph[source].size
        empty = torch.zeros(0, dtype=torch.bool, device=weights.device)
        loose_ones = torch.cat([empty, *masks])
        return cls(weights, offset, size, loose_ones, Movable.of(relaxed), everywhere)

    def splits(self, index: Tensor, sign: Tensor) -> Splits:
        """Decisions sign[b, d] z[index[b, d]] >= 0 by pre-activation; a sign of zero is none."""
        found = {}
        for name, first in self.offset.items():
            here = (sign != 0) & (index >= first) & (index < first + self.size[name])
            if not (self.everywhere or bool(here.any())):
                continue
            local = torch.where(here, index - first, 0)
            mine, place = self.weights.locate(name, local.flatten())
            own = torch.zeros_like(local).flatten()
            own[mine] = place
            kept = torch.zeros_like(here).flatten()
            kept[mine] = True
            kept &= here.flatten()
            signs = torch.where(kept.reshape(here.shape), sign, 0).to(self.weights.dtype)
            found[name] = Split(torch.where(kept, own, 0).reshape(here.shape), signs)
        return found


def splittable(op: str) -> bool:
    """Whether fixing the sign of its operand makes an op linear."""
    return REGISTRY[op].linear_on_sides
