"""Which neurons branching may split, their numbers, and how domains store slopes for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from abcrown_dist.bounds.beta import Split, Splits
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
        movable: by nonlinear node, own neurons (flat) whose slopes are free at the root.
    """

    weights: Weights
    offset: Mapping[str, int]
    size: Mapping[str, int]
    loose: Tensor
    movable: Mapping[str, Tensor]

    @classmethod
    def of(cls, weights: Weights, relaxed: Relaxed) -> Neurons:
        """Number the neurons of a network whose root bounds are those of one domain."""
        graph = weights.graph
        offset: dict[str, int] = {}
        size: dict[str, int] = {}
        masks: list[Tensor] = []
        movable: dict[str, Tensor] = {}
        total = 0
        for name, node in relaxed.nodes.items():
            source = node.node.inputs[0]
            interval = relaxed.intervals[source]
            loose = REGISTRY[node.node.op].is_loose(node.node.attrs, interval.lower, interval.upper)
            if node.lines.alpha_range is not None:
                movable[name] = torch.nonzero(loose.flatten()).flatten()
            if source not in offset and splittable(node.node.op):
                offset[source], size[source] = total, graph[source].size
                masks.append(weights.whole(source, loose).flatten())
                total += graph[source].size
        empty = torch.zeros(0, dtype=torch.bool, device=weights.device)
        return cls(weights, offset, size, torch.cat([empty, *masks]), movable)

    def splits(self, index: Tensor, sign: Tensor) -> Splits:
        """Decisions sign[b, d] z[index[b, d]] >= 0 by pre-activation; a sign of zero is none."""
        found = {}
        for name, first in self.offset.items():
            here = (sign != 0) & (index >= first) & (index < first + self.size[name])
            if not bool(here.any()):
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

    def pack(self, alphas: Mapping[str, Tensor]) -> Tensor:
        """The slopes (B, R, *shape) of all movable neurons, in one tensor (B, R, U)."""
        parts = [alphas[name].flatten(2)[:, :, index] for name, index in self.movable.items()]
        return torch.cat(parts, dim=2)

    def unpack(self, packed: Tensor, relaxed: Relaxed) -> dict[str, Tensor]:
        """Slopes by nonlinear node (B, R, *shape), those of other neurons as the root's lines have them."""
        alphas, first = {}, 0
        for name, index in self.movable.items():
            slope = relaxed.nodes[name].lines.lower_slope
            full = slope.flatten(1)[:1, None].repeat(*packed.shape[:2], 1)
            full[:, :, index] = packed[:, :, first : first + len(index)]
            alphas[name] = full.reshape(*packed.shape[:2], *slope.shape[1:])
            first += len(index)
        return alphas

    def default(self, relaxed: Relaxed, rows: int) -> Tensor:
        """CROWN's own slopes for one domain, (1, R, U)."""
        parts = [
            relaxed.nodes[name].lines.lower_slope.flatten(1)[:1, None, index].expand(1, rows, -1)
            for name, index in self.movable.items()
        ]
        empty = torch.zeros(1, rows, 0, dtype=self.weights.dtype, device=self.weights.device)
        return torch.cat([empty, *parts], dim=2)


def splittable(op: str) -> bool:
    """Whether fixing the sign of its operand makes an op linear."""
    return REGISTRY[op].linear_on_sides
