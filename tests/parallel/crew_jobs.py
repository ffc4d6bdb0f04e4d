"""What the ranks of a crew hold, take and tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from abcrown_dist.bab.crew import Agreement, Crew, Status
from abcrown_dist.bab.domains import Domains
from abcrown_dist.bab.store import Store
from abcrown_dist.config.schema import Parallel
from abcrown_dist.parallel.group import Group
from abcrown_dist.parallel.mesh import Mesh

Key = tuple[float, int]  # margin and identity
TP = Parallel(mode="tp", shards=2)


def domains(keys: Sequence[Key], columns: int) -> Domains:
    """Domains with a state of several types that their identity determines, so that mixed-up rows show."""
    ident = torch.tensor([ident for _, ident in keys], dtype=torch.int64)
    return Domains(
        torch.tensor([margin for margin, _ in keys], dtype=torch.float64), ident % 3, ident, ident % 11,
        state(ident, columns),
    )  # fmt: skip


def state(ident: Tensor, columns: int) -> dict[str, Tensor]:
    """By name: bool, int8, float64 and float32; the last axis of two of them is as long as told."""
    random = torch.stack([torch.sin(ident.double() * (k + 1)) for k in range(6)], dim=1)
    sign = torch.ones(len(ident), columns, dtype=torch.int8) * (ident % 2 * 2 - 1)[:, None].to(torch.int8)
    return {
        "mask": random.view(-1, 3, 2) > 0,
        "sign": sign,
        "beta": random[:, :2, None].repeat(1, 1, columns),
        "low": random.float(),
    }


def keys_of(taken: Domains | None) -> list[Key]:
    """Margin and identity of domains, once all that belongs to them is known to be theirs."""
    if taken is None:
        return []
    length = taken.state["sign"].shape[1]
    columns = taken.state["sign"].ne(0).sum(1)
    for name, value in state(taken.ident, length).items():
        found = taken.state[name]
        assert found.dtype == value.dtype
        if name in ("sign", "beta"):
            shorter = (torch.arange(length) >= columns[:, None]).view(-1, *[1] * (value.ndim - 2), length)
            value = value.masked_fill(shorter, 0)
        assert torch.equal(found, value), name
    assert torch.equal(taken.goal, taken.ident % 3) and torch.equal(taken.depth, taken.ident % 11)
    assert bool((columns > 0).all())
    return list(zip(taken.margin.tolist(), taken.ident.tolist(), strict=True))


def filled(crew: Crew, held: Sequence[Sequence[Key]]) -> Store:
    """A store with this holder's domains, in two blocks of states of different lengths."""
    store, mine = Store(torch.device("cpu")), held[crew.group.rank]
    half = len(mine) // 2
    for columns, part in ((1 + crew.group.rank, mine[:half]), (3, mine[half:])):
        if part:
            store.insert(domains(part, columns))
    return store


def status(store: Store, **values: Any) -> Status:
    told = dict.fromkeys(("visited", "verified", "depth", "memory", "candidates"), 0)
    return Status(**{"open": len(store), "worst": store.worst(), "batch": 8, "late": False, **told, **values})


def rounds(
    group: Group, held: Sequence[Sequence[Key]], batch: int, forced: bool, parallel: Parallel, most: float
) -> list[list[Key]]:
    """By round, what this rank takes, until no rank holds anything."""
    crew = Crew(Mesh.of(group, parallel), most)
    store, found = filled(crew, held), list[list[Key]]()
    while True:
        state = crew.agree(status(store))
        if not state.open:
            return found
        assert state.holders[crew.group.rank] == len(store)
        taken = crew.take_in_order(store, batch) if forced else crew.take(store, state.holders, batch)
        found.append(keys_of(taken))


def best(group: Group, held: Sequence[Sequence[Key]], count: int, parallel: Parallel) -> list[Key]:
    crew = Crew(Mesh.of(group, parallel))
    mine = held[crew.group.rank]
    value = torch.tensor([value for value, _ in mine], dtype=torch.float64)
    ident = torch.tensor([ident for _, ident in mine], dtype=torch.int64)
    return [mine[k] for k in crew.best(value, ident, count).tolist()]


def agreed(
    group: Group, rows: Sequence[Status], parallel: Parallel
) -> tuple[Agreement, list[Any], list[int]]:
    """What ranks agree on, everyone's items, and this rank's part of ten domains."""
    crew = Crew(Mesh.of(group, parallel))
    mine = crew.group.rank
    everyone = crew.everyone([("item", mine, k) for k in range(mine)])
    dealt = crew.deal(domains([(0.0, ident) for ident in range(10)], 1))
    return crew.agree(rows[group.rank]), everyone, dealt.ident.tolist()
