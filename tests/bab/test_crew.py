"""The ranks of a search: no domain is lost or doubled, and what all agree on is the same everywhere."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from abcrown_dist.bab.crew import Status, transfers
from abcrown_dist.config.schema import Parallel
from tests.parallel import crew_jobs
from tests.parallel.crew_jobs import TP, Key
from tests.parallel.pool import Pool

Pools = Callable[[int], Pool]
SIZES = (1, 2, 4)
NONE = Parallel()


@st.composite
def divisions(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two divisions of as many things among as many ranks."""
    have = draw(st.lists(st.integers(0, 50), min_size=1, max_size=9))
    cuts = sorted(draw(st.lists(st.integers(0, sum(have)), min_size=len(have) - 1, max_size=len(have) - 1)))
    ends = [0, *cuts, sum(have)]
    return have, [last - first for first, last in itertools.pairwise(ends)]


@settings(max_examples=300, deadline=None)
@given(divisions())
def test_transfers_end_in_the_wanted_division(case: tuple[list[int], list[int]]) -> None:
    have, want = case
    now, size = list(have), len(have)
    moves = transfers(have, want)
    assert len(moves) < size or not moves
    for source, to, count in moves:
        surplus = [h - w for h, w in zip(now, want, strict=True)]
        assert surplus[source] == max(surplus) and surplus[to] == min(surplus)  # largest imbalance first
        assert count > 0 and now[source] >= count
        now[source] -= count
        now[to] += count
    assert now == want


def fair(total: int, size: int) -> list[int]:
    return [total // size + (rank < total % size) for rank in range(size)]


def held_by(size: int, counts: Sequence[int], seed: int) -> list[list[Key]]:
    """Domains of every holder, with many equal margins; identities are all different."""
    random = np.random.default_rng(seed)
    idents = random.permutation(3 * sum(counts) + 1)[: sum(counts)] - sum(counts)
    margins = random.integers(-4, 3, sum(counts)).astype(float)
    margins[random.random(sum(counts)) < 0.1] = -np.inf
    every = list(zip(margins.tolist(), idents.tolist(), strict=True))
    ends = np.cumsum([0, *counts])
    return [every[ends[rank] : ends[rank + 1]] for rank in range(size)]


COUNTS = [(9, 0, 0, 0), (0, 0, 0, 13), (40, 3, 0, 1), (5, 5, 6, 5), (1, 0, 0, 0), (7, 30, 2, 11)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("batch", [1, 6, 16])
def test_no_domain_is_lost_or_doubled(pools: Pools, size: int, forced: bool, batch: int) -> None:
    for seed, counts in enumerate(COUNTS):
        held = held_by(size, counts[:size] if sum(counts[:size]) else counts[::-1][:size], seed)
        by_rank = pools(size).run(crew_jobs.rounds, held, batch, forced, NONE, 0.25)
        check_rounds(held, by_rank, batch, forced)


def check_rounds(
    held: list[list[Key]], by_rank: list[list[list[Key]]], batch: int, forced: bool, imbalance: float = 0.25
) -> None:
    """Rounds by rank: all domains are there once, and no rank is left with much less than its part."""
    size = len(held)
    left = sorted(key for part in held for key in part)
    assert sorted(key for found in by_rank for part in found for key in part) == left
    for parts in zip(*by_rank, strict=True):
        taken = sorted(key for part in parts for key in part)
        wanted = fair(min(batch, len(left)), size)
        if forced:
            assert taken == left[: len(taken)] and len(taken) == sum(wanted)
            assert max(map(len, parts)) <= (1 + imbalance) * max(wanted)
        else:
            assert 0 < len(taken) <= batch
            for part, share in zip(parts, wanted, strict=True):
                assert share - imbalance * max(wanted) <= len(part) <= share
        left = sorted(set(left) - set(taken))
    assert left == []


@pytest.mark.parametrize("forced", [False, True])
def test_copies_of_several_ranks_hold_and_take_alike(pools: Pools, forced: bool) -> None:
    for seed, counts in enumerate([(20, 1), (0, 9), (6, 7)]):
        held = held_by(2, counts, seed)
        by_rank = pools(4).run(crew_jobs.rounds, held, 6, forced, TP, 0.25)
        assert by_rank[0] == by_rank[1] and by_rank[2] == by_rank[3]
        check_rounds(held, by_rank[::2], 6, forced)


def test_each_rank_takes_its_most_urgent_domains_first(pools: Pools) -> None:
    held = held_by(2, (12, 12), 5)
    for rank, found in enumerate(pools(2).run(crew_jobs.rounds, held, 8, False, NONE, 0.25)):
        assert [key for part in found for key in part] == sorted(held[rank])


def test_a_large_imbalance_may_be_allowed(pools: Pools) -> None:
    """Then nothing is handed over: the rank that has all goes on alone."""
    held = held_by(2, (6, 0), 3)
    found = pools(2).run(crew_jobs.rounds, held, 4, False, NONE, 1e6)
    assert [len(part) for part in found[0]] == [2, 2, 1, 1] and found[1] == [[], [], [], []]
    found = pools(2).run(crew_jobs.rounds, held, 4, False, NONE, 0.25)
    assert len(found[1][0]) == 2


def test_a_long_queue_is_evened_out_before_a_rank_runs_dry(pools: Pools) -> None:
    """No rank is idle yet, but one holds several times its part."""
    held = held_by(4, (80, 4, 4, 4), 1)
    by_rank = pools(4).run(crew_jobs.rounds, held, 4, False, NONE, 0.25)
    assert [sum(map(len, found)) for found in by_rank] == [23, 23, 23, 23]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 5, 16])
def test_the_best_are_those_of_one_process(pools: Pools, size: int, count: int) -> None:
    for seed, counts in enumerate(COUNTS):
        held = held_by(size, counts[:size], seed)
        found = pools(size).run(crew_jobs.best, held, count, NONE)
        expected = sorted(key for part in held for key in part)[:count]
        assert sorted(key for part in found for key in part) == expected
        assert all(part == sorted(part) for part in found)


ROWS = [
    Status(3, -0.5, 10, 4, 7, 100, 64, 1, False),
    Status(5, -1.5, 20, 6, 5, 200, 16, 0, False),
    Status(0, float("inf"), 1, 1, 9, 0, 64, 2, True),
    Status(7, 0.25, 2, 0, 1, 50, 32, 0, False, True),
]


@pytest.mark.parametrize("size", SIZES)
def test_sums_and_extremes(pools: Pools, size: int) -> None:
    rows = ROWS[:size]
    for rank, (state, everyone, dealt) in enumerate(pools(size).run(crew_jobs.agreed, rows, NONE)):
        assert state.holders == tuple(row.open for row in rows) and state.open == sum(state.holders)
        assert state.worst == min(row.worst for row in rows)
        assert state.visited == sum(row.visited for row in rows)
        assert state.verified == sum(row.verified for row in rows)
        assert state.depth == max(row.depth for row in rows)
        assert state.memory == sum(row.memory for row in rows)
        assert state.batch == min(row.batch for row in rows)
        assert state.candidates == sum(row.candidates for row in rows)
        assert state.late == (size == 4) and state.due == (size == 4)
        assert everyone == [("item", r, k) for r in range(size) for k in range(r)]
        assert dealt == list(range(rank, 10, size))


def test_the_members_of_a_copy_count_once(pools: Pools) -> None:
    first, second = ROWS[0], ROWS[3]
    rows = [first, dataclasses.replace(first, batch=8), dataclasses.replace(second, late=True), second]
    for rank, (state, everyone, dealt) in enumerate(pools(4).run(crew_jobs.agreed, rows, TP)):
        assert state.holders == (3, 7) and state.open == 10
        assert (state.visited, state.verified) == (12, 4)
        assert state.candidates == sum(row.candidates for row in rows)  # of anybody: all must clear theirs
        assert (state.worst, state.depth) == (-0.5, 7)
        assert state.memory == 2 * (100 + 50)  # each keeps its own part of every domain
        assert (state.batch, state.late, state.due) == (8, True, True)  # whichever rank it is
        assert everyone == [("item", 1, 0)]
        assert dealt == list(range(rank // 2, 10, 2))


@pytest.mark.parametrize("size", [2, 4])
def test_every_round_takes_something(pools: Callable[[int], Pool], size: int) -> None:
    """One domain on the last rank, whose part of a batch of one is nothing, with any imbalance allowed."""
    held = [[] for _ in range(size - 1)] + [[(0.0, 7)]]
    told = pools(size).run(crew_jobs.rounds, held, 1, False, NONE, 10.0)
    assert [len(part) for rank in told for part in rank].count(1) == 1
