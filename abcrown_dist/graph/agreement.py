"""Numerical comparison of a captured graph with what it was captured from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from abcrown_dist.graph.execute import cast, execute, execute_all
from abcrown_dist.graph.ir import Graph
from abcrown_dist.util.numerics import unit_roundoff

Reference = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""The original: from one example per input to its outputs."""

TOLERANCE = 1e-4
"""Largest difference that passes, as a fraction of the largest output."""

_INSIDE = 3
_FAR = (1.0, 10.0, 100.0)
# A difference is rounding when it is within this factor of float32's own error on that point.
_ROUNDING = 10.0


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


def relative_excess(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Largest |found - expected| and largest |expected|; equal infinities and NaNs count as equal."""
    found, expected = found.detach().double(), expected.detach().double()
    same = (found == expected) | (found.isnan() & expected.isnan())
    error = torch.where(same, torch.zeros_like(found), (found - expected).abs())
    error = torch.nan_to_num(error, nan=np.inf, posinf=np.inf)
    scale = torch.where(expected.isfinite(), expected.abs(), torch.zeros_like(expected))
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
            error, scale = relative_excess(mine, theirs.reshape(mine.shape))
            if error > TOLERANCE * scale and error > _ROUNDING * _rounding(graph, point, index):
                return Difference(point, index, error, scale), not_finite
    return None, not_finite


def _rounding(graph: Graph, point: Sequence[torch.Tensor], output: int) -> float:
    """What rounding to the model's type costs at this point: the distance from float64.

    At least a few units of the largest value on the way: a rewritten graph may be exact by chance
    where the original is not.
    """
    exact = execute(cast(graph, torch.float64), [tensor.double() for tensor in point])[output]
    sizes = [value.abs().max() for value in execute_all(graph, point).values() if value.numel()]
    largest = max((float(size) for size in sizes if bool(size.isfinite())), default=0.0)
    distance = relative_excess(execute(graph, point)[output], exact)[0]
    return max(distance, 4 * unit_roundoff(point[0].dtype) * largest)
