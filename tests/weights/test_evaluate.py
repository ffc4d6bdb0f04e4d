"""Concrete values for many points at once, against one call per point."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from abcrown_dist.graph.execute import cast, execute
from abcrown_dist.graph.ir import Graph
from abcrown_dist.util.memory import MemoryMeter
from abcrown_dist.weights.evaluate import evaluate, flat_network, split_inputs
from abcrown_dist.weights.local import LocalWeights
from tests.bounds import zoo
from tests.weights.laws import DOUBLE, Lambda, captured


def _points(graph: Graph, count: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(count, *graph[name].shape, generator=random, dtype=DOUBLE) for name in graph.inputs
    }


@pytest.mark.parametrize("name", zoo.NAMES)
def test_a_batch_equals_single_examples(name: str) -> None:
    graph = zoo.graph(name)
    weights = LocalWeights(graph, DOUBLE)
    points = _points(graph, 4)
    values = evaluate(graph, weights, points)
    for i in range(4):
        expected = execute(cast(graph, DOUBLE), [points[key][i] for key in graph.inputs])
        for key, value in zip(graph.outputs, expected, strict=True):
            torch.testing.assert_close(values[key][i], value, rtol=1e-11, atol=1e-11)
    assert list(values) == list(dict.fromkeys(graph.outputs))


def test_other_nonlinear_ops_are_called_as_they_are() -> None:
    graph = captured(Lambda(lambda x, y: torch.sigmoid(x) * y), [(1, 3), (1, 3)])
    points = _points(graph, 5)
    (value,) = evaluate(graph, LocalWeights(graph, DOUBLE), points).values()
    x, y = (points[name] for name in graph.inputs)
    torch.testing.assert_close(value, torch.sigmoid(x) * y)


def test_flat_variables_follow_declaration_and_c_order() -> None:
    graph = zoo.graph("two_inputs_two_outputs")
    x = torch.arange(2 * graph.input_size, dtype=DOUBLE).reshape(2, -1)
    parts = split_inputs(graph, x)
    assert torch.equal(torch.cat([parts[name].flatten(1) for name in graph.inputs], 1), x)
    weights = LocalWeights(graph, DOUBLE)
    outputs = evaluate(graph, weights, parts)
    flat = flat_network(graph, weights)(x)
    assert torch.equal(flat, torch.cat([outputs[name].flatten(1) for name in graph.outputs], 1))
    rows = split_inputs(graph, x[:, None].expand(-1, 3, -1))
    assert rows[graph.inputs[0]].shape == (2, 3, *graph[graph.inputs[0]].shape)


def test_gradients_flow_to_the_points() -> None:
    graph = captured(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).double(), [(1, 3)])
    network = flat_network(graph, LocalWeights(graph, DOUBLE))
    x = torch.randn(2, 3, dtype=DOUBLE, requires_grad=True)
    assert torch.autograd.gradcheck(network, (x,))


def test_values_are_let_go_after_their_last_reader() -> None:
    """A chain of equal layers holds a few activations, not all of them."""
    graph = captured(
        nn.Sequential(*[nn.ReLU() if i % 2 else nn.Linear(64, 64) for i in range(40)]).double(), [(1, 64)]
    )
    weights = LocalWeights(graph, DOUBLE)
    points = _points(graph, 100)
    evaluate(graph, weights, points)
    with MemoryMeter() as meter:
        evaluate(graph, weights, points)
    assert meter.peak_bytes <= 3 * 100 * 64 * 8


def test_weights_in_another_dtype_come_from_the_originals() -> None:
    graph = zoo.graph("mlp")
    single = LocalWeights(graph, torch.float32)
    double = single.to(torch.float64)
    assert single.to(torch.float32) is single
    for key, value in graph.constants.items():
        assert double.constant(key).dtype == torch.float64
        assert torch.equal(double.constant(key), value.double())
