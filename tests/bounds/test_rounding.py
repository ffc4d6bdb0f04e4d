"""The rounding estimate against float64: never too small, and small enough to prove things with."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from abcrown_dist.bounds.alpha import AlphaSettings
from abcrown_dist.bounds.concretize import Box
from abcrown_dist.bounds.propagate import bound_intermediate, bound_outputs, bound_rows
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.bounds.types import Interval, preactivations
from abcrown_dist.graph.ir import Graph
from abcrown_dist.weights.local import LocalWeights
from tests.bounds import oracle, zoo
from tests.weights.laws import captured

METHODS = ("ibp", "crown-ibp", "crown", "init-crown", "forward", "forward+backward")


def in_both(
    graph: Graph, box: Box, settings: BoundSettings
) -> tuple[dict[str, Interval], dict[str, Interval]]:
    """Bounds over one float32 box, in float32 and in float64."""
    wide = Box({k: v.double() for k, v in box.lower.items()}, {k: v.double() for k, v in box.upper.items()})
    with torch.no_grad():
        single = bound_outputs(LocalWeights(graph, torch.float32), box, settings)
        return single, bound_outputs(LocalWeights(graph, torch.float64), wide, settings)


def worst(single: dict[str, Interval], double: dict[str, Interval]) -> float:
    """Largest true error over its estimate; 0 / 0 counts as 0."""
    ratios = [0.0]
    for name, found in single.items():
        exact, estimate = double[name], found.error.double()
        off = torch.maximum((found.lower - exact.lower).abs(), (found.upper - exact.upper).abs())
        ratios.append(float(torch.where(off == 0, 0.0, off / estimate).max()))
    return max(ratios)


@pytest.mark.parametrize("compare", [True, False], ids=["with_ibp", "without_ibp"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", zoo.NAMES)
def test_estimate_covers_the_difference_on_the_zoo(name: str, method: str, compare: bool) -> None:
    graph = zoo.graph(name)
    settings = BoundSettings(method=method, compare_with_ibp=compare, alpha=AlphaSettings(iteration=6))
    for radius in (1e-3, 0.4):
        single, double = in_both(graph, zoo.boxes(graph, 3, torch.float32, radius=radius), settings)
        assert worst(single, double) <= 0.5


@pytest.mark.parametrize("name", oracle.NAMES)
def test_estimate_on_real_networks(name: str, oracle_folder: Path, bench: Path) -> None:
    """The figures that `bounds/rounding.py` quotes."""
    case = oracle.load(oracle_folder, bench, name)
    methods = METHODS[:3] if "resnet" in name else METHODS[:4]
    for method in methods:
        single, double = in_both(case.graph, case.box, BoundSettings(method=method, compare_with_ibp=False))
        assert worst(single, double) <= 0.28
        (found,), (exact,) = single.values(), double.values()
        width = exact.upper - exact.lower
        if method in ("crown", "init-crown"):
            assert worst(single, double) <= 1 / 16
            assert (found.error < 1e-2 * width)[width > 0].all()


@pytest.mark.parametrize("slope", [0.0, 0.3])
@pytest.mark.parametrize("method", ["ibp", "crown"])
def test_estimate_on_deep_networks_with_cancellation(method: str, slope: float) -> None:
    """Eight layers whose bounds are differences of large numbers: outputs and all pre-activations."""
    torch.manual_seed(0)
    module = zoo.Mlp(10, *[40] * 8, 3, activation=lambda: nn.LeakyReLU(slope) if slope else nn.ReLU())
    graph = captured(module, [(1, 10)], dtype=torch.float32)
    settings = BoundSettings(method=method)
    for scale, radius in ((1.0, 1e-4), (1e4, 1.0), (1.0, 0.3)):
        centre = scale * torch.rand(2, 1, 10)
        (key,) = graph.inputs
        box = Box({key: centre - radius}, {key: centre + radius})
        assert worst(*in_both(graph, box, settings)) <= 0.5
        single, double = relaxed_in_both(graph, box, settings)
        if slope == 0:  # the lower bound of an inactive ReLU is nobody's business
            for name, exact in double.items():
                dead = (exact.upper <= 0) & (single[name].upper <= 0)
                lower = torch.where(dead, exact.lower, single[name].lower.double())
                single[name] = dataclasses.replace(single[name], lower=lower)
        assert worst(single, double) <= 0.5


def relaxed_in_both(
    graph: Graph, box: Box, settings: BoundSettings
) -> tuple[dict[str, Interval], dict[str, Interval]]:
    found = []
    for dtype in (torch.float32, torch.float64):
        where = Box(
            {k: v.to(dtype) for k, v in box.lower.items()}, {k: v.to(dtype) for k, v in box.upper.items()}
        )
        with torch.no_grad():
            relaxed = bound_intermediate(LocalWeights(graph, dtype), where, settings)
        found.append({name: relaxed.intervals[name] for name in preactivations(graph)})
    return found[0], found[1]


def test_rows_with_cancelling_coefficients() -> None:
    """Differences of large numbers: the estimate speaks of the terms, not of their sum."""
    torch.manual_seed(1)
    graph = captured(zoo.Mlp(6, 30, 30, 2), [(1, 6)], dtype=torch.float32)
    box = zoo.boxes(graph, 1, torch.float32, radius=0.1)
    wide = Box({k: v.double() for k, v in box.lower.items()}, {k: v.double() for k, v in box.upper.items()})
    row = torch.tensor([[[[1e6, -1e6]], [[1.0, -1.0]], [[1e-6, 1e-6]]]])
    settings = BoundSettings(method="crown")
    found = []
    for dtype, where in ((torch.float32, box), (torch.float64, wide)):
        weights = LocalWeights(graph, dtype)
        with torch.no_grad():
            relaxed = bound_intermediate(weights, where, settings)
            found.append(bound_rows(weights, where, relaxed, {graph.outputs[0]: row.to(dtype)}, settings))
    single, double = found
    assert ((single.lower - double.lower).abs() <= single.error).all()
    torch.testing.assert_close(
        single.error[0] / row[0, :, 0, 0].abs(), single.error[0, 1].expand(3), rtol=0.5, atol=0
    )


def test_views_and_permutations_lose_nothing() -> None:
    class Turn(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.permute(0, 2, 1).flatten(1)[:, 1:]

    graph = captured(Turn(), [(1, 2, 3)], dtype=torch.float32)
    box = zoo.boxes(graph, 1, torch.float32)
    with torch.no_grad():
        relaxed = bound_intermediate(LocalWeights(graph, torch.float32), box, BoundSettings(method="ibp"))
    assert not relaxed.sensitivity
    assert (relaxed.intervals[graph.outputs[0]].error == 0).all()
