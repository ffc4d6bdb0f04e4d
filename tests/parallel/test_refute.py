"""Verdicts of bounds on several ranks: the same as on one, proofs of nothing where numbers fail."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from abcrown_dist.bab.root import Refutation
from abcrown_dist.parallel.group import ALONE
from abcrown_dist.spec.property import Property
from abcrown_dist.util.errors import DeadlineExceeded
from tests.bab.problems import box, disjunct, problem
from tests.parallel import jobs, networks
from tests.parallel.jobs import Mode
from tests.parallel.pool import Pool, RankError

Pools = Callable[[int], Pool]
MODES = [Mode("fsdp", True), Mode("fsdp", False, shard_rows=True), Mode("tp")]


def thresholds(name: str) -> Property:
    """Several boxes, and every output below thresholds from hopeless to certain; some mention inputs."""
    graph = networks.graph(name)
    inputs, outputs = graph.input_size, graph.output_size
    random = np.random.default_rng(0)
    found = []
    for number in range(3):
        centre = random.standard_normal(inputs)
        where = box(list(centre - 0.1), list(centre + 0.1))
        for threshold in (-100.0, -2.0, -0.5, 0.0, 0.5, 100.0):
            C = random.standard_normal((1 + number, outputs)) / np.sqrt(outputs)
            D = random.standard_normal((1 + number, inputs)) * 1e-3 if number == 2 else None
            found.append(disjunct(where, C, [threshold] * (1 + number), D))
    return problem(*found)


def assert_same(found: Refutation, expected: Refutation, exactly: bool) -> None:
    assert (found.refuted, found.doubtful) == (expected.refuted, expected.doubtful)
    assert found.margins.keys() == expected.margins.keys()
    assert [index for index, _ in found.suspects] == [index for index, _ in expected.suspects]
    if exactly:
        assert found.margins == expected.margins
    for index, margins in expected.margins.items():
        np.testing.assert_allclose(found.margins[index], margins, rtol=1e-5, atol=1e-5)
    for (_, x), (_, y) in zip(found.suspects, expected.suspects, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=0 if exactly else 1e-6)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(("name", "method"), [("depth_3", "init-crown"), ("cnn", "crown"), ("shared", "ibp")])
def test_the_same_disjuncts_are_refuted(pools: Pools, name: str, method: str, mode: Mode) -> None:
    prop = thresholds(name)
    settings = Mode(shard_rows=mode.shard_rows)
    expected = jobs.refutation(ALONE, name, settings, prop, method)
    assert expected.refuted and expected.suspects and len(expected.refuted) < len(prop.disjuncts)
    for found in pools(2).run(jobs.refutation, name, mode, prop, method):
        assert_same(found, expected, exactly=mode.name == "fsdp")


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_in_float64_too(pools: Pools, mode: Mode) -> None:
    prop = thresholds("depth_5")
    expected = jobs.refutation(ALONE, "depth_5", Mode(shard_rows=mode.shard_rows), prop, "crown", 1000, True)
    for found in pools(2).run(jobs.refutation, "depth_5", mode, prop, "crown", 1000, True):
        assert_same(found, expected, exactly=mode.name == "fsdp")


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("name", networks.NOT_FINITE)
@pytest.mark.parametrize("method", ["ibp", "crown", "forward", "alpha-crown"])
def test_networks_that_are_not_finite_prove_nothing(pools: Pools, name: str, method: str, mode: Mode) -> None:
    """The bad weight lies in one rank's part; the others must hear of it."""
    prop = problem(disjunct(box([1] * 4, [2] * 4), [[1, 0, 0], [0, 1, 0]], [-1e30, -1e35]))
    assert not jobs.refutation(ALONE, name, Mode(), prop, method).refuted
    for found in pools(2).run(jobs.refutation, name, mode, prop, method):
        assert not found.refuted and not found.doubtful


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_all_ranks_stop_at_the_deadline(pools: Pools, mode: Mode) -> None:
    results = pools(2).run(expired, mode)
    assert results == ["time limit of 0 s reached"] * 2


def expired(group: object, mode: Mode) -> str:
    from abcrown_dist.parallel.group import Group

    assert isinstance(group, Group)
    seconds = 0.0 if group.rank == 1 else 1000.0  # one rank's clock decides for all
    try:
        jobs.refutation(group, "depth_3", mode, thresholds("depth_3"), "crown", seconds)
    except DeadlineExceeded as late:
        assert group.all_true(True)  # still in step
        return str(late).replace("1000", "0")
    return "nothing"


def test_an_op_without_a_rule_of_its_own_is_right_all_the_same(pools: Pools) -> None:
    """Grouped convolution is computed whole on every rank."""
    graph = networks.graph("grouped_dilated")
    x = torch.randn(2, graph.input_size)
    expected, _ = jobs.values_and_gradients(ALONE, "grouped_dilated", Mode(), x)
    for found, _ in pools(4).run(jobs.values_and_gradients, "grouped_dilated", Mode("tp"), x):
        torch.testing.assert_close(found, expected)


def test_a_job_that_fails_ends_its_pool_and_the_next_one_works() -> None:
    """The pool itself: nothing hangs, and nothing is left over."""
    pool = Pool(2, seconds=20)
    try:
        with pytest.raises(RankError, match=r"rank 1 of 2:\n(?s:.*)broken on purpose"):
            pool.run(fails_on_the_second)
        assert pool.run(double, 4) == [8, 9]
        with pytest.raises(RankError, match=r"ranks \[1\] of 2 did not answer in time"):
            pool.run(sleeps_on_the_second, seconds=1)
    finally:
        pool.close()


def fails_on_the_second(group: object) -> None:
    if getattr(group, "rank", 0) == 1:
        raise ValueError("broken on purpose")


def sleeps_on_the_second(group: object) -> None:
    import time

    time.sleep(60 * getattr(group, "rank", 0))


def double(group: object, value: int) -> int:
    return 2 * value + int(getattr(group, "rank", 0))
