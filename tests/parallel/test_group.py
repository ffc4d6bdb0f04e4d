"""Collectives by what they promise, ragged pieces included, and no-ops on one rank."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest
import torch

from abcrown_dist.parallel.group import ALONE, FirstRankFailed, Group, even_bounds
from abcrown_dist.util.errors import ConfigError, LoadError
from tests.parallel.pool import Pool

Pools = Callable[[int], Pool]
SIZES = (1, 2, 4)


def gathered(group: Group, ends: list[int]) -> torch.Tensor:
    own = torch.arange(ends[group.rank], ends[group.rank + 1], dtype=torch.float32)
    buffer = torch.full((ends[-1],), -1.0)
    group.gather(own, buffer, ends).wait()
    return buffer


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [0, 1, 7, 16])
def test_gather(pools: Pools, size: int, count: int) -> None:
    for found in pools(size).run(gathered, even_bounds(count, size)):
        assert torch.equal(found, torch.arange(count, dtype=torch.float32))


def reduced(group: Group, ends: list[int]) -> torch.Tensor:
    parts = [
        torch.arange(first, last, dtype=torch.float64) * (group.rank + 1)
        for first, last in itertools.pairwise(ends)
    ]
    return group.reduce_scatter(parts)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 7, 16])
def test_reduce_scatter(pools: Pools, size: int, count: int) -> None:
    ends = even_bounds(count, size)
    factor = size * (size + 1) // 2
    for rank, found in enumerate(pools(size).run(reduced, ends)):
        expected = torch.arange(ends[rank], ends[rank + 1], dtype=torch.float64) * factor
        assert torch.equal(found, expected)


def voted(group: Group) -> tuple[float, list[bool]]:
    last, everyone = group.rank == group.size - 1, group.rank >= 0
    flags = [group.all_true(last), group.any_true(last), group.all_true(everyone), group.any_true(False)]
    return float(group.total(torch.tensor([group.rank + 1.0]))), flags


@pytest.mark.parametrize("size", SIZES)
def test_sums_and_votes(pools: Pools, size: int) -> None:
    expected = (size * (size + 1) / 2, [size == 1, True, True, False])
    assert pools(size).run(voted) == [expected] * size


def dealt(group: Group) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    first = group.rank == 0
    pieces = [torch.full((r,), float(r)) for r in range(group.size)] if first else None
    even = [torch.full((2,), float(r)) for r in range(group.size)] if first else None
    return (
        group.deal(pieces, torch.empty(group.rank)),
        group.scatter_from_first(even, torch.empty(2)),
        group.send_from_first(torch.ones(3) if first else None, torch.empty(3)),
    )


@pytest.mark.parametrize("size", SIZES)
def test_what_rank_0_hands_out(pools: Pools, size: int) -> None:
    for rank, (ragged, even, same) in enumerate(pools(size).run(dealt)):
        assert torch.equal(ragged, torch.full((rank,), float(rank)))
        assert torch.equal(even, torch.full((2,), float(rank)))
        assert torch.equal(same, torch.ones(3))


def told(group: Group, error: Exception | None) -> tuple[str, int, str] | int:
    def make() -> int:
        assert group.rank == 0
        if error is not None:
            raise error
        return 41

    try:
        return group.first(make) + 1
    except Exception as found:
        assert group.all_true(True)  # still in step
        return type(found).__name__, getattr(found, "exit_code", -1), str(found)


class Unsendable(Exception):
    """Cannot be rebuilt from its arguments elsewhere."""

    def __init__(self, left: str, right: str) -> None:
        super().__init__(f"{left} and {right}")


def fails_unsendably(group: Group) -> tuple[str, int, str] | int:
    return told(group, Unsendable("this", "that"))


@pytest.mark.parametrize("size", [2, 4])
def test_what_rank_0_alone_finds_out(pools: Pools, size: int) -> None:
    assert pools(size).run(told, None) == [42] * size
    for error in (LoadError("no such file"), ConfigError("no such key")):
        first, *others = pools(size).run(told, error)
        assert first == (type(error).__name__, error.exit_code, str(error))
        assert others == [("FirstRankFailed", error.exit_code, str(error))] * (size - 1)
    first, *others = pools(size).run(fails_unsendably)
    assert first == ("Unsendable", -1, "this and that")
    assert others == [("FirstRankFailed", 4, "Unsendable: this and that")] * (size - 1)


def test_one_rank_raises_its_own_errors() -> None:
    with pytest.raises(LoadError, match="no such file"):
        ALONE.first(lambda: (_ for _ in ()).throw(LoadError("no such file")))
    assert FirstRankFailed(3).exit_code == 3


def traffic(group: Group) -> int:
    group.traffic.reset()
    own = torch.zeros(4)
    group.gather(own, torch.empty(4 * group.size), [4 * r for r in range(group.size + 1)]).wait()
    return group.traffic.bytes


@pytest.mark.parametrize("size", SIZES)
def test_bytes_received_are_counted(pools: Pools, size: int) -> None:
    assert pools(size).run(traffic) == [16 * (size - 1)] * size


def told_by_all(group: Group) -> tuple[list[dict[str, int]], torch.Tensor, torch.Tensor]:
    matrix = torch.full((2, 3), group.rank, dtype=torch.float64).T  # not contiguous
    return (
        group.share_all({"rank": group.rank, "length": len("x" * group.rank)}),
        group.gather_all(torch.tensor([group.rank, -group.rank])),
        group.gather_all(matrix),
    )


@pytest.mark.parametrize("size", SIZES)
def test_what_every_rank_tells(pools: Pools, size: int) -> None:
    for objects, pairs, matrices in pools(size).run(told_by_all):
        assert objects == [{"rank": rank, "length": rank} for rank in range(size)]
        assert pairs.tolist() == [[rank, -rank] for rank in range(size)]
        assert matrices.shape == (size, 3, 2) and matrices.dtype == torch.float64
        assert all(bool((matrices[rank] == rank).all()) for rank in range(size))


def _parcels(source: int, to: int) -> list[torch.Tensor]:
    """What one rank sends another: as many as their ranks say, of several types and lengths."""
    kinds = (torch.float32, torch.int64, torch.bool, torch.int8, torch.float64)
    count = (2 * source + to) % 4
    return [
        torch.arange(k + source + to).mul(3 + k).to(kinds[(k + to) % len(kinds)])[: (k + source) % 3 * 5]
        for k in range(count)
    ]


def exchanged(group: Group) -> tuple[list[tuple[int, torch.Tensor]], int]:
    group.traffic.reset()
    others = [rank for rank in range(group.size) if rank != group.rank]
    sends = [(to, part) for to in others for part in _parcels(group.rank, to)]
    receives = [(of, torch.zeros_like(part)) for of in others for part in _parcels(of, group.rank)]
    group.exchange(sends, receives)
    group.exchange([], [])
    return receives, group.traffic.bytes


@pytest.mark.parametrize("size", SIZES)
def test_tensors_of_a_pair_arrive_in_their_order(pools: Pools, size: int) -> None:
    """None, one, and several a pair; of different types and lengths, and empty ones."""
    seen = 0
    for rank, (received, count) in enumerate(pools(size).run(exchanged)):
        expected = [
            (of, part) for of in range(size) if of != rank for part in _parcels(of, rank)
        ]  # fmt: skip
        for (source, found), (of, part) in zip(received, expected, strict=True):
            assert source == of and found.dtype == part.dtype and torch.equal(found, part)
            seen += part.numel() > 0
        assert count == sum(part.numel() * part.element_size() for _, part in expected)
    assert seen >= {1: 0, 2: 1, 4: 8}[size]


_NAP = 2.0


def waits(group: Group, way: str) -> tuple[float, float]:
    """CPU seconds, and seconds counted as waiting, while the last rank sleeps."""
    group.all_true(True)
    group.traffic.reset()
    if group.rank == group.size - 1:
        time.sleep(_NAP)
    begun = time.process_time()
    if way == "gather_all":
        group.gather_all(torch.zeros(3))
    elif way == "share_all":
        group.share_all("x")
    elif way == "share":
        group.share("x", source=group.size - 1)
    elif way == "exchange":
        there = 1 - group.rank
        group.exchange([(there, torch.zeros(3))], [(there, torch.empty(3))])
    else:
        group.total(torch.zeros(3))
    return time.process_time() - begun, group.traffic.seconds


@pytest.mark.parametrize("way", ["gather_all", "share_all", "share", "exchange", "wait"])
def test_waiting_takes_no_processor_and_is_counted(pools: Pools, way: str) -> None:
    (busy, counted), _ = pools(2).run(waits, way)
    assert busy < 0.5
    assert counted >= 0.75 * _NAP
