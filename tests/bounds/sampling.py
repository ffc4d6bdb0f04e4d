"""Random points of boxes, and whether bounds contain what a network makes of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from abcrown_dist.bounds.concretize import Box
from abcrown_dist.bounds.types import Interval
from abcrown_dist.graph.ir import Graph
from abcrown_dist.weights.evaluate import evaluate
from abcrown_dist.weights.local import LocalWeights

_AT_ONCE = 1000


def sample_inputs(box: Box, domain: int, count: int, seed: int = 0) -> dict[str, Tensor]:
    """Points of one domain in float64, (count, *shape): some inside, some on faces, half in corners."""
    random = torch.Generator().manual_seed(seed)
    points = {}
    for name, lower in box.lower.items():
        low, high = lower[domain].double(), box.upper[name][domain].double()
        part = torch.rand(count, *low.shape, generator=random, dtype=torch.float64)
        half, quarter = count // 2, count // 4
        part[half:] = part[half:].round()
        faces = torch.rand(quarter, *low.shape, generator=random, dtype=torch.float64)
        part[:quarter] = torch.where(faces < 0.3, faces / 0.3, part[:quarter].round())
        points[name] = (low * (1 - part) + high * part).clamp(low, high)
    return points


def sample_outputs(
    graph: Graph, box: Box, domain: int, count: int, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Outputs (count, *shape), computed in `dtype`, at random points of one domain."""
    weights = LocalWeights(graph, dtype)
    parts: dict[str, list[Tensor]] = {}
    for seed in range(-(-count // _AT_ONCE)):
        points = sample_inputs(box, domain, min(_AT_ONCE, count), seed)
        with torch.no_grad():
            outputs = evaluate(graph, weights, {name: value.to(dtype) for name, value in points.items()})
        for name, value in outputs.items():
            parts.setdefault(name, []).append(value)
    return {name: torch.cat(values) for name, values in parts.items()}


def assert_contains(
    bounds: Mapping[str, Interval], outputs: Mapping[str, Tensor], domain: int, tolerance: float
) -> None:
    """All outputs lie inside, up to `tolerance` times their scale."""
    for name, values in outputs.items():
        lower, upper = bounds[name].lower[domain].double(), bounds[name].upper[domain].double()
        assert lower.isfinite().all() and upper.isfinite().all()
        slack = tolerance * values.abs().max()
        values = values.double()
        low, high = values.amin(0), values.amax(0)
        assert (lower <= low + slack).all(), f"{name}: {(lower - low).max()} above a sampled output"
        assert (upper >= high - slack).all(), f"{name}: {(high - upper).max()} below a sampled output"
