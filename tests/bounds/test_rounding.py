"""Worst-case rounding: bounds contain exact values where all sums round one way, and lose little."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from abcrown_dist.bounds.concretize import Box
from abcrown_dist.bounds.propagate import bound_intermediate, bound_outputs, bound_rows
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.bounds.types import Interval
from abcrown_dist.graph.ir import Graph
from abcrown_dist.util.numerics import REAL_ARITHMETIC, Rounding, gamma, sum_error
from abcrown_dist.weights.local import LocalWeights
from tests.bounds import oracle, zoo
from tests.weights.laws import captured

SINGLE, DOUBLE = torch.float32, torch.float64
METHODS = ("ibp", "crown-ibp", "crown", "init-crown", "forward", "forward+backward")
Value = Callable[[list[Fraction]], Fraction]


def at_point(graph: Graph, x: Tensor, method: str, dtype: torch.dtype, rounding: Rounding) -> Interval:
    """Bounds of the only output over the one point x (1, *shape), exact in float32."""
    (key,) = graph.inputs
    box = Box({key: x[None].to(dtype)}, {key: x[None].to(dtype)})
    with torch.no_grad():
        weights = LocalWeights(graph, dtype, rounding=rounding)
        found = bound_outputs(weights, box, BoundSettings(method=method))
    return found[graph.outputs[0]]


def exact(values: Tensor) -> list[Fraction]:
    return [Fraction(value) for value in values.detach().double().flatten().tolist()]


def equal_weights(terms: int, value: float) -> tuple[nn.Module, Value]:
    """One sum of equal products: all roundings fall on the same side."""
    layer = nn.Linear(terms, 1, bias=False)
    nn.init.constant_(layer.weight, value)
    return layer, lambda x: sum(x, Fraction(0)) * exact(layer.weight)[0]


def growing_sums(terms: int) -> tuple[nn.Module, Value]:
    """Partial sums that double: each addition rounds relative to what came before."""
    layer = nn.Linear(terms, 1)
    with torch.no_grad():
        layer.weight[0] = 1.1 ** torch.arange(terms, dtype=SINGLE)
        layer.bias[0] = -float(layer.weight.sum())
    weights, bias = exact(layer.weight), exact(layer.bias)[0]
    return layer, lambda x: sum((w * v for w, v in zip(weights, x, strict=True)), bias)


def huge_terms_cancel(terms: int) -> tuple[nn.Module, Value]:
    layer = nn.Linear(terms, 1, bias=False)
    with torch.no_grad():
        layer.weight[0] = torch.linspace(1, 2, terms) * 1e8 * (-1) ** torch.arange(terms)
    weights = exact(layer.weight)
    return layer, lambda x: sum((w * v for w, v in zip(weights, x, strict=True)), Fraction(0))


class Chain(nn.Module):
    """x + c x, many times over."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.depth):
            x = x + 0.1 * x
        return x.sum(1, keepdim=True)


def residual_chain(depth: int) -> tuple[nn.Module, Value]:
    factor = (1 + Fraction(float(torch.tensor(0.1)))) ** depth
    return Chain(depth), lambda x: sum(x, Fraction(0)) * factor


def wide_convolution(channels: int) -> tuple[nn.Module, Value]:
    """3 x 3 kernels of equal weights over many channels, one output."""
    layer = nn.Conv2d(channels, 1, 3, bias=False)
    nn.init.constant_(layer.weight, 0.1)
    return layer, lambda x: sum(x, Fraction(0)) * exact(layer.weight)[0]


class Cancels(nn.Module):
    """x + 1e8 in one layer, - 1e8 in a call that is fused into it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        with torch.no_grad():
            self.layer.weight.fill_(1.0)
            self.layer.bias.fill_(1e8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) - 1e8


def fused_cancellation() -> tuple[nn.Module, Value]:
    return Cancels(), lambda x: x[0]


SABOTEURS = {
    "equal": (lambda: equal_weights(20_000, 0.1), (1, 20_000)),
    "equal_thirds": (lambda: equal_weights(3001, 1 / 3), (1, 3001)),
    "growing": (lambda: growing_sums(300), (1, 300)),
    "cancelling": (lambda: huge_terms_cancel(1000), (1, 1000)),
    "residual": (lambda: residual_chain(40), (1, 8)),
    "fused": (fused_cancellation, (1, 1)),
    "convolution": (lambda: wide_convolution(500), (1, 500, 3, 3)),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE], ids=["float32", "float64"])
@pytest.mark.parametrize("name", SABOTEURS)
def test_bounds_contain_what_exact_arithmetic_gives(name: str, dtype: torch.dtype, method: str) -> None:
    make, shape = SABOTEURS[name]
    module, value = make()
    graph = captured(module, [shape], dtype=SINGLE)
    for x in (torch.full(shape, 0.7), torch.rand(shape, generator=torch.Generator().manual_seed(0))):
        found = at_point(graph, x, method, dtype, REAL_ARITHMETIC)
        truth = value(exact(x))
        low, high = Fraction(float(found.lower)), Fraction(float(found.upper))
        assert low <= truth <= high
        scale = float(max(abs(truth), 1))
        assert name in ("cancelling", "growing", "fused") or float(high - low) <= 5e-3 * scale


@pytest.mark.parametrize("name", SABOTEURS)
def test_bounds_contain_every_run_of_the_network(name: str) -> None:
    """The network in float32 with one thread, several, and its terms in another order; bounds in float64."""
    make, shape = SABOTEURS[name]
    module, _ = make()
    graph = captured(module, [shape], dtype=SINGLE)
    x = torch.full(shape, 0.7)
    found = at_point(graph, x, "crown", DOUBLE, Rounding(model=SINGLE))
    with torch.no_grad():
        runs = [float(module(x))]
        if isinstance(module, nn.Linear):
            terms = (module.weight[0] * x[0]).tolist()
            for order in (terms, terms[::-1], sorted(terms)):
                total = torch.tensor(0.0)
                for term in order:
                    total = total + term
                runs.append(float(total if module.bias is None else total + module.bias[0]))
    assert all(float(found.lower) <= run <= float(found.upper) for run in runs)


def test_an_estimate_is_beaten_where_the_worst_case_is_not() -> None:
    """Why the default is rigorous: 20,000 equal terms summed one after the other."""
    total, term = torch.tensor(0.0), torch.tensor(0.1) * torch.tensor(0.7)
    for _ in range(20_000):
        total = total + term
    error = abs(Fraction(float(total)) - 20_000 * Fraction(float(term)))
    size = 20_000 * float(term)
    assert float(sum_error(20_000, SINGLE)) * size < error < float(gamma(20_000, SINGLE)) * size


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", zoo.NAMES)
def test_float32_loses_little(name: str, method: str) -> None:
    graph = zoo.graph(name)
    settings = BoundSettings(method=method, compare_with_ibp=False)
    box = zoo.boxes(graph, 3, SINGLE, radius=0.4)
    wide = Box({k: v.double() for k, v in box.lower.items()}, {k: v.double() for k, v in box.upper.items()})
    with torch.no_grad():
        single = bound_outputs(LocalWeights(graph, SINGLE), box, settings)
        double = bound_outputs(LocalWeights(graph, DOUBLE), wide, settings)
    for key, found in single.items():
        width = (double[key].upper - double[key].lower).max()
        assert (found.lower - double[key].lower).abs().max() <= 1e-2 * width
        assert (found.upper - double[key].upper).abs().max() <= 1e-2 * width


@pytest.mark.parametrize("name", oracle.NAMES)
def test_a_networks_own_rounding_is_small_beside_its_bounds(
    name: str, oracle_folder: Path, bench: Path
) -> None:
    case = oracle.load(oracle_folder, bench, name)
    if "resnet" in name:
        pytest.skip("takes long in float64")
    wide = Box(
        {k: v.double() for k, v in case.box.lower.items()}, {k: v.double() for k, v in case.box.upper.items()}
    )
    with torch.no_grad():
        real, run = (
            bound_outputs(LocalWeights(case.graph, DOUBLE, rounding=rounding), wide, BoundSettings())
            for rounding in (REAL_ARITHMETIC, Rounding(model=SINGLE))
        )
    for key, found in real.items():
        width = (found.upper - found.lower).mean()
        assert (run[key].upper - run[key].lower).mean() <= 1.02 * width


def test_rows_with_cancelling_coefficients() -> None:
    """Differences of large numbers: the error speaks of the terms, not of their sum."""
    torch.manual_seed(1)
    graph = captured(zoo.Mlp(6, 30, 30, 2), [(1, 6)], dtype=SINGLE)
    box = zoo.boxes(graph, 1, SINGLE, radius=0.1)
    row = torch.tensor([[[[1e6, -1e6]], [[1.0, -1.0]], [[1e-6, 1e-6]]]])
    settings, weights = BoundSettings(method="crown"), LocalWeights(graph, SINGLE)
    with torch.no_grad():
        relaxed = bound_intermediate(weights, box, settings)
        error = bound_rows(weights, box, relaxed, {graph.outputs[0]: row}, settings).error
    torch.testing.assert_close(error[0] / row[0, :, 0, 0].abs(), error[0, 1].expand(3), rtol=0.5, atol=0)


def test_views_and_permutations_lose_nothing() -> None:
    class Turn(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.permute(0, 2, 1).flatten(1)[:, 1:]

    graph = captured(Turn(), [(1, 2, 3)], dtype=SINGLE)
    box = zoo.boxes(graph, 1, SINGLE)
    with torch.no_grad():
        relaxed = bound_intermediate(LocalWeights(graph, SINGLE), box, BoundSettings(method="ibp"))
    assert not relaxed.execution and not relaxed.own
    (key,) = graph.inputs
    turned = box.lower[key].permute(0, 1, 3, 2).flatten(2)[:, :, 1:]
    assert torch.equal(relaxed.intervals[graph.outputs[0]].lower, turned)
