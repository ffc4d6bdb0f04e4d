"""The ranks of one search: who holds which domains, and what all of them know of each other.

Each rank (under tp each copy of the weights) stores, splits and bounds domains of its own. Between rounds
a few numbers of every rank are gathered; every decision follows from these alone, so that all ranks take
it alike. Nothing else is collective, except what ranks do to the weights that they share
(`weights.apart`), and handing over domains.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from abcrown_dist.bab.domains import Domains, concatenate
from abcrown_dist.bab.store import Store
from abcrown_dist.parallel.mesh import Mesh


@dataclass(frozen=True)
class Status:
    """What one rank tells of itself after a round.

    Attributes:
        open: domains in its store.
        worst: their least margin.
        visited, verified: domains that it bounded, and refuted, in this search.
        depth: most decisions of a domain in its last round.
        memory: bytes of its store.
        batch: domains of a round, of all ranks together, that its memory allows.
        candidates: points that look like counterexamples.
        late: it is out of time.
        due: it wants a checkpoint.
    """

    open: int
    worst: float
    visited: int
    verified: int
    depth: int
    memory: int
    batch: int
    candidates: int
    late: bool
    due: bool = False


@dataclass(frozen=True)
class Agreement(Status):
    """What all ranks know after a round: sums and extremes of what each tells, and open domains by holder."""

    holders: tuple[int, ...] = ()


class Crew:
    """A search's ranks, seen from one of them.

    Args:
        mesh: of all ranks.
        imbalance: share of its fair part that a rank may lack before others hand some over.
    """

    def __init__(self, mesh: Mesh | None = None, imbalance: float = 0.25) -> None:
        self.mesh, self.imbalance = mesh or Mesh(), imbalance
        self.group = self.mesh.domains

    def deal(self, domains: Domains) -> Domains:
        """This holder's part of domains that all ranks know."""
        return domains.select(slice(self.group.rank, None, self.group.size))

    def agree(self, own: Status) -> Agreement:
        """Tell the others, and learn of them."""
        values = [float(value) for value in dataclasses.astuple(own)]
        told = self.mesh.world.gather_all(torch.tensor(values, dtype=torch.float64))
        rows = [Status(*row) for row in told.tolist()]
        # Ranks that hold the same domains count once.
        each = rows[:: self.mesh.alike]
        holders = tuple(int(row.open) for row in each)
        return Agreement(
            open=sum(holders),
            worst=min(row.worst for row in each),
            visited=int(sum(row.visited for row in each)),
            verified=int(sum(row.verified for row in each)),
            depth=int(max(row.depth for row in each)),
            memory=int(sum(row.memory for row in rows)),
            batch=int(min(row.batch for row in rows)),
            candidates=int(sum(row.candidates for row in rows)),
            late=any(row.late for row in rows),
            due=any(row.due for row in rows),
            holders=holders,
        )

    def everyone(self, own: Sequence[Any]) -> list[Any]:
        """The picklable items of all holders, in their order, on every rank."""
        told = [item for part in self.group.share_all(list(own)) for item in part]
        return told if self.mesh.world is self.group else self.mesh.world.share(told)

    def take(self, store: Store, open: Sequence[int], batch: int) -> Domains | None:
        """This rank's part of a round: its most urgent domains, after handing some over if they lie unevenly.

        Args:
            open: domains of every holder.
            batch: domains of the round, of all ranks together.
        """
        if self._lies_unevenly(open, batch):
            fair = _fair(sum(open), self.group.size)
            for arrived in self._hand_over(transfers(open, fair), store.spread):
                store.insert(arrived)
            open = fair
        quota = _fair(min(sum(open), batch), self.group.size)[self.group.rank]
        return store.take(quota) if quota and len(store) else None

    def take_in_order(self, store: Store, batch: int) -> Domains | None:
        """This rank's part of the `batch` most urgent domains of all ranks, evenly dealt: forced order."""
        taken = self._counts_in_order(*store.front(batch), batch)
        mine = taken[self.group.rank]
        fair = _fair(sum(taken), self.group.size)
        if max(taken) <= (1 + self.imbalance) * max(fair):
            return store.take(mine) if mine else None
        # Whoever has too many takes its own part first, and hands over what comes next.
        kept = min(mine, fair[self.group.rank])
        parts = [store.take(kept)] if kept else []
        parts += self._hand_over(transfers(taken, fair), store.take)
        return concatenate(parts) if parts else None

    def best(self, value: Tensor, ident: Tensor, count: int) -> Tensor:
        """Which of this rank's entries are among the `count` least of all ranks, ties by identity."""
        order = ident.argsort(stable=True)
        order = order[value[order].argsort(stable=True)][:count]
        taken = self._counts_in_order(value[order].cpu(), ident[order].cpu(), count)
        return order[: taken[self.group.rank]]

    def _counts_in_order(self, value: Tensor, ident: Tensor, count: int) -> list[int]:
        """How many of each rank's sorted entries are among the `count` least of all."""
        if self.group.size == 1:
            return [min(count, len(value))]
        keys = torch.full((2, count), torch.iinfo(torch.int64).max)
        keys[0, : len(value)], keys[1, : len(value)] = value.double().view(torch.int64), ident
        sizes = self.group.gather_all(torch.tensor([len(value)])).flatten().tolist()
        told = self.group.gather_all(keys)
        values = torch.cat([told[r, 0, :n] for r, n in enumerate(sizes)]).view(torch.float64)
        idents = torch.cat([told[r, 1, :n] for r, n in enumerate(sizes)])
        owners = torch.cat([torch.full((n,), r) for r, n in enumerate(sizes)])
        order = idents.argsort(stable=True)
        order = order[values[order].argsort(stable=True)][:count]
        return torch.bincount(owners[order], minlength=self.group.size).tolist()

    def _lies_unevenly(self, open: Sequence[int], batch: int) -> bool:
        total, size = sum(open), self.group.size
        if size == 1 or not total:
            return False
        fair = _fair(min(total, batch), size)
        missing = max(want - have for want, have in zip(fair, open, strict=True))
        # A round must take something, however much imbalance is put up with.
        nothing = not any(min(want, have) for want, have in zip(fair, open, strict=True))
        idle = nothing or missing > self.imbalance * max(fair)
        return idle or max(open) - min(open) > batch + self.imbalance * total / size

    def _hand_over(
        self, moves: Sequence[tuple[int, int, int]], give: Callable[[int], Domains]
    ) -> list[Domains]:
        """Carry out moves (from, to, how many); returns what has come to this rank."""
        me, group = self.group.rank, self.group
        given = [(to, give(count)) for source, to, count in moves if source == me]
        headers = group.share_all([(to, _header(domains)) for to, domains in given])
        sends = [(to, part) for to, domains in given for part in _tensors(domains)]
        receives, arrived = [], []
        for source, listed in enumerate(headers):
            for to, header in listed:
                if to == me:
                    arrived.append(_empty(header))
                    receives += [(source, part) for part in _tensors(arrived[-1])]
        group.exchange(sends, receives)
        return arrived


def transfers(have: Sequence[int], want: Sequence[int]) -> list[tuple[int, int, int]]:
    """Moves (from, to, how many) that lead from one division to another, the largest imbalance first."""
    surplus = [h - w for h, w in zip(have, want, strict=True)]
    moves = []
    while max(surplus) > 0 > min(surplus):
        source, to = surplus.index(max(surplus)), surplus.index(min(surplus))
        count = min(surplus[source], -surplus[to])
        moves.append((source, to, count))
        surplus[source] -= count
        surplus[to] += count
    return moves


def _fair(total: int, size: int) -> list[int]:
    return [total // size + (rank < total % size) for rank in range(size)]


def _tensors(domains: Domains) -> list[Tensor]:
    parts = [domains.margin, domains.goal, domains.ident, domains.depth, *domains.state.values()]
    return [part if part.is_contiguous() else part.contiguous() for part in parts]


_Header = tuple[list[tuple[tuple[int, ...], torch.dtype]], list[str], str]


def _header(domains: Domains) -> _Header:
    shapes = [(tuple(part.shape), part.dtype) for part in _tensors(domains)]
    return shapes, list(domains.state), domains.margin.device.type


def _empty(header: _Header) -> Domains:
    shapes, names, kind = header
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.cuda.current_device())
    margin, goal, ident, depth, *state = (
        torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes
    )
    return Domains(margin, goal, ident, depth, dict(zip(names, state, strict=True)))
