"""Numerical comparison of a captured graph with what it was captured from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from abcrown_dist.graph.aten import classify
from abcrown_dist.graph.execute import call, cast, execute
from abcrown_dist.graph.ir import Graph
from abcrown_dist.util.numerics import unit_roundoff

Reference = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""The original: from one example per input to its outputs."""

TOLERANCE = 1e-4
"""Largest difference that passes, as a fraction of the value itself."""

_INSIDE = 3
_FAR = (1.0, 10.0, 100.0)
# A difference is rounding when it is within this factor of what disturbances of that size do to the value.
_ROUNDING = 8.0
_RUNS = 3


@dataclass(frozen=True)
class Difference:
    """A point at which the graph and its original differ.

    Attributes:
        point: one example per input.
        output: index of the output.
        error: largest absolute difference.
        scale: largest absolute value of the original's output.
    """

    point: tuple[torch.Tensor, ...]
    output: int
    error: float
    scale: float


def sample_points(
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    lower: np.ndarray | None = None,
    upper: np.ndarray | None = None,
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Points to compare at: some inside the box, some far outside it. Always the same ones.

    A value that left the capture and became a constant is right inside a box of fixed inputs; only
    the points outside show it.

    Args:
        shapes: shape of each input.
        lower, upper: box over the flat inputs (all inputs concatenated); default [0, 1].
    """
    sizes = [int(np.prod(shape, dtype=np.int64)) for shape in shapes]
    low = np.zeros(sum(sizes)) if lower is None else np.asarray(lower, dtype=np.float64)
    high = np.ones(sum(sizes)) if upper is None else np.asarray(upper, dtype=np.float64)
    random = np.random.default_rng(20240)
    center, radius = (low + high) / 2, np.maximum(high - low, 0) / 2
    flat = [center + radius * random.uniform(-1, 1, center.shape) for _ in range(_INSIDE)]
    flat += [center + factor * (1 + radius) * random.standard_normal(center.shape) for factor in _FAR]
    for point in flat:
        parts = np.split(point, np.cumsum(sizes)[:-1])
        yield tuple(
            torch.from_numpy(part).reshape(shape).to(dtype) for part, shape in zip(parts, shapes, strict=True)
        )


def differences(found: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """|found - expected| and |expected|, entry by entry; equal infinities and NaNs count as equal."""
    found, expected = found.detach().double(), expected.detach().double()
    same = (found == expected) | (found.isnan() & expected.isnan())
    off = torch.where(same, 0.0, (found - expected).abs()).nan_to_num(nan=np.inf, posinf=np.inf)
    return off, torch.where(expected.isfinite(), expected.abs(), 0.0)


def relative_excess(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Largest |found - expected| and largest |expected|, see `differences`."""
    error, scale = differences(found, expected)
    return (float(error.max()), float(scale.max())) if error.numel() else (0.0, 0.0)


def compare(
    graph: Graph, reference: Reference, points: Iterator[tuple[torch.Tensor, ...]]
) -> tuple[Difference | None, int]:
    """Evaluate both on all points.

    Returns:
        the first difference beyond `TOLERANCE` and beyond rounding, or None; and the number of
        points at which the original's outputs are not all finite.
    """
    not_finite = 0
    for point in points:
        expected = list(reference(point))
        not_finite += any(not bool(value.isfinite().all()) for value in expected)
        found = execute(graph, point)
        for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            if mine.numel() != theirs.numel():
                return Difference(point, index, np.inf, 0.0), not_finite
            theirs = theirs.reshape(mine.shape)
            off, size = differences(mine, theirs)
            if bool((off > TOLERANCE * size).any()):
                allowed = TOLERANCE * size + _ROUNDING * _rounding(graph, point, index)
                if bool((off > allowed).any()):
                    worst = (off - allowed).argmax()
                    return (
                        Difference(point, index, float(off.flatten()[worst]), float(size.flatten()[worst])),
                        not_finite,
                    )
    return None, not_finite


def _rounding(graph: Graph, point: Sequence[torch.Tensor], output: int) -> torch.Tensor:
    """What rounding in the model's type may do to each entry of an output at this point.

    Measured: in float64, every operand of every call is disturbed at random by the relative error of a
    sum as long as the call's (Higham and Mary, 2019), so that cancellation within a sum and between calls
    shows in the very entries that it touches; a large entry elsewhere excuses nothing.
    """
    exact_graph = cast(graph, torch.float64)
    exact = execute(exact_graph, [tensor.double() for tensor in point])[output]
    largest = (execute(graph, point)[output].double() - exact).abs().nan_to_num(nan=0.0, posinf=0.0)
    for seed in range(_RUNS):
        off = (_disturbed(exact_graph, point, seed)[output] - exact).abs()
        overflows = off.isnan() & exact.isfinite()
        off = off.nan_to_num(nan=0.0, posinf=0.0).masked_fill(overflows, torch.inf)
        largest = torch.maximum(largest, off)
    return largest


def _disturbed(graph: Graph, point: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Outputs with all operands of all calls off by about what the call rounds in the type of `point`."""
    random = torch.Generator().manual_seed(seed)
    unit, top = unit_roundoff(point[0].dtype), torch.finfo(point[0].dtype).max / 16
    values = {name: tensor.double() for name, tensor in zip(graph.inputs, point, strict=True)}

    def near(value: torch.Tensor, terms: int) -> torch.Tensor:
        if not value.is_floating_point():
            return value
        size = unit * (4 + 4 * terms**0.5)
        return value * (1 + size * torch.randn(value.shape, generator=random, dtype=value.dtype))

    with torch.no_grad():
        for node in graph:
            if node.op != "input":
                weight = graph.constants.get(getattr(node.attrs.get("weight"), "key", ""))
                terms = 1 if weight is None else weight[0].numel()
                operands = [near(values[name], terms) for name in node.inputs]
                value = call(node, operands, graph.constants)
                if classify(node) == "nonlinear" and node.target and value.is_floating_point():
                    # Libraries compute bounded functions, as sigmoid, to an absolute accuracy: relative to 1,
                    # and never to the largest entry, which would excuse errors of all others.
                    noise = torch.randn(value.shape, generator=random, dtype=value.dtype)
                    size = value.abs().nan_to_num(nan=0.0, posinf=0.0).amax().clamp(max=1)
                    value = value + 8 * unit * size * noise
                # Whether a sum overflows on the way depends on its order: what reads it says nothing.
                if value.is_floating_point():
                    value = value.masked_fill(value.abs() > top, torch.nan)
                values[node.name] = value
    return [near(values[name], 1) for name in graph.outputs]
