"""The rehearsed bytes per row against what the memory meter counts; whole passes against budgets."""

from __future__ import annotations

import pytest
import torch

from abcrown_dist.bounds import chunks
from abcrown_dist.bounds.alpha import AlphaSettings, maximise
from abcrown_dist.bounds.backward import Start, lower_bound
from abcrown_dist.bounds.concretize import Box
from abcrown_dist.bounds.propagate import bound_intermediate, bound_outputs
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.bounds.types import Interval, OneHot, Relaxed, preactivations
from abcrown_dist.bounds.workspace import row_bytes
from abcrown_dist.graph.ir import Graph
from abcrown_dist.util.memory import MemoryMeter
from abcrown_dist.weights.local import LocalWeights
from tests.bounds import zoo
from tests.weights.laws import captured

SINGLE = torch.float32
SHORT = AlphaSettings(iteration=2)
NETS = (
    "mlp", "cnn", "residual", "shared", "two_inputs_two_outputs", "decoder", "grouped_dilated", "pooled",
    "sliced", "relu_output",
)  # fmt: skip


def rows_of(graph: Graph, name: str, count: int, domains: int, one_hot: bool) -> Start:
    hot = OneHot(torch.arange(count) % graph[name].size, torch.ones(count))
    if one_hot:
        return {name: hot}
    return {name: hot.dense(graph[name].shape, SINGLE).repeat(domains, 1, *[1] * len(graph[name].shape))}


def peak(weights: LocalWeights, box: Box, relaxed: Relaxed, start: Start, optimise: bool) -> int:
    given = [rows for rows in start.values() if isinstance(rows, torch.Tensor)]
    with torch.no_grad(), MemoryMeter(already=given) as meter:
        if optimise:
            maximise(weights, start, relaxed, box, AlphaSettings(iteration=2))
        else:
            lower_bound(weights, start, relaxed, box)
    return meter.peak_bytes


@pytest.mark.parametrize("one_hot", [True, False], ids=["identity", "dense"])
@pytest.mark.parametrize("optimise", [False, True], ids=["crown", "alpha"])
@pytest.mark.parametrize("domains", [1, 3])
@pytest.mark.parametrize("name", NETS)
def test_bytes_per_row_are_enough_and_not_twice_too_many(
    name: str, domains: int, optimise: bool, one_hot: bool
) -> None:
    """From every place where a pass starts; what rows do not share is the slope of peak over rows."""
    graph = zoo.graph(name)
    weights, box = LocalWeights(graph, SINGLE), zoo.boxes(graph, domains, SINGLE, radius=1.0)
    with torch.no_grad():
        relaxed = bound_intermediate(weights, box, BoundSettings())
    for start in dict.fromkeys([*preactivations(graph), *graph.outputs]):
        few, many = (
            peak(weights, box, relaxed, rows_of(graph, start, count, domains, one_hot), optimise)
            for count in (32, 96)
        )
        measured = (many - few) / 64
        planned = row_bytes(graph, (start,), SINGLE, domains, optimise=optimise, one_hot=one_hot)
        assert measured <= planned
        assert planned <= 2 * measured + 64 * domains  # vectors of one number per row


def test_several_start_nodes_add_up() -> None:
    graph = zoo.graph("two_inputs_two_outputs")
    first, last = graph.outputs
    together = row_bytes(graph, graph.outputs, SINGLE, 2, optimise=False, one_hot=False)
    weights, box = LocalWeights(graph, SINGLE), zoo.boxes(graph, 2, SINGLE, radius=1.0)
    with torch.no_grad():
        relaxed = bound_intermediate(weights, box, BoundSettings())
    few, many = (
        peak(
            weights,
            box,
            relaxed,
            {**rows_of(graph, first, n, 2, False), **rows_of(graph, last, n, 2, False)},
            False,
        )
        for n in (50, 150)
    )
    assert (many - few) / 100 <= together


@pytest.mark.parametrize("method", ["crown", "alpha-crown"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "residual"])
def test_a_budget_is_kept_by_the_whole_pass(name: str, method: str) -> None:
    """Budgets for chunks of a few rows hold for the whole pass, weights and intervals included."""
    graph = zoo.graph(name)
    weights, box = LocalWeights(graph, SINGLE), zoo.boxes(graph, 2, SINGLE, radius=1.0)
    standing = chunks.affine_weight_bytes(graph, SINGLE) + chunks.state_bytes(graph, SINGLE, 2)
    widest = max(
        row_bytes(graph, (start,), SINGLE, 2, optimise=method == "alpha-crown", one_hot=True)
        for start in [*preactivations(graph), *graph.outputs]
    )
    reference = _bounds(weights, box, BoundSettings(method=method, alpha=SHORT))
    for rows in (4, 16):
        budget = standing + rows * widest
        with MemoryMeter(already=graph.constants.values()) as meter:
            found = _bounds(weights, box, BoundSettings(method=method, budget=budget, alpha=SHORT))
        assert meter.peak_bytes <= budget
        for key, interval in found.items():
            torch.testing.assert_close(interval.lower, reference[key].lower, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_wide_mlp_inside_one_gibibyte() -> None:
    """784-8192-8192-8192-10: half of the budget is weights, unchunked rows would take twice as much."""
    torch.manual_seed(0)
    graph = captured(zoo.Mlp(784, 8192, 8192, 8192, 10), [(1, 784)], dtype=SINGLE)
    weights = LocalWeights(graph, SINGLE)
    centre = torch.rand(1, 1, 784)
    box = Box({graph.inputs[0]: centre - 0.01}, {graph.inputs[0]: centre + 0.01})
    budget = 1 << 30
    with MemoryMeter(already=graph.constants.values()) as meter:
        found = _bounds(weights, box, BoundSettings(method="crown", budget=budget))
    assert meter.baseline > 0.5 * budget
    assert meter.peak_bytes <= budget
    with MemoryMeter(already=graph.constants.values()) as unlimited:
        whole = _bounds(weights, box, BoundSettings(method="crown", budget=1 << 40))
    assert unlimited.peak_bytes > budget, "chunks were not needed"
    again = _bounds(weights, box, BoundSettings(method="crown", budget=budget))
    for key, interval in found.items():
        scale = whole[key].magnitude.max()
        assert (interval.lower - whole[key].lower).abs().max() <= 1e-6 * scale
        assert (interval.upper - whole[key].upper).abs().max() <= 1e-6 * scale
        assert torch.equal(interval.lower, again[key].lower) and torch.equal(interval.upper, again[key].upper)


def _bounds(weights: LocalWeights, box: Box, settings: BoundSettings) -> dict[str, Interval]:
    with torch.no_grad():
        return bound_outputs(weights, box, settings)
