"""Refined bounds hold every value, equal the exact extremes on tiny networks, and never get looser."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from abcrown_dist.exact import refine
from abcrown_dist.exact.integer import IntegerBound
from abcrown_dist.exact.refine import tighten, unstable_neurons
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.weights.local import LocalWeights
from tests.bounds import zoo
from tests.exact import exact_minimum
from tests.lp_duals import interval_bounds, random_layers, relu_network

Array = np.ndarray
Bounds = dict[str, tuple[Array, Array]]


def tiny(
    seed: int, depth: int = 3, radius: float = 0.4
) -> tuple[list[tuple[Array, Array]], LocalWeights, Array, Array, Bounds]:
    """Layers of a random ReLU network, its weights, a box, and interval bounds by node."""
    random = np.random.default_rng(seed)
    layers = random_layers(random, [3, *[6] * depth, 2])
    centre = random.standard_normal(3)
    lower, upper = centre - radius, centre + radius
    weights = relu_network(layers)
    names = [node.inputs[0] for node in weights.graph if node.op == "relu"]
    given = dict(zip(names, interval_bounds(layers, lower, upper), strict=True))
    return layers, weights, lower, upper, given


@pytest.mark.parametrize("seed", range(6))
def test_integer_programmes_reach_the_exact_extremes(seed: int) -> None:
    layers, weights, lower, upper, given = tiny(seed)
    found = tighten(weights, lower, upper, given, unstable_neurons(given), deadline=Deadline())
    assert found.tried > 0
    for depth, name in enumerate(given, start=1):
        part = layers[:depth]
        matrices, biases = [W for W, _ in part], [b for _, b in part]
        for j in np.flatnonzero((given[name][0] < 0) & (given[name][1] > 0)):
            unit = np.eye(6)[j]
            least = exact_minimum(matrices, biases, lower, upper, unit)
            most = -exact_minimum(matrices, biases, lower, upper, -unit)
            low, high = found.bounds[name][0][j], found.bounds[name][1][j]
            assert low <= least + 1e-6 and high >= most - 1e-6
            # The second side is left out once the first one proves the neuron stable.
            assert high < 0 or low == pytest.approx(least, abs=1e-3) or least > 0 or most < 0
            assert low > 0 or high == pytest.approx(most, abs=1e-3) or least > 0 or most < 0
            if least > 1e-3 or most < -1e-3:
                assert low >= 0 or high <= 0


@pytest.mark.parametrize("integral", [False, True])
@pytest.mark.parametrize("name", ["mlp", "cnn", "leaky", "residual", "shared", "sliced", "relu_output"])
def test_bounds_hold_sampled_values_and_never_get_looser(name: str, integral: bool) -> None:
    graph = zoo.graph(name)
    weights = LocalWeights(graph, torch.float64)
    random = np.random.default_rng(0)
    centre = random.standard_normal(graph.input_size)
    lower, upper = centre - 0.1, centre + 0.1
    given = wide_bounds(weights, lower, upper)
    neurons = unstable_neurons(given)
    chosen = [neurons[i] for i in random.permutation(len(neurons))[:12]]
    found = tighten(
        weights, lower, upper, given, chosen, deadline=Deadline(), integral=integral, neuron_timeout=2.0
    )
    assert any((found.bounds[node][0] > given[node][0]).any() for node, _ in chosen)
    points = np.vstack([lower + (upper - lower) * random.random((300, len(lower))), lower, upper])
    for node, values in trace(weights, points).items():
        if node in given:
            low, high = (side.reshape(-1) for side in found.bounds[node])
            assert (values >= low).all() and (values <= high).all()
            assert (low >= given[node][0].reshape(-1)).all() and (high <= given[node][1].reshape(-1)).all()
            assert found.bounds[node][0].shape == given[node][0].shape


def trace(weights: LocalWeights, points: Array) -> dict[str, Array]:
    """Values (P, neurons) of all nodes, node by node through the maps."""
    graph = weights.graph
    values: dict[str, torch.Tensor] = {}
    start = 0
    for name in graph.inputs:
        part = points[:, start : start + graph[name].size]
        values[name] = torch.from_numpy(part).reshape(-1, *graph[name].shape)
        start += graph[name].size
    for node in graph:
        operands = [values[name] for name in node.inputs]
        if node.op == "relu":
            values[node.name] = operands[0].relu()
        elif node.op == "leaky_relu":
            values[node.name] = torch.nn.functional.leaky_relu(operands[0], node.attrs["negative_slope"])
        elif node.op != "input":
            with weights.visit(node) as affine, torch.no_grad():
                values[node.name] = affine.apply(*operands)
    return {name: value.flatten(1).numpy() for name, value in values.items()}


def wide_bounds(weights: LocalWeights, lower: Array, upper: Array) -> Bounds:
    """Bounds of all pre-activations far outside of what sampling shows, shaped like their nodes."""
    random = np.random.default_rng(5)
    points = lower + (upper - lower) * random.random((100, len(lower)))
    graph = weights.graph
    wanted = {node.inputs[0] for node in graph if node.op in ("relu", "leaky_relu")}
    given: Bounds = {}
    for name, values in trace(weights, points).items():
        if name in wanted:
            spread = values.max(0) - values.min(0) + 1.0
            shape = graph[name].shape
            given[name] = (values.min(0) - spread).reshape(shape), (values.max(0) + spread).reshape(shape)
    return given


def test_later_layers_profit_from_earlier_ones() -> None:
    """The relaxation of a third layer is tighter when the second was refined in the same run."""
    better = 0
    for seed in range(12):
        _, weights, lower, upper, given = tiny(seed, radius=0.8)
        third = list(given)[2]
        late = [neuron for neuron in unstable_neurons(given) if neuron[0] == third]
        alone, together = (
            tighten(weights, lower, upper, given, neurons, deadline=Deadline(), integral=False).bounds[third]
            for neurons in (late, unstable_neurons(given))
        )
        # Only neurons of which both sides are worked on in both runs can be compared.
        both = (np.maximum(alone[0], together[0]) < 0) & (np.minimum(alone[1], together[1]) > 0)
        gained = (together[0] - alone[0])[both]
        assert (gained >= -1e-6).all()
        better += bool((gained > 1e-3).any())
    assert better >= 3


def test_the_loosest_neuron_of_the_first_layer_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    _, weights, lower, upper, given = tiny(1, radius=1.5)
    order: list[tuple[int, int]] = []
    real = refine._Layer.improve

    def watch(layer: refine._Layer, index: int, time_limit: float) -> None:
        order.append((len(layer.program.integral), index))
        real(layer, index, time_limit)

    monkeypatch.setattr(refine._Layer, "improve", watch)
    neurons = unstable_neurons(given)
    tighten(weights, lower, upper, given, neurons[::-1], deadline=Deadline(), integral=False)
    columns = [size for size, _ in order]
    assert columns == sorted(columns)
    low, high = next(iter(given.values()))
    first = [index for size, index in order if size == columns[0]]
    areas = [-low[j] * high[j] for j in first]
    assert len(areas) > 1
    assert areas == sorted(areas, reverse=True)


def test_without_time_nothing_changes() -> None:
    _, weights, lower, upper, given = tiny(2)
    found = tighten(weights, lower, upper, given, unstable_neurons(given), deadline=Deadline(0))
    assert found.tried == found.tightened == found.stabilised == 0
    for name, sides in given.items():
        for before, after in zip(sides, found.bounds[name], strict=True):
            assert (before == after).all()


def test_a_neuron_without_time_keeps_its_bounds() -> None:
    _, weights, lower, upper, given = tiny(2)
    found = tighten(
        weights, lower, upper, given, unstable_neurons(given), deadline=Deadline(), neuron_timeout=0
    )
    assert found.tried > 0
    for name, (low, high) in given.items():
        assert (found.bounds[name][0] >= low).all() and (found.bounds[name][1] <= high).all()


def test_a_bound_that_crosses_the_other_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, weights, lower, upper, given = tiny(0)

    def lie(*_: object, **__: object) -> IntegerBound:
        return IntegerBound(1e9, 0.0, True, None, 1)

    monkeypatch.setattr(refine, "integer_minimum", lie)
    found = tighten(weights, lower, upper, given, unstable_neurons(given), deadline=Deadline())
    for low, high in found.bounds.values():
        assert (low <= high).all()
        assert high.max() < 1e8


def test_with_large_constants_branching_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The margin of what HiGHS proposes is larger than a hundredth of what the neurons do."""
    _, weights, lower, upper, given = tiny(0, depth=2)

    def propose(program: object, cost: Array, **_: object) -> IntegerBound:
        return IntegerBound(1e-3, 0.5, True, None, 1)

    monkeypatch.setattr(refine, "integer_minimum", propose)
    found = tighten(weights, lower, upper, given, unstable_neurons(given), deadline=Deadline())
    relaxed = tighten(
        weights, lower, upper, given, unstable_neurons(given), deadline=Deadline(), integral=False
    )
    for name in given:
        for some, others in zip(found.bounds[name], relaxed.bounds[name], strict=True):
            assert some == pytest.approx(others, abs=1e-6)
