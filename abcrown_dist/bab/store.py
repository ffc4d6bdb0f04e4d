"""Open domains, taken in order of their bounds; those beyond a limit wait in host memory.

Domains lie in blocks as they came. Only order and place of each are kept in one list, so that taking
the worst ones reads a few blocks and moves nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from abcrown_dist.bab.domains import Domains, concatenate

_HOST = torch.device("cpu")


class Store:
    """A priority queue of domains: the least margin first, ties by identity.

    Args:
        device: where domains are bounded.
        device_bytes: memory that waiting domains may take there; more of them wait on the host.
            Without effect on the CPU.
    """

    def __init__(self, device: torch.device, device_bytes: int = 1 << 30) -> None:
        self.device, self.device_bytes = device, device_bytes
        self._blocks: dict[int, Domains] = {}
        self._alive: dict[int, int] = {}  # open domains by block
        self._next = 0
        self._margin = torch.empty(0, dtype=torch.float64)
        self._ident = torch.empty(0, dtype=torch.int64)
        self._place = torch.empty(0, 2, dtype=torch.int64)  # block, position in it

    def __len__(self) -> int:
        return len(self._margin)

    def bytes(self) -> int:
        """Memory of all blocks, wherever they are."""
        return sum(block.bytes() for block in self._blocks.values())

    def worst(self) -> float:
        """Least margin; infinity when no domain is open."""
        return float(self._margin.min()) if len(self) else float("inf")

    def goals(self) -> set[int]:
        """Goals that have open domains."""
        found: set[int] = set()
        for number, block in self._blocks.items():
            inside = self._place[self._place[:, 0] == number, 1]
            found |= set(block.goal[inside.to(block.goal.device)].tolist())
        return found

    def insert(self, domains: Domains) -> None:
        """Add domains."""
        if not len(domains):
            return
        if self.device != _HOST and self._on_device() + domains.bytes() > self.device_bytes:
            domains = domains.to(_HOST)
        number, self._next = self._next, self._next + 1
        self._blocks[number], self._alive[number] = domains, len(domains)
        # A margin that is not a number proves nothing and is the most urgent.
        margin = domains.margin.to(_HOST, torch.float64).nan_to_num(nan=-torch.inf)
        place = torch.stack([torch.full((len(domains),), number), torch.arange(len(domains))], dim=1)
        self._margin = torch.cat([self._margin, margin])
        self._ident = torch.cat([self._ident, domains.ident.to(_HOST)])
        self._place = torch.cat([self._place, place])

    def take(self, count: int) -> Domains:
        """Remove the `count` most urgent domains (or all) and return them, the most urgent first."""
        return self._remove(self._order(count))

    def spread(self, count: int) -> Domains:
        """Remove `count` domains (or all), urgent and less urgent ones alike."""
        order = self._order(len(self))
        count = min(count, len(order))
        return self._remove(order[torch.arange(count) * len(order) // max(1, count)])

    def front(self, count: int) -> tuple[Tensor, Tensor]:
        """Margins and identities of the `count` most urgent domains (or all), in their order."""
        order = self._order(count)
        return self._margin[order], self._ident[order]

    def everything(self) -> list[Domains]:
        """All open domains, block by block, wherever they are; they stay."""
        found = []
        for number, block in self._blocks.items():
            inside = self._place[self._place[:, 0] == number, 1]
            found.append(block.select(inside.to(block.margin.device)))
        return found

    def _remove(self, order: Tensor) -> Domains:
        place = self._place[order]
        parts, positions = [], torch.empty(len(order), dtype=torch.int64)
        offset = 0
        for number in place[:, 0].unique().tolist():
            mine = torch.nonzero(place[:, 0] == number).flatten()
            block = self._blocks[number]
            inside = place[mine, 1]
            parts.append(block.select(inside.to(block.margin.device)).to(self.device))
            positions[mine] = torch.arange(offset, offset + len(mine))
            offset += len(mine)
            self._alive[number] -= len(mine)
        self._forget(order)
        return concatenate(parts).select(positions.to(self.device))

    def _on_device(self) -> int:
        return sum(block.bytes() for block in self._blocks.values() if block.margin.device == self.device)

    def _order(self, count: int) -> Tensor:
        """Positions of the most urgent domains: by margin, then by identity."""
        if count >= len(self):
            candidates = torch.arange(len(self))
        else:
            limit = self._margin.kthvalue(count).values
            candidates = torch.nonzero(self._margin <= limit).flatten()
        by_ident = candidates[self._ident[candidates].argsort(stable=True)]
        return by_ident[self._margin[by_ident].argsort(stable=True)][:count]

    def _forget(self, taken: Tensor) -> None:
        keep = torch.ones(len(self), dtype=torch.bool)
        keep[taken] = False
        self._margin, self._ident, self._place = self._margin[keep], self._ident[keep], self._place[keep]
        for number in [number for number, alive in self._alive.items() if not alive]:
            del self._blocks[number], self._alive[number]
        self._compact()

    def _compact(self) -> None:
        """Rewrite blocks that are mostly taken: they would keep the memory of domains long gone."""
        for number, alive in self._alive.items():
            block = self._blocks[number]
            if 2 * alive > len(block):
                continue
            mine = torch.nonzero(self._place[:, 0] == number).flatten()
            self._blocks[number] = block.select(self._place[mine, 1].to(block.margin.device))
            self._place[mine, 1] = torch.arange(len(mine))
