"""Fully sharded weights: shards at rest, one or two whole weights at work, the very bits of the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from abcrown_dist.parallel.group import ALONE
from abcrown_dist.weights.fsdp import ShardedWeights, rounds, without_values
from abcrown_dist.weights.local import LocalWeights
from tests import flow
from tests.bounds import zoo
from tests.models import mlp
from tests.parallel import counting, jobs
from tests.parallel.jobs import Case, Mode
from tests.parallel.pool import Pool
from tests.weights.laws import DOUBLE, captured

Pools = Callable[[int], Pool]


@pytest.mark.parametrize("work", ["ibp", "crown", "alpha-crown", "forward", "attack"])
@pytest.mark.parametrize(("mode", "most"), [(Mode("fsdp"), 1), (Mode("fsdp", prefetch=True), 2)])
def test_few_weights_are_ever_whole(pools: Pools, mode: Mode, most: int, work: str) -> None:
    """In the gradients of alpha-CROWN and of attacks, too; and none when the work is done."""
    for name in ("depth_5", "shared"):
        for census in pools(2).run(counting.whole_weights, name, mode, work, most):
            assert census.gathered >= 3
            assert 1 <= census.most <= most
            assert census.alive == 0


def test_prefetch_has_the_next_weights_ready(pools: Pools) -> None:
    for census in pools(2).run(counting.whole_weights, "depth_5", Mode("fsdp", True), "crown", 2):
        assert census.most == 2


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", ["depth_8", "cnn", "one_neuron"])
def test_at_rest_a_rank_holds_its_shards_only(pools: Pools, name: str, size: int) -> None:
    """One part in P of the weights, and less than one element of padding per constant."""
    graph = jobs.networks.graph(name)
    whole, padding = counting.weight_bytes(graph), 4 * len(graph.constants)
    limit = whole // size + padding
    for at_rest, after in pools(size).run(
        counting.bytes_at_rest, name, Mode("fsdp", True), "alpha-crown", limit
    ):
        assert whole / size <= at_rest <= limit
        assert whole / size <= after <= at_rest  # gloo may have held a buffer a little longer at first


def test_graphs_of_sharded_weights_have_shapes_only(pools: Pools) -> None:
    assert all(pools(2).run(counting.graphs_without_values, "cnn", Mode("fsdp")))


@pytest.mark.parametrize("mode", ["fsdp", "tp"])
def test_the_whole_model_ends_once_it_is_sharded(pools: Pools, tmp_path: Path, mode: str) -> None:
    model = mlp(tmp_path / "net.onnx", [4, 9, 7, 3])
    prop = flow.write_property(tmp_path / "p.vnnlib", [(-1, 1)] * 4, 3, "(<= Y_0 -1000)")
    found = pools(2).run(counting.whole_model_after_loading, str(model), str(prop), mode)
    assert found == [[], []]


@pytest.mark.parametrize("mode", ["fsdp", "tp"])
def test_a_wider_type_is_that_of_the_model(pools: Pools, mode: str) -> None:
    """A float32 model loses nothing in float32 shards: float64 weights can be made of them."""
    case = Case("crown", 2, dtype=torch.float64)
    expected = jobs.bounds_of(LocalWeights(jobs.networks.graph("depth_3"), torch.float64), case)
    for found in pools(2).run(counting.converted, "depth_3", Mode(mode), torch.float32, torch.float64):
        for key, values in expected.items():
            for a, b in zip(values[:2], found[key][:2], strict=True):
                assert torch.equal(a, b) if mode == "fsdp" else torch.allclose(a, b, rtol=1e-12)


def test_digits_that_shards_dropped_do_not_come_back() -> None:
    graph = captured(nn.Linear(3, 4).double(), [(1, 3)])
    assert rounds(graph, torch.float32) and not rounds(graph, DOUBLE)
    assert ShardedWeights(graph, ALONE, torch.float32).to(DOUBLE) is None
    again = ShardedWeights(graph, ALONE, DOUBLE).to(DOUBLE)
    assert again is not None and again.dtype == DOUBLE


def test_values_leave_the_graph_and_nothing_else_does() -> None:
    graph = zoo.graph("sliced")
    bare = without_values(graph)
    assert bare.nodes == graph.nodes and (bare.inputs, bare.outputs) == (graph.inputs, graph.outputs)
    for key, value in graph.constants.items():
        shape = bare.constants[key]
        assert shape.is_meta and (shape.shape, shape.dtype) == (value.shape, value.dtype)


def test_a_map_is_useless_after_its_visit() -> None:
    graph = zoo.graph("mlp")
    weights = ShardedWeights(graph, ALONE)
    node = next(node for node in graph if node.op == "linear")
    with weights.visit(node) as affine:
        affine.apply(torch.zeros(2, *graph[node.inputs[0]].shape))
    with pytest.raises((AttributeError, TypeError)):
        affine.apply(torch.zeros(2, *graph[node.inputs[0]].shape))


def test_gathered_values_are_the_model_s_bits(pools: Pools) -> None:
    for name in ("cnn", "sliced"):
        points = torch.randn(3, jobs.networks.graph(name).input_size)
        expected, _ = jobs.values_and_gradients(ALONE, name, Mode(), points)
        for found, _ in pools(2).run(jobs.values_and_gradients, name, Mode("fsdp"), points):
            assert torch.equal(found, expected)
