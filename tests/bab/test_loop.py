"""The loop: what ends it, what it may conclude, and what it survives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor

from abcrown_dist.bab.crew import Crew
from abcrown_dist.bab.domains import Domains
from abcrown_dist.bab.loop import Loop
from abcrown_dist.bab.search import Course, LoopSettings, Search, Start
from abcrown_dist.bab.splitter import Branched
from abcrown_dist.config.schema import Parallel
from abcrown_dist.spec.property import Property
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.util.errors import DeadlineExceeded
from tests.bab.splitters import input_splitter, relu_splitter, weights_of
from tests.parallel.loop_jobs import Faulty, Halving, Mask, Result, Task, believe, doubt, run, search_by
from tests.parallel.pool import Pool
from tests.searches import draw

Pools = Callable[[int], Pool]


def test_every_goal_is_refuted_when_its_domains_are() -> None:
    search, rounds = run(Halving([0.3, 2.0, 0.07]))
    assert search.refuted == {10, 11, 12}
    assert search.witness is None and search.reason == ""
    assert all(margin > 0 for margin in search.margins.values())
    assert search.margins.keys() == {10, 11, 12}
    last = rounds[-1]
    assert last.open == 0 and last.worst == float("inf")
    assert last.visited == search.visited == 7 + 1 + 31
    assert last.verified == search.verified == 4 + 1 + 16
    assert [r.number for r in rounds] == list(range(1, len(rounds) + 1))
    assert max(r.depth for r in rounds) == 4


@pytest.mark.parametrize("batch", [1, 3, 64])
@pytest.mark.parametrize("ratio", [0.01, 1.0])
def test_the_batch_changes_no_answer(batch: int, ratio: float) -> None:
    search, _ = run(Halving([0.3, float("nan"), 0.07]), batch=batch, min_batch_ratio=ratio, max_visited=500)
    assert search.refuted == {10, 12} or "domains" in search.reason
    assert 11 not in search.refuted


def test_the_worst_domain_comes_first_and_a_short_queue_is_split_several_times() -> None:
    splitter = Halving([0.1])
    run(splitter, batch=40, min_batch_ratio=0.2)
    assert splitter.batches[:2] == [1, 2**4]  # 8 are wanted: three levels more


@pytest.mark.parametrize("leaf_depth", [0, 2])
def test_an_undecided_leaf_is_never_unsat(leaf_depth: int) -> None:
    search, _ = run(Halving([0.01, 2.0], leaf_depth))
    assert search.refuted == {11}
    assert "nothing left to split" in search.reason


def test_leaves_that_are_decided_count() -> None:
    search, rounds = run(Halving([0.01], 2, leaves_proven=True), min_batch_ratio=0.01)
    assert search.refuted == {10}
    assert search.verified == 4
    assert rounds[-1].open == 0


def test_bounds_that_are_no_numbers_are_never_unsat() -> None:
    search, _ = run(Halving([float("nan")]), max_rounds=5)
    assert search.refuted == set()
    assert search.reason == "still open after 5 rounds of branching"
    search, _ = run(Halving([float("nan")], leaf_depth=2))
    assert search.refuted == set()


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ({"max_domains": 3}, "more than 3 domains are open"),
        ({"max_rounds": 2}, "still open after 2 rounds of branching"),
        ({"max_visited": 5}, "domains"),
    ],
)
def test_a_limit_ends_the_search_with_its_reason(limit: dict[str, Any], reason: str) -> None:
    search, _ = run(Halving([1e-4, 2.0]), min_batch_ratio=0.01, **limit)
    assert search.refuted == {11}
    assert reason in search.reason


def test_the_deadline_ends_the_search_and_concludes_nothing() -> None:
    search = Search()
    with pytest.raises(DeadlineExceeded):
        run(Halving([1e-3, 2.0]), deadline=Deadline(0.0), search=search)
    assert search.refuted == set()


def test_a_witness_ends_the_search() -> None:
    seen: list[int] = []

    def hits(disjuncts: Sequence[int], points: Tensor) -> bool:
        seen.extend(disjuncts)
        return len(seen) > 6

    search, rounds = run(Halving([0.01, 0.01]), hits)
    assert search.witness is not None and search.witness.disjunct in {10, 11}
    assert not search.refuted
    assert set(seen) == {10, 11}
    assert len(rounds) == 3  # two roots, four children, eight of theirs


def test_points_that_are_no_counterexamples_change_nothing() -> None:
    """Each round hands over what looks like some; none is confirmed."""
    expected, _ = run(Halving([0.1, 2.0]))
    asked: list[int] = []

    def confirm(candidates: Sequence[Any]) -> None:
        asked.append(len(candidates))
        doubt(candidates)

    search, _ = run(Halving([0.1, 2.0]), lambda *_: True, confirm=confirm)
    assert asked == [2, 4, 8, 16]  # every open domain twice: its minimiser, and where the descent ends
    assert (search.refuted, search.visited) == (expected.refuted, expected.visited)


def test_a_witness_at_a_leaf_ends_the_search() -> None:
    search, _ = run(Halving([0.01], 2), lambda _, points: points[:, 0] == 0.75, min_batch_ratio=0.01)
    assert search.witness is not None and search.refuted == set()
    assert list(map(float, search.witness.inputs)) == [0.75]


# Memory


OUT_OF_MEMORY = [MemoryError(), RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["host", "device"])
def test_out_of_memory_halves_the_batch_and_changes_no_answer(error: Exception) -> None:
    expected, _ = run(Halving([0.01, 0.03]), batch=32, min_batch_ratio=0.01)
    splitter = Faulty(Halving([0.01, 0.03]), 8, error)
    search, _ = run(splitter, batch=32, min_batch_ratio=0.01)
    assert splitter.failures >= 1
    assert search.refuted == expected.refuted == {10, 11}
    assert (search.visited, search.verified) == (expected.visited, expected.verified)


@pytest.mark.parametrize("by", ["neurons", "inputs"])
@pytest.mark.parametrize("satisfiable", [False, True])
def test_out_of_memory_changes_no_verdict_of_a_network(by: str, satisfiable: bool) -> None:
    case = draw("convolutional", 1, disjuncts=1, most=6)
    prop: Property = case.property([0.02 if satisfiable else -5e-4])
    make = relu_splitter if by == "neurons" else input_splitter
    refuted = []
    for most in (10**6, 3):
        splitter = Faulty(make(weights_of(case), prop), most, MemoryError())
        search, _ = run(splitter, batch=64, min_batch_ratio=0.01, max_visited=300)
        refuted.append(search.refuted)
    assert splitter.failures > 0
    assert refuted[0] == refuted[1] == (set() if satisfiable else {0})


def test_out_of_memory_takes_back_levels_of_a_single_domain() -> None:
    """One domain split four times at once: fewer levels, before the search gives up."""
    splitter = Faulty(Halving([0.1]), 4, MemoryError())
    search, _ = run(splitter, batch=40, min_batch_ratio=0.2)
    assert splitter.failures >= 2
    assert search.refuted == {10}


def test_out_of_memory_with_a_single_domain_is_an_error() -> None:
    search = Search()
    with pytest.raises(MemoryError):
        run(Faulty(Halving([0.01]), 1, MemoryError()), min_batch_ratio=0.01, search=search)
    assert search.refuted == set()


def test_other_failures_are_not_taken_for_a_lack_of_memory() -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        run(Faulty(Halving([0.01]), 8, RuntimeError("shapes do not match")), batch=32)


def test_several_searches_share_their_result() -> None:
    search, _ = run(Halving([0.3]))
    visited = search.visited
    again, rounds = run(Halving([0.3]), search=search)
    assert again is search
    assert search.visited == 2 * visited
    assert len(search.rounds) > len(rounds)


class OneLeaf(Halving):
    """Goal 1 is a leaf from the start; goal 0 is split."""

    def branch(self, domains: Domains, levels: int) -> Branched:
        found = super().branch(domains.select(domains.goal == 0), levels)
        return Branched(found.children, domains.select(domains.goal == 1))


def test_leaves_of_the_round_in_which_a_counterexample_turns_up_are_not_refuted() -> None:
    """Nobody has looked at them."""
    calls: list[int] = []

    def found_late(disjuncts: Sequence[int], points: Tensor) -> bool:
        calls.append(len(disjuncts))
        return len(calls) > 1

    search = Search()
    splitter = OneLeaf([-1.0, -1.0], leaves_proven=True)
    settings = LoopSettings(batch=4)
    crew, probe = Crew(), Mask(found_late)
    Loop(splitter, settings, crew, probe, believe, Deadline(5), search, lambda _: None).run()
    assert search.witness is not None
    assert search.refuted == set()


# Several ranks

SIZES = (2, 4)
TP = Parallel(mode="tp", shards=2)


def by_all(pools: Pools, size: int, task: Task) -> list[Result]:
    """What every rank found; all must know the same."""
    results = pools(size).run(search_by, task)
    for other in results[1:]:
        assert other.common() == results[0].common()
    return results


def alone(task: Task) -> Search:
    return search_by_one(task).search


def search_by_one(task: Task) -> Result:
    return Pool(1).run(search_by, dataclasses.replace(task, parallel=Parallel()))[0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("forced", [False, True])
def test_ranks_refute_what_one_refutes_and_share_the_work(pools: Pools, size: int, forced: bool) -> None:
    task = Task((0.03, 2.0, 0.011), options=(("forced", forced),))
    expected = alone(task)
    results = by_all(pools, size, task)
    found = results[0].search
    assert found.refuted == expected.refuted == {10, 11, 12}
    assert (found.visited, found.verified) == (expected.visited, expected.verified)
    assert found.margins == expected.margins
    assert sum(result.own for result in results) == found.visited
    assert min(result.own for result in results) > found.visited / size / 2
    assert len(found.rounds) < len(expected.rounds) + 12


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("task", [Task((float("nan"), 0.1)), Task((0.001,)), Task((0.01, 0.02), hit=0.28125)])
def test_in_forced_order_every_round_is_that_of_one_rank(pools: Pools, size: int, task: Task) -> None:
    """Number, depth, worst margin and answer; memory alone depends on who holds what."""
    task = dataclasses.replace(task, options=(("forced", True), ("max_rounds", 12)))
    expected = alone(task)
    found = by_all(pools, size, task)[0].search
    for theirs, ours in zip(found.rounds, expected.rounds, strict=True):
        assert dataclasses.replace(theirs, seconds=0, memory=0) == dataclasses.replace(
            ours, seconds=0, memory=0
        )
    assert (found.refuted, found.reason, found.margins) == (
        expected.refuted, expected.reason, expected.margins,
    )  # fmt: skip
    assert found.witness == expected.witness
    assert (found.witness is not None) == (task.hit is not None)


def test_a_rank_without_any_domain_takes_part(pools: Pools) -> None:
    """One goal with one domain for four ranks, and a search that is over at its root."""
    results = by_all(pools, 4, Task((2.0,)))
    assert results[0].search.refuted == {10}
    assert [result.own for result in results] == [1, 0, 0, 0]
    results = by_all(pools, 4, Task((0.6,)))
    assert results[0].search.refuted == {10}
    assert sum(result.own for result in results) == 3


def test_copies_count_once(pools: Pools) -> None:
    """The ranks of one copy hold the same domains."""
    task = Task((0.03, 2.0, 0.011), parallel=TP)
    expected = alone(task)
    results = by_all(pools, 4, task)
    found = results[0].search
    assert found.refuted == {10, 11, 12}
    assert (found.visited, found.verified) == (expected.visited, expected.verified)
    assert results[0].own == results[1].own and results[2].own == results[3].own
    assert results[0].own + results[2].own == found.visited


HALVES = ((0.0, 0.5), (0.5, 1.0))


def test_refuted_on_one_rank_and_open_on_another_is_open(pools: Pools) -> None:
    task = Task((-1.0,), solved=0.5, parts=HALVES, options=(("max_rounds", 1),))
    results = by_all(pools, 2, task)
    assert [result.own for result in results] == [2, 2]
    found = results[0].search
    assert found.rounds[-1].open == 2 and found.verified == 2  # all of rank 0, none of rank 1
    assert found.refuted == set() and "after 1 rounds" in found.reason


def test_given_up_on_one_rank_is_not_refuted(pools: Pools) -> None:
    task = Task((-1.0, 2.0), leaf_depth=1, solved=0.5, parts=HALVES)
    found = by_all(pools, 2, task)[0].search
    assert found.rounds[-1].open == 0
    assert found.given_up == {10} and 10 not in found.refuted
    assert "nothing left to split" in found.reason
    found = by_all(pools, 2, dataclasses.replace(task, solved=1.0))[0].search
    assert found.given_up == set() and 10 in found.refuted


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        (("max_domains", 9), "more than 9 domains are open"),
        (("max_rounds", 3), "still open after 3 rounds of branching"),
        (("max_visited", 20), "domains"),
    ],
)
def test_limits_count_all_ranks(pools: Pools, size: int, limit: tuple[str, int], reason: str) -> None:
    found = by_all(pools, size, Task((1e-4, 2.0), options=(limit,)))[0].search
    assert found.refuted == {11} and reason in found.reason
    if limit[0] == "max_visited":
        assert 20 <= found.visited <= 20 + 2 * 8


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("where", [0.03125, 0.96875])
def test_a_witness_of_any_rank_ends_the_search_of_all(pools: Pools, size: int, where: float) -> None:
    results = by_all(pools, size, Task((0.01,), hit=where))
    witness = results[0].search.witness
    assert witness is not None and witness.disjunct == 10
    assert list(map(float, witness.inputs)) == [where]
    assert results[0].search.refuted == set()


@pytest.mark.parametrize("size", SIZES)
def test_one_rank_out_of_time_ends_the_search_of_all(pools: Pools, size: int) -> None:
    late = (size - 1, 0, DeadlineExceeded("time limit of 1 s reached"), 2)
    results = by_all(pools, size, Task((1e-3, 2.0), fault=late))
    assert results[0].late
    assert [result.failures for result in results] == [0] * (size - 1) + [1]
    assert results[0].search.refuted == set()


def test_a_counterexample_goes_before_a_time_limit(pools: Pools) -> None:
    """Rank 0 finds one in the round in which rank 1 runs out of time."""
    late = (1, 0, DeadlineExceeded("time limit of 1 s reached"), 0)
    results = by_all(pools, 2, Task((-1.0,), solved=0.1, hit=0.125, parts=HALVES, fault=late))
    assert results[1].failures == 1 and not results[0].late
    assert results[0].search.witness is not None


@pytest.mark.parametrize("size", SIZES)
def test_one_rank_out_of_memory_halves_the_batch_of_all(pools: Pools, size: int) -> None:
    task = Task((0.004, 0.03), options=(("batch", 64),), fault=(size - 1, 5, MemoryError(), 0))
    expected = alone(dataclasses.replace(task, fault=None))
    results = by_all(pools, size, task)
    found = results[0].search
    assert results[-1].failures >= 1
    assert found.refuted == {10, 11}
    assert (found.visited, found.verified) == (expected.visited, expected.verified)
    # 5 children a rank are 2 domains a rank: far fewer of all ranks together than 64.
    assert len(found.rounds) > found.visited / (2 * 2 * 2 * size)


def test_what_was_given_up_before_a_checkpoint_stays_so() -> None:
    """Goals without a domain left are refuted, unless a leaf was given up; they are told by name."""
    margins = ((1, 0.5), (2, 0.25))
    course = Course((11, 10, 12), rounds=7, visited=50, verified=20, given_up=(0,), margins=margins)
    earlier = Search(visited=50, verified=20)
    search, rounds = run(Halving([0.3, 0.3, 0.3]), search=earlier, start=Start(course, []))
    assert search.refuted == {10, 12} and search.given_up == {11}
    assert search.margins == {10: 0.5, 12: 0.25} and search.reason
    assert (search.visited, search.verified) == (50, 20) and rounds[-1].open == 0
