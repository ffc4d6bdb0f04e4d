"""The same work on any number of ranks, on competition instances."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.parallel import search_jobs
from tests.parallel.pool import Pool
from tests.parallel.search_jobs import Layout, Trial
from tests.parallel.test_search import FORCED, alone, assert_same_work

Pools = Callable[[int], Pool]

NEURONS = (
    "--bab.branching.input_split.enable", "false", "--no_incomplete", "--bound_prop_method", "init-crown",
    "--pgd_order", "skip", "--iteration", "5", "--init_iteration", "10",
)  # fmt: skip
INSTANCES = {
    "256x2": ("mnist_fc/mnist-net_256x2.onnx", "mnist_fc/prop_14_0.05.vnnlib",
              (*NEURONS, "--batch_size", "32", "--max_iterations", "4")),
    "256x4": ("mnist_fc/mnist-net_256x4.onnx", "mnist_fc/prop_10_0.03.vnnlib",
              (*NEURONS, "--batch_size", "32", "--max_iterations", "3")),
    "256x6": ("mnist_fc/mnist-net_256x6.onnx", "mnist_fc/prop_10_0.05.vnnlib",
              (*NEURONS, "--batch_size", "32", "--max_iterations", "2")),
    "base_kw": ("oval21/cifar_base_kw.onnx", None,
                (*NEURONS, "--batch_size", "8", "--max_iterations", "3")),
    "acasxu": ("acasxu/ACASXU_run2a_4_9_batch_2000.onnx", "acasxu/prop_3.vnnlib",
               ("--pgd_order", "skip", "--no_incomplete", "--bab.branching.input_split.batch_size", "64",
                "--max_iterations", "6")),
}  # fmt: skip
LAYOUTS = [Layout("none", 1, 2), Layout("none", 1, 4), Layout("fsdp", 2, 2), Layout("tp", 2, 2)]


@cache
def trial(bench: Path, name: str) -> Trial:
    model, prop, words = INSTANCES[name]
    found = bench / prop if prop is not None else next((bench / model).parent.glob("*base*.vnnlib"))
    return Trial(bench / model, found, (*words, *FORCED))


@pytest.mark.slow
@pytest.mark.parametrize("name", INSTANCES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_forced_ranks_do_the_work_of_one(pools: Pools, bench: Path, layout: Layout, name: str) -> None:
    each = trial(bench, name)
    told = pools(layout.size).run(search_jobs.searches, [each], layout, seconds=550)
    expected = alone(each, layout.mode)
    assert expected.domains > 8  # of several rounds
    assert_same_work([rank[0] for rank in told], layout, expected)
