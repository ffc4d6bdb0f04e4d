"""Every method on every network of the zoo: sampled outputs lie inside, domains do not see each other."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from abcrown_dist.bounds.alpha import AlphaSettings
from abcrown_dist.bounds.concretize import Box
from abcrown_dist.bounds.propagate import bound_intermediate, bound_outputs, bound_rows
from abcrown_dist.bounds.settings import METHODS, BoundSettings
from abcrown_dist.bounds.types import Interval
from abcrown_dist.weights.local import LocalWeights
from tests.bounds import zoo
from tests.bounds.sampling import assert_contains, sample_inputs, sample_outputs

DTYPES = [torch.float32, torch.float64]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
SAMPLES = 10_000


@cache
def samples(name: str, count: int, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    graph = zoo.graph(name)
    box = zoo.boxes(graph, count, dtype)
    return [sample_outputs(graph, box, domain, SAMPLES) for domain in range(count)]


def bounds(name: str, box: Box, settings: BoundSettings, dtype: torch.dtype) -> dict[str, Interval]:
    with torch.no_grad():
        return bound_outputs(LocalWeights(zoo.graph(name), dtype), box, settings)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("compare", [True, False], ids=["with_ibp", "without_ibp"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", zoo.NAMES)
def test_sampled_outputs_lie_inside(name: str, method: str, compare: bool, dtype: torch.dtype) -> None:
    settings = BoundSettings(method=method, compare_with_ibp=compare, alpha=AlphaSettings(iteration=4))
    for count in (1, 3):
        box = zoo.boxes(zoo.graph(name), count, dtype)
        found = bounds(name, box, settings, dtype)
        for domain, outputs in enumerate(samples(name, count, dtype)):
            assert_contains(found, outputs, domain, TOLERANCE[dtype])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", zoo.NAMES)
def test_three_domains_at_once_equal_one_by_one(name: str, method: str) -> None:
    settings = BoundSettings(method=method, alpha=AlphaSettings(iteration=3))
    box = zoo.boxes(zoo.graph(name), 3, torch.float64)
    together = bounds(name, box, settings, torch.float64)
    for domain in range(3):
        alone = bounds(name, box.select(torch.tensor([domain])), settings, torch.float64)
        for key, interval in alone.items():
            scale = 1 + interval.magnitude.max()
            assert (together[key].lower[domain] - interval.lower[0]).abs().max() <= 1e-10 * scale
            assert (together[key].upper[domain] - interval.upper[0]).abs().max() <= 1e-10 * scale


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", zoo.NAMES)
def test_rows_over_outputs_and_inputs(name: str, method: str) -> None:
    """Rows that mix all outputs and inputs of a property: below every sampled value, per domain."""
    graph, dtype = zoo.graph(name), torch.float64
    weights, box = LocalWeights(graph, dtype), zoo.boxes(graph, 2, dtype)
    random = torch.Generator().manual_seed(5)
    start = {
        key: torch.randn(2, 4, *graph[key].shape, generator=random, dtype=dtype)
        for key in dict.fromkeys([*graph.outputs, *graph.inputs])
    }
    settings = BoundSettings(method=method, alpha=AlphaSettings(iteration=4), batch_rows=3)
    with torch.no_grad():
        relaxed = bound_intermediate(weights, box, settings)
        lower = bound_rows(weights, box, relaxed, start, settings).lower
    assert lower.shape == (2, 4)
    for domain in range(2):
        values = {**sample_outputs(graph, box, domain, 1000), **sample_inputs(box, domain, 1000)}
        rows = sum(values[key].flatten(1) @ start[key][domain].flatten(1).T for key in start)
        assert isinstance(rows, torch.Tensor)
        assert (lower[domain] <= rows.amin(0) + 1e-12 * rows.abs().max()).all()


@pytest.mark.parametrize("name", zoo.NAMES)
def test_a_point_is_bounded_by_its_own_output(name: str) -> None:
    """Where nothing varies every method gives the output itself."""
    graph, dtype = zoo.graph(name), torch.float64
    wide = zoo.boxes(graph, 1, dtype)
    box = Box(wide.lower, wide.lower)
    (outputs,) = [sample_outputs(graph, box, 0, 8)]
    for method in METHODS:
        for key, interval in bounds(name, box, BoundSettings(method=method), dtype).items():
            torch.testing.assert_close(interval.lower[0], outputs[key][0], rtol=1e-11, atol=1e-11)
            torch.testing.assert_close(interval.upper[0], outputs[key][0], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("method", METHODS)
def test_affine_networks_are_bounded_exactly(method: str) -> None:
    """Also by forward mode; interval bounds are exact for one layer only, of which there are two."""
    graph, dtype = zoo.graph("affine"), torch.float64
    box = zoo.boxes(graph, 3, dtype)
    weights = LocalWeights(graph, dtype)
    matrix = torch.eye(4, dtype=dtype)
    offset = torch.zeros(1, 1, 4, dtype=dtype)
    for node in graph:
        if node.op == "linear":
            with weights.visit(node) as affine:
                matrix = affine.linear(matrix[:, None])[:, 0]
                offset = affine.apply(offset)
    (key,) = graph.outputs
    low, high = (side[graph.inputs[0]][:, 0] for side in (box.lower, box.upper))
    exact = low @ matrix.clamp(min=0) + high @ matrix.clamp(max=0) + offset[0]
    found = bounds("affine", box, BoundSettings(method=method), dtype)[key]
    if method == "ibp":
        assert (found.lower[:, 0] <= exact + 1e-11).all()
        return
    torch.testing.assert_close(found.lower[:, 0], exact, rtol=1e-11, atol=1e-11)
