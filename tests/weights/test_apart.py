"""Shards for ranks that do different work: the model's bits, whoever visits what when, and no rank waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from abcrown_dist.parallel.group import ALONE
from abcrown_dist.weights.apart import apart, finish
from abcrown_dist.weights.fsdp import ShardedWeights
from abcrown_dist.weights.local import LocalWeights
from tests.parallel import apart_jobs, networks
from tests.parallel.apart_jobs import Course
from tests.parallel.pool import Pool

Pools = Callable[[int], Pool]


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("lengths", [(9, 9), (17, 3), (0, 12), (12, 0), (6, 11, 0, 8), (0, 0, 0, 7)])
@pytest.mark.parametrize("name", ["depth_5", "cnn"])
def test_any_course_of_visits_sees_the_models_bits(
    pools: Pools, name: str, lengths: tuple[int, ...], prefetch: bool
) -> None:
    for seed in range(3):
        found = pools(len(lengths)).run(apart_jobs.visits, name, Course(lengths, seed, prefetch), seconds=60)
        for seen, length in zip(found, lengths, strict=True):
            assert seen.visits >= 2 * length and (seen.visits > 0) == (length > 0)
        assert any(seen.sent for seen in found)


@pytest.mark.parametrize(("prefetch", "most"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("lengths", [(8, 5), (7, 0, 5, 9)])
def test_few_weights_are_ever_whole(
    pools: Pools, lengths: tuple[int, ...], prefetch: bool, most: int
) -> None:
    """The layer in use, and the next one; none at all on a rank that serves the others."""
    for aligned in (False, True):
        course = Course(lengths, 4, prefetch, aligned=aligned, nested=False)
        found = pools(len(lengths)).run(apart_jobs.visits, "depth_5", course)
        for seen, length in zip(found, lengths, strict=True):
            assert (1 if length else 0) <= seen.most <= (most if length else 0)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("prefetch", [False, True])
def test_ranks_in_step_gather_together(pools: Pools, size: int, prefetch: bool) -> None:
    """Nothing travels from one rank to another alone."""
    course = Course((9,) * size, 1, prefetch, aligned=True)
    for seen in pools(size).run(apart_jobs.visits, "depth_5", course):
        assert seen.visits >= 18 and seen.sent == 0


def test_weights_of_one_process_need_no_meeting() -> None:
    graph = networks.graph("depth_2")
    for weights in (LocalWeights(graph), ShardedWeights(graph, ALONE)):
        assert apart(weights) is weights
        finish(weights)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("method", ["crown", "alpha-crown"])
@pytest.mark.parametrize("name", ["depth_5", "cnn"])
def test_bounds_over_different_boxes_are_those_of_one_process(
    pools: Pools, size: int, method: str, name: str
) -> None:
    weights = LocalWeights(networks.graph(name))
    for prefetch in (False, True):
        found = pools(size).run(apart_jobs.bounds_apart, name, method, prefetch)
        for rank, by_output in enumerate(found):
            expected = apart_jobs.bounds_of(weights, apart_jobs.case_of(rank, method))
            assert by_output.keys() == expected.keys()
            for key, values in expected.items():
                assert all(map(torch.equal, by_output[key], values)), (rank, key)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("prefetch", [False, True])
def test_domains_of_different_boxes_are_bounded_as_by_one_process(
    pools: Pools, size: int, prefetch: bool
) -> None:
    for rank, found in enumerate(pools(size).run(apart_jobs.children_apart, prefetch)):
        expected = apart_jobs.children_apart(ALONE, prefetch, rank)
        assert len(found) == len(expected) >= 3
        assert all(map(torch.equal, found, expected))
