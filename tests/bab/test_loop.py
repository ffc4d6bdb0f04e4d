"""The loop: what ends it, what it may conclude, and what it survives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from abcrown_dist.bab.domains import Domains, child_ident, concatenate
from abcrown_dist.bab.loop import Loop, LoopSettings, Search
from abcrown_dist.bab.rounds import Round
from abcrown_dist.bab.splitter import Bounded, Branched, Examined, Splitter
from abcrown_dist.spec.property import Property, Witness
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.util.errors import DeadlineExceeded
from tests.bab.splitters import input_splitter, relu_splitter, weights_of
from tests.searches import draw

DEEP = 10**6


class Halving:
    """Intervals of the line: margin  m - width  at the mid-point, refuted when positive.

    Args:
        need: by goal, the m: a search must split until the width is below it. NaN: bounds are no numbers.
        leaf_depth: from which depth on domains are leaves.
        leaves_proven: what the exact answer on leaves is.
    """

    def __init__(self, need: Sequence[float], leaf_depth: int = DEEP, leaves_proven: bool = False) -> None:
        self.need = torch.tensor(need, dtype=torch.float64)
        self.disjuncts = tuple(10 + goal for goal in range(len(need)))
        self.leaf_depth, self.leaves_proven = leaf_depth, leaves_proven
        self.batches: list[int] = []

    def roots(self) -> Domains:
        goal = torch.arange(len(self.need))
        ends = torch.zeros(len(goal), 1, dtype=torch.float64)
        start = torch.full((len(goal),), -torch.inf, dtype=torch.float64)
        return Domains(start, goal, child_ident(goal, goal), 0 * goal, {"low": ends, "high": ends + 1})

    def bound(self, domains: Domains) -> Bounded:
        self.batches.append(len(domains))
        low, high = domains.state["low"][:, 0], domains.state["high"][:, 0]
        margin = self.need[domains.goal] - (high - low)
        found = dataclasses.replace(domains, margin=margin)
        return Bounded(found, margin > 0, torch.zeros_like(margin > 0), ((low + high) / 2)[:, None])

    def branch(self, domains: Domains, levels: int) -> Branched:
        done = domains.depth >= self.leaf_depth
        leaves, domains = domains.select(done), domains.select(~done)
        for _ in range(levels):
            low, high = domains.state["low"], domains.state["high"]
            middle = (low + high) / 2
            parts = [
                dataclasses.replace(
                    domains,
                    ident=child_ident(domains.ident, torch.full_like(domains.ident, side)),
                    depth=domains.depth + 1,
                    state={"low": middle if side else low, "high": high if side else middle},
                )
                for side in (0, 1)
            ]
            domains = concatenate(parts)
        return Branched(domains, leaves)

    def examine(self, leaves: Domains) -> Examined:
        proven = torch.full((len(leaves),), self.leaves_proven)
        return Examined(proven, torch.ones(len(leaves), dtype=torch.float64), leaves.state["low"])


def nothing_found(disjuncts: Sequence[int], points: Tensor) -> Witness | None:
    assert len(disjuncts) == len(points)
    return None


def run(
    splitter: Splitter,
    probe: Callable[[Sequence[int], Tensor], Witness | None] = nothing_found,
    deadline: Deadline | None = None,
    search: Search | None = None,
    **options: Any,
) -> tuple[Search, list[Round]]:
    search, rounds = search or Search(), list[Round]()
    settings = LoopSettings(**{"batch": 4, **options})
    with torch.no_grad():
        Loop(splitter, settings, probe, deadline or Deadline(), search, rounds.append).run()
    return search, rounds


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
    found = Witness([], [], 11)

    def probe(disjuncts: Sequence[int], points: Tensor) -> Witness | None:
        seen.extend(disjuncts)
        return found if len(seen) > 6 else None

    search, _ = run(Halving([0.01, 0.01]), probe)
    assert search.witness is found
    assert not search.refuted
    assert set(seen) == {10, 11}


def test_a_witness_at_a_leaf_ends_the_search() -> None:
    def probe(disjuncts: Sequence[int], points: Tensor) -> Witness | None:
        assert len(disjuncts) == len(points)
        return Witness([], [], 10) if bool((points == 0.75).any()) else None

    search, _ = run(Halving([0.01], 2), probe, min_batch_ratio=0.01)
    assert search.witness is not None and search.refuted == set()


# Memory


class Exhausted:
    """A splitter that runs out of memory whenever it is given more than `most` domains."""

    def __init__(self, inner: Splitter, most: int, error: BaseException) -> None:
        self.inner, self.most, self.error = inner, most, error
        self.disjuncts = inner.disjuncts
        self.failures = 0

    def roots(self) -> Domains:
        return self.inner.roots()

    def bound(self, domains: Domains) -> Bounded:
        if len(domains) > self.most:
            self.failures += 1
            raise self.error
        return self.inner.bound(domains)

    def branch(self, domains: Domains, levels: int) -> Branched:
        return self.inner.branch(domains, levels)

    def examine(self, leaves: Domains) -> Examined:
        return self.inner.examine(leaves)


OUT_OF_MEMORY = [MemoryError(), RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["host", "device"])
def test_out_of_memory_halves_the_batch_and_changes_no_answer(error: Exception) -> None:
    expected, _ = run(Halving([0.01, 0.03]), batch=32, min_batch_ratio=0.01)
    splitter = Exhausted(Halving([0.01, 0.03]), 8, error)
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
        splitter = Exhausted(make(weights_of(case), prop), most, MemoryError())
        search, _ = run(splitter, batch=64, min_batch_ratio=0.01, max_visited=300)
        refuted.append(search.refuted)
    assert splitter.failures > 0
    assert refuted[0] == refuted[1] == (set() if satisfiable else {0})


def test_out_of_memory_takes_back_levels_of_a_single_domain() -> None:
    """One domain split four times at once: fewer levels, before the search gives up."""
    splitter = Exhausted(Halving([0.1]), 4, MemoryError())
    search, _ = run(splitter, batch=40, min_batch_ratio=0.2)
    assert splitter.failures >= 2
    assert search.refuted == {10}


def test_out_of_memory_with_a_single_domain_is_an_error() -> None:
    search = Search()
    with pytest.raises(MemoryError):
        run(Exhausted(Halving([0.01]), 1, MemoryError()), min_batch_ratio=0.01, search=search)
    assert search.refuted == set()


def test_other_failures_are_not_taken_for_a_lack_of_memory() -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        run(Exhausted(Halving([0.01]), 8, RuntimeError("shapes do not match")), batch=32)


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

    def found_late(disjuncts: Sequence[int], points: Tensor) -> Witness | None:
        calls.append(len(disjuncts))
        return Witness([], [], 0) if len(calls) > 1 else None

    search = Search()
    splitter = OneLeaf([-1.0, -1.0], leaves_proven=True)
    Loop(splitter, LoopSettings(batch=4), found_late, Deadline(5), search, lambda _: None).run()
    assert search.witness is not None
    assert search.refuted == set()
