"""Networks of real size: competition models, and one whose coefficients fit nowhere as a whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from abcrown_dist.parallel.group import ALONE
from tests.parallel import counting, jobs, networks
from tests.parallel.jobs import Case, Mode
from tests.parallel.pool import Pool
from tests.parallel.test_parity import assert_close, assert_same_bits

Pools = Callable[[int], Pool]

MODELS = [
    ("mnist_fc/mnist-net_256x2.onnx", "mnist_fc/prop_14_0.05.vnnlib", ("ibp", "forward", "alpha-crown")),
    ("mnist_fc/mnist-net_256x4.onnx", "mnist_fc/prop_6_0.05.vnnlib", ("crown-ibp", "init-crown")),
    ("mnist_fc/mnist-net_256x6.onnx", "mnist_fc/prop_10_0.05.vnnlib", ("ibp", "crown", "crown-ibp")),
    ("cifar10_resnet/resnet_2b.onnx", "cifar10_resnet/prop_31_eps_0.008.vnnlib", ("crown-ibp", "crown")),
    ("cifar10_resnet/resnet_4b.onnx", "cifar10_resnet/prop_5_eps_0.004.vnnlib", ("ibp", "crown")),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("model", "prop", "methods"), MODELS, ids=[Path(model[0]).stem for model in MODELS])
def test_competition_models(
    pools: Pools, bench: Path, model: str, prop: str, methods: tuple[str, ...], size: int
) -> None:
    cases = [Case(method, prop=str(bench / prop)) for method in methods]
    name = str(bench / model)
    expected = jobs.bounds(ALONE, name, Mode(), cases)
    for found in pools(size).run(jobs.bounds, name, Mode("fsdp", True), cases, seconds=550):
        assert_same_bits(expected, found, cases)
    first, *others = pools(size).run(jobs.bounds, name, Mode("tp"), cases, seconds=550)
    assert_close(expected, first, cases)
    for other in others:
        assert_same_bits(first, other, cases)


@cache
def wide_alone(case: Case) -> Any:
    """Bounds of one process, and what it needed."""
    return counting.measured(ALONE, networks.WIDE, Mode(), case)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [Mode("fsdp"), Mode("fsdp", True), Mode("tp")], ids=str)
def test_a_wide_network_within_a_budget(pools: Pools, mode: Mode) -> None:
    """Trap 13, over a tiny box: within 256 MiB beside the weights, and the bounds of one process.

    In float64: over such a box what float32 rounds leaves most neurons loose, which takes ten times as long.
    """
    graph = networks.graph(networks.WIDE)
    whole = 2 * counting.weight_bytes(graph)  # which counts float32
    budget = whole + (256 << 20)
    case = Case("crown", radius=1e-6, budget=budget, dtype=torch.float64)
    expected, _, alone = wide_alone(case)
    assert alone <= budget
    for found, at_rest, peak in pools(2).run(counting.measured, networks.WIDE, mode, case, seconds=550):
        if mode.name == "fsdp":
            assert_same_bits([expected], [found], [case])
        else:
            assert_close([expected], [found], [case])
        assert at_rest <= whole / 2 + 1e6
        assert peak <= budget
