"""Bounds on several ranks against those of one process: the same bits, or the same up to summation order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import pytest
import torch

from abcrown_dist.parallel.group import ALONE
from tests.parallel import jobs, networks
from tests.parallel.jobs import METHODS, Case, Mode, Values
from tests.parallel.pool import Pool

Pools = Callable[[int], Pool]

# Every network by every rule; every method, and 20 steps of alpha-CROWN, where these differ most.
EVERYWHERE = (
    Case("ibp", 3),
    Case("crown", 3, batch_rows=2),  # many chunks, the last one filled up
    Case("forward", 1),
    Case("alpha-crown", 1, iterations=2),
)
EVERY_METHOD = tuple(Case(method, domains) for method in METHODS for domains in (1, 3))
DOUBLE = (Case("crown", 1, dtype=torch.float64),)
THOROUGH = ("depth_3", "cnn", "residual")
# Wide enough for several ranks, and with layers too narrow for four.
FOR_FOUR = (
    "depth_2", "depth_8", "one_neuron", "cnn", "residual", "up_and_down", "grouped_dilated",
    "averaged", "pooled", "shared", "sliced",
)  # fmt: skip
UNIT_FOR_FOUR = ("depth_8", "one_neuron", "cnn", "residual")

# Chunks of a size that does not depend on who takes them.
ROWS = (
    Case("crown", 3, batch_rows=2),
    Case("crown", 1, batch_rows=5, dtype=torch.float64),
    Case("alpha-crown", 1, batch_rows=3, iterations=3),
)

PLACES = [
    *((name, 1) for name in THOROUGH),
    *((name, 2) for name in networks.NAMES),
    *(
        pytest.param(name, 4, marks=() if name in UNIT_FOR_FOUR else pytest.mark.slow) for name in FOR_FOUR
    ),
]


def cases_for(name: str, size: int) -> tuple[Case, ...]:
    return (*EVERY_METHOD, *DOUBLE, *EVERYWHERE) if name in THOROUGH and size <= 2 else EVERYWHERE


@cache
def alone(name: str, cases: tuple[Case, ...]) -> list[dict[str, Values]]:
    """Bounds by one process."""
    return jobs.bounds(ALONE, name, Mode(), cases)


def assert_same_bits(
    expected: Sequence[Mapping[str, Values]], found: Sequence[Mapping[str, Values]], cases: Sequence[Case]
) -> None:
    for case, one, other in zip(cases, expected, found, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            for what, a, b in zip(("lower", "upper"), one[key], other[key], strict=True):
                assert torch.equal(a, b), f"{case}: {what} of {key} differs by {(a - b).abs().max()}"


def assert_close(
    expected: Sequence[Mapping[str, Values]], found: Sequence[Mapping[str, Values]], cases: Sequence[Case]
) -> None:
    for case, one, other in zip(cases, expected, found, strict=True):
        for key in one:
            scale = max(float(one[key][0].abs().max()), float(one[key][1].abs().max()))
            for what, a, b in zip(("lower", "upper"), one[key], other[key], strict=False):
                gap = float((a - b).abs().max())
                assert gap <= 1e-5 * scale, f"{case}: {what} of {key} is off by {gap / scale:.1e}"


@pytest.mark.parametrize(("name", "size"), PLACES)
def test_fully_sharded_bounds_are_the_same_bits(pools: Pools, name: str, size: int) -> None:
    cases = cases_for(name, size)
    for found in pools(size).run(jobs.bounds, name, Mode("fsdp", prefetch=True), cases):
        assert_same_bits(alone(name, cases), found, cases)


@pytest.mark.parametrize("shard_rows", [False, True])
@pytest.mark.parametrize(
    ("name", "size"), [("depth_5", 2), ("shared", 2), ("residual", 2), ("one_neuron", 4)]
)
def test_prefetch_and_rows_dealt_out_change_no_bit(
    pools: Pools, name: str, size: int, shard_rows: bool
) -> None:
    expected = alone(name, ROWS)
    for prefetch in (False, True):
        for found in pools(size).run(jobs.bounds, name, Mode("fsdp", prefetch, shard_rows), ROWS):
            assert_same_bits(expected, found, ROWS)


@pytest.mark.parametrize(("name", "size"), PLACES)
def test_tensor_parallel_bounds_are_the_same_up_to_rounding(pools: Pools, name: str, size: int) -> None:
    cases = cases_for(name, size)
    first, *others = pools(size).run(jobs.bounds, name, Mode("tp"), cases)
    assert_close(alone(name, cases), first, cases)
    for other in others:
        assert_same_bits(first, other, cases)


@pytest.mark.parametrize("mode", ["fsdp", "tp"])
@pytest.mark.parametrize(("name", "size"), PLACES)
def test_values_and_gradients_of_attacks(pools: Pools, name: str, size: int, mode: str) -> None:
    graph = networks.graph(name)
    points = torch.randn(5, graph.input_size, generator=torch.Generator().manual_seed(1))
    y, gradient = jobs.values_and_gradients(ALONE, name, Mode(), points)
    for found_y, found in pools(size).run(jobs.values_and_gradients, name, Mode(mode), points):
        assert (found_y - y).abs().max() <= 1e-6 * y.abs().max()
        assert (found - gradient).abs().max() <= 1e-6 * gradient.abs().max()
