"""Small inputs that broke other verifiers, as far as bounds are concerned; numbers that are none."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from abcrown_dist.bounds import backward
from abcrown_dist.bounds.concretize import Box, centre_radius, contract
from abcrown_dist.bounds.exactness import exact_by_intervals
from abcrown_dist.bounds.intervals import combine
from abcrown_dist.bounds.propagate import bound_intermediate, bound_outputs
from abcrown_dist.bounds.settings import METHODS, BoundSettings
from abcrown_dist.bounds.types import Interval
from abcrown_dist.graph.ir import Graph
from abcrown_dist.graph.load_onnx import load_onnx
from abcrown_dist.util.memory import MemoryMeter
from abcrown_dist.weights.local import LocalWeights
from abcrown_dist.weights.maps import AffineMap
from tests.bounds import zoo
from tests.bounds.sampling import assert_contains, sample_outputs
from tests.models import residual_cnn, transpose_broadcast
from tests.weights.laws import captured

SINGLE = torch.float32


def unit_box(graph: Graph, low: float, high: float, dtype: torch.dtype = SINGLE) -> Box:
    shapes = {name: (1, *graph[name].shape) for name in graph.inputs}
    return Box(
        {name: torch.full(shape, low, dtype=dtype) for name, shape in shapes.items()},
        {name: torch.full(shape, high, dtype=dtype) for name, shape in shapes.items()},
    )


def bounds(
    graph: Graph, box: Box, settings: BoundSettings, dtype: torch.dtype = SINGLE
) -> dict[str, Interval]:
    with torch.no_grad():
        return bound_outputs(LocalWeights(graph, dtype), box, settings)


@pytest.mark.parametrize("compare", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_transpose_and_broadcast_are_exact(tmp_path: Path, method: str, compare: bool) -> None:
    graph = load_onnx(transpose_broadcast(tmp_path / "net.onnx")).graph
    (found,) = bounds(
        graph, unit_box(graph, 0, 1), BoundSettings(method=method, compare_with_ibp=compare)
    ).values()
    assert found.lower.tolist() == [[[[0, 0], [0, 0]]]]
    assert found.upper.tolist() == [[[[1, 1], [1, 1]]]]


def test_residual_network_builds_no_dense_identity(tmp_path: Path) -> None:
    """A pass over all rows of a 1024-wide convolution stays far below rows x 1024 numbers twice over."""
    graph = load_onnx(residual_cnn(tmp_path / "net.onnx")).graph
    weights, box = LocalWeights(graph, SINGLE), unit_box(graph, 0.4, 0.5)
    with torch.no_grad(), MemoryMeter() as meter:
        bound_intermediate(weights, box, BoundSettings(batch_rows=64))
    assert meter.peak_bytes < 64 * 3072 * 4 * 8, "eight coefficient matrices of a chunk hold everything"
    found = bounds(graph, box, BoundSettings(batch_rows=64))
    assert_contains(found, sample_outputs(graph, box, 0, 2000), 0, 1e-5)


def test_identity_rows_never_meet_a_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass over a convolution, a dense layer or a sum starts from the weights' own rows."""
    graph = load_onnx(residual_cnn(tmp_path / "net.onnx")).graph
    multiply, calls = backward.affine_backward, []

    def watch(affine: AffineMap, A: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls.append(A.shape)
        assert not ((A.flatten(2) != 0).sum(2) <= 1).all(), "identity rows were multiplied"
        return multiply(affine, A)

    monkeypatch.setattr(backward, "affine_backward", watch)
    bounds(graph, unit_box(graph, 0.4, 0.5), BoundSettings())
    assert calls


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e38])
def test_weights_that_are_no_numbers_or_overflow_give_no_finite_bounds(
    value: float, place: int, method: str
) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    linear = [layer for layer in module if isinstance(layer, nn.Linear)]
    with torch.no_grad():
        for layer in linear:
            layer.weight.abs_()
            layer.bias.abs_()
        linear[place].weight[0, 0] = value
        if value == 1e38:
            linear[place].weight.fill_(value)
            linear[(place + 1) % 3].weight.fill_(value)
    graph = captured(module, [(1, 3)], dtype=SINGLE)
    found = bounds(graph, unit_box(graph, -1, 1), BoundSettings(method=method))
    for interval in found.values():
        finite = interval.lower.isfinite() & interval.upper.isfinite()
        # Row 0 of the last layer is hit wherever the value sits; with a fill all rows are.
        assert not finite.flatten()[0]
        if value == 1e38:
            assert not finite.any()


def test_bounds_that_cross_beyond_rounding_become_nan() -> None:
    """Valid bounds cross by rounding only; a defect that contradicts itself is no proof."""
    by_intervals = Interval(torch.tensor([[0.0, 1.0, 1.0, -1.0]]), torch.tensor([[2.0, 2.0, 2.0, 1.0]]))
    by_lines = Interval(torch.tensor([[1.0, 0.0, 0.0, -2.0]]), torch.tensor([[3.0, 1 - 1e-6, 0.5, 0.5]]))
    found = combine(by_intervals, by_lines, True)
    assert found.lower[0, 0] == 1 and found.upper[0, 0] == 2
    assert found.lower[0, 1] == by_lines.upper[0, 1] and found.upper[0, 1] == 1, (
        "swapped: the value lies between"
    )
    assert found.lower[0, 2].isnan() and found.upper[0, 2].isnan()
    assert found.lower[0, 3] == -1 and found.upper[0, 3] == 0.5
    taken = combine(by_intervals, by_lines, False)
    assert torch.equal(taken.lower, by_lines.lower) and torch.equal(taken.upper, by_lines.upper)
    nothing = Interval(*(torch.full((1, 4), math.nan) for _ in range(2)))
    for pair in ((nothing, by_lines), (by_intervals, nothing)):
        assert combine(*pair, True).lower.isnan().all()


def test_centre_and_radius_contain_the_interval() -> None:
    random = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        for magnitude in (1e-30, 1e-3, 1.0, 1e6, 1e37):
            low = magnitude * torch.randn(20_000, generator=random, dtype=dtype)
            exponent = 9 * torch.rand(20_000, generator=random, dtype=dtype) - 8
            high = low + low.abs() * 10**exponent
            centre, radius = centre_radius(low, high)
            assert (centre - radius <= low).all() and (centre + radius >= high).all()
            assert (
                radius <= (high - low) / 2 + 4 * torch.finfo(dtype).eps * high.abs().maximum(low.abs())
            ).all()
    fixed = torch.tensor([0.1, -3.0, 1e38])
    centre, radius = centre_radius(fixed, fixed)
    assert torch.equal(centre, fixed) and (radius == 0).all()


def test_minimum_and_minimiser_agree() -> None:
    graph = zoo.graph("two_inputs_two_outputs")
    box = zoo.boxes(graph, 3, torch.float64)
    random = torch.Generator().manual_seed(0)
    for lead in (1, 3):
        A = {
            name: torch.randn(lead, 5, *graph[name].shape, generator=random, dtype=torch.float64)
            for name in graph.inputs
        }
        points, least = box.minimiser(A), box.minimum(A)
        value = sum((A[name] * points[name]).flatten(2).sum(2) for name in A)
        torch.testing.assert_close(value, least)
        for name, point in points.items():
            assert (point >= box.lower[name][:, None] - 1e-12).all()
            assert (point <= box.upper[name][:, None] + 1e-12).all()
        corner = sum(
            (torch.where(A[name] > 0, box.lower[name][:, None], box.upper[name][:, None]) * A[name])
            .flatten(2)
            .sum(2)
            for name in A
        )
        assert isinstance(corner, torch.Tensor)
        torch.testing.assert_close(corner, least)


@pytest.mark.parametrize(("rows", "vectors"), [(1, 1), (1, 3), (3, 1), (3, 3)])
def test_contract_broadcasts_domains(rows: int, vectors: int) -> None:
    random = torch.Generator().manual_seed(0)
    A, v = torch.randn(rows, 4, 6, generator=random), torch.randn(vectors, 2, 3, generator=random)
    expected = (A * v.flatten(1)[:, None]).sum(2)
    torch.testing.assert_close(contract(A, v), expected)


def test_where_intervals_are_exact() -> None:
    """Claimed exactness holds: interval bounds there are reached by some input."""
    for name in zoo.NAMES:
        graph = zoo.graph(name)
        box = zoo.boxes(graph, 1, torch.float64)
        exact = exact_by_intervals(graph)
        assert set(graph.inputs) <= exact
        wanted = [key for key in exact if key not in graph.inputs]
        probe = Graph(graph.nodes, graph.inputs, tuple(wanted), graph.constants)
        tight = bounds(probe, box, BoundSettings(method="crown-ibp", compare_with_ibp=False), torch.float64)
        loose = bounds(probe, box, BoundSettings(method="ibp"), torch.float64)
        for key in wanted:
            # Below the first nonlinearity backward bounds are exact.
            torch.testing.assert_close(loose[key].lower, tight[key].lower, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(loose[key].upper, tight[key].upper, rtol=1e-10, atol=1e-10)


def test_a_cancelling_difference_is_not_called_exact() -> None:
    class Cancel(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.flip(1) - x).relu()

    graph = captured(Cancel(), [(1, 2)])
    exact = exact_by_intervals(graph)
    (difference,) = (node.name for node in graph if node.op == "sub")
    assert difference not in exact


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("slope", [-0.4, 1.5])
def test_slopes_that_rewriting_would_replace(slope: float, method: str) -> None:
    """LeakyReLU beyond [0, 1] as a node of its own: falling lines, and a fixed lower line."""
    graph = zoo.graph("leaky")
    nodes = tuple(
        dataclasses.replace(node, attrs={"negative_slope": slope}) if node.op == "leaky_relu" else node
        for node in graph
    )
    steep = Graph(nodes, graph.inputs, graph.outputs, graph.constants)
    box = zoo.boxes(steep, 3, torch.float64, radius=1.0)
    for compare in (True, False):
        settings = BoundSettings(method=method, compare_with_ibp=compare)
        found = bounds(steep, box, settings, torch.float64)
        for domain in range(3):
            assert_contains(found, sample_outputs(steep, box, domain, 5000), domain, 1e-12)


def test_a_repeated_coordinate_ends_exactness() -> None:
    """After a broadcast, (x, x) times (1, -1) is zero, which intervals do not know."""

    class Repeat(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * torch.tensor([[1.0], [-1.0]], dtype=x.dtype)).sum(0, keepdim=True).relu()

    graph = captured(Repeat(), [(1, 2)])
    exact = exact_by_intervals(graph)
    (product,) = (node.name for node in graph if node.op == "mul")
    (total,) = (node.name for node in graph if node.op == "sum")
    assert product in exact and total not in exact
    (found,) = bounds(graph, unit_box(graph, -1, 1, torch.float64), BoundSettings(), torch.float64).values()
    assert (found.lower == 0).all() and (found.upper == 0).all()
