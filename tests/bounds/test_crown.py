"""Plain CROWN and interval bounds against a second implementation, in NumPy and layer by layer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from abcrown_dist.bounds.propagate import bound_intermediate, bound_outputs
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.bounds.types import preactivations
from abcrown_dist.weights.local import LocalWeights
from tests.bounds import zoo
from tests.weights.laws import captured

DOUBLE = torch.float64
Pair = tuple[np.ndarray, np.ndarray]


def layers_of(module: nn.Module) -> list[Pair]:
    return [
        (layer.weight.detach().numpy(), layer.bias.detach().numpy())
        for layer in module.modules()
        if isinstance(layer, nn.Linear)
    ]


def numpy_crown(
    layers: list[Pair], known: list[Pair], low: np.ndarray, high: np.ndarray, slope: float
) -> Pair:
    """Bounds of the last of `layers`, given pre-activation bounds of all layers before it."""
    ends = []
    for sign in (1.0, -1.0):
        A, bias = sign * np.eye(len(layers[-1][1])), np.zeros(len(layers[-1][1]))
        for (W, b), pre in zip(reversed(layers), [*reversed(known), None], strict=True):
            bias = bias + A @ b
            A = A @ W
            if pre is None:
                break
            lo, u = pre
            chord = np.where(
                lo >= 0, 1.0, np.where(u <= 0, slope, (u - slope * lo) / np.where(u > lo, u - lo, 1))
            )
            shift = np.where((lo < 0) & (u > 0), u - chord * u, 0.0)
            lower = np.where(lo >= 0, 1.0, np.where(u <= 0, slope, np.where(u > -lo, 1.0, slope)))
            bias = bias + np.minimum(A, 0) @ shift
            A = np.maximum(A, 0) * lower + np.minimum(A, 0) * chord
        ends.append(sign * (np.maximum(A, 0) @ low + np.minimum(A, 0) @ high + bias))
    return ends[0], ends[1]


def numpy_ibp(layers: list[Pair], low: np.ndarray, high: np.ndarray, slope: float) -> list[Pair]:
    """Interval bounds of every layer's output before its activation."""
    found = []
    for W, b in layers:
        positive, negative = np.maximum(W, 0), np.minimum(W, 0)
        low, high = positive @ low + negative @ high + b, positive @ high + negative @ low + b
        found.append((low, high))
        low, high = (np.where(end >= 0, end, slope * end) for end in (low, high))
    return found


@pytest.mark.parametrize("method", ["ibp", "crown-ibp", "crown"])
@pytest.mark.parametrize("slope", [0.0, 0.2])
@pytest.mark.parametrize("sizes", [(3, 7, 2), (4, 8, 8, 3), (2, 6, 6, 6, 6, 2)])
def test_equals_the_second_implementation(sizes: tuple[int, ...], slope: float, method: str) -> None:
    torch.manual_seed(len(sizes))
    module = zoo.Mlp(*sizes, activation=lambda: nn.LeakyReLU(slope) if slope else nn.ReLU()).double()
    graph = captured(module, [(1, sizes[0])])
    weights, box = LocalWeights(graph, DOUBLE), zoo.boxes(graph, 3, DOUBLE, radius=1.5)
    settings = BoundSettings(method=method, compare_with_ibp=False)
    with torch.no_grad():
        relaxed = bound_intermediate(weights, box, settings)
        (output,) = bound_outputs(weights, box, settings).values()
    layers = layers_of(module)
    (lower,), (upper,) = box.lower.values(), box.upper.values()
    for domain in range(3):
        low, high = lower[domain, 0].numpy(), upper[domain, 0].numpy()
        by_intervals = numpy_ibp(layers, low, high, slope)
        known: list[Pair] = []
        for depth in range(1, len(layers)):
            pre = by_intervals[depth - 1]
            if method == "crown" and depth > 1:
                tighter = numpy_crown(layers[:depth], known, low, high, slope)
                loose = (pre[0] < 0) & (pre[1] > 0)  # others keep their interval bounds
                pre = np.where(loose, tighter[0], pre[0]), np.where(loose, tighter[1], pre[1])
            known.append(pre)
        final = by_intervals[-1] if method == "ibp" else numpy_crown(layers, known, low, high, slope)
        for name, (lo, u) in zip(preactivations(graph), known, strict=True):
            active = (lo < 0) & (u > 0)  # what is stable by its upper bound may keep any lower one
            found = relaxed.intervals[name]
            np.testing.assert_allclose(
                found.lower[domain, 0].numpy()[active], lo[active], rtol=1e-10, atol=1e-12
            )
            np.testing.assert_allclose(
                found.upper[domain, 0].numpy()[active], u[active], rtol=1e-10, atol=1e-12
            )
        np.testing.assert_allclose(output.lower[domain, 0].numpy(), final[0], rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(output.upper[domain, 0].numpy(), final[1], rtol=1e-10, atol=1e-12)


def test_intersection_with_intervals_tightens_every_pre_activation() -> None:
    for name in zoo.NAMES:
        graph = zoo.graph(name)
        weights, box = LocalWeights(graph, DOUBLE), zoo.boxes(graph, 2, DOUBLE)
        with torch.no_grad():
            both = bound_intermediate(weights, box, BoundSettings(method="crown"))
            plain = bound_intermediate(weights, box, BoundSettings(method="ibp"))
        for key in preactivations(graph):
            assert (both.intervals[key].lower >= plain.intervals[key].lower - 1e-12).all()
            assert (both.intervals[key].upper <= plain.intervals[key].upper + 1e-12).all()
