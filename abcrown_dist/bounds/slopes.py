"""The free lower slopes of many nonlinearities in one tensor: what an optimisation moves and domains keep.

Most neurons of a network are stable over a small box. Slopes of the others alone are worth their memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from abcrown_dist.bounds.types import Relaxed


@dataclass(frozen=True)
class Movable:
    """U neurons with a free lower slope.

    Attributes:
        index: their flat own numbers, by nonlinear node; a packed tensor holds them in this order.
    """

    index: Mapping[str, Tensor]

    @classmethod
    def of(cls, relaxed: Relaxed) -> Movable:
        """The neurons whose slopes are free in some domain."""
        index = {}
        for name, node in relaxed.nodes.items():
            span = node.lines.alpha_range
            if span is not None:
                free = (span[0] != span[1]).flatten(1).any(0)
                index[name] = torch.nonzero(free).flatten()
        return cls(index)

    def take(self, name: str, values: Tensor) -> Tensor:
        """The entries (B, R, n) of values (B, R, *shape) of one node that belong to it."""
        return values.flatten(2)[:, :, self.index[name]]

    def default(self, relaxed: Relaxed, rows: int, domains: int = 1) -> Tensor:
        """CROWN's own slopes, (domains, rows, U)."""
        parts = [
            self.take(name, relaxed.nodes[name].lines.lower_slope[:, None]).expand(domains, rows, -1)
            for name in self.index
        ]
        if not parts:
            some = next(iter(relaxed.intervals.values())).lower
            return some.new_zeros(domains, rows, 0)
        return torch.cat(parts, dim=2)

    def limits(self, relaxed: Relaxed, domains: int) -> tuple[Tensor, Tensor]:
        """Least and greatest sound slopes in each domain, (domains, 1, U)."""
        ends: tuple[list[Tensor], list[Tensor]] = ([], [])
        for name in self.index:
            span = relaxed.nodes[name].lines.alpha_range
            assert span is not None
            for side, values in zip(ends, span, strict=True):
                side.append(self.take(name, values[:, None]).expand(domains, 1, -1))
        if not self.index:
            none = self.default(relaxed, 1, domains)
            return none, none
        return torch.cat(ends[0], dim=2), torch.cat(ends[1], dim=2)

    def project(self, packed: Tensor, relaxed: Relaxed) -> Tensor:
        """Slopes (B, R, U) moved to where the lines of every domain are sound: a copy."""
        lower, upper = self.limits(relaxed, len(packed))
        return torch.clamp(packed, lower, upper)

    def unpack(self, packed: Tensor, relaxed: Relaxed) -> dict[str, Tensor]:
        """Slopes by node (B, R, *shape); those of all other neurons as the lines have them."""
        alphas, first = {}, 0
        for name, index in self.index.items():
            slope = relaxed.nodes[name].lines.lower_slope
            full = slope.flatten(1)[:, None].expand(*packed.shape[:2], -1).clone()
            full[:, :, index] = packed[:, :, first : first + len(index)]
            alphas[name] = full.reshape(*packed.shape[:2], *slope.shape[1:])
            first += len(index)
        return alphas
