"""Intervals of a node put together from different sources, and read by a property's rows."""

from __future__ import annotations

import torch
from torch import Tensor

from abcrown_dist.bounds.backward import Start, rounded_bounds
from abcrown_dist.bounds.concretize import Box, InputSet
from abcrown_dist.bounds.types import Interval, Relaxed, RowBounds
from abcrown_dist.graph.ir import Graph
from abcrown_dist.relax import REGISTRY
from abcrown_dist.weights.base import Weights


def insert(
    weights: Weights,
    name: str,
    known: Interval,
    index: Tensor,
    sign: Tensor,
    rows: RowBounds,
    wanted: Tensor | None = None,
) -> Interval:
    """`known` with lower bounds (B, R) of  sign[i] z_index[i]  put in their places.

    Each bound is moved outward by its error. Only where the mask
    `wanted` (B, all neurons) holds: what other domains need must not change a domain's bounds.
    """
    lower, upper = known.lower.flatten(1).clone(), known.upper.flatten(1).clone()
    safe = outward(rows)
    for side, target, factor in ((sign < 0, upper, -1), (sign > 0, lower, 1)):
        mine, at = weights.locate(name, index[side])
        new = factor * safe[:, side][:, mine]
        if wanted is not None:
            new = torch.where(wanted[:, index[side][mine]], new, target[:, at])
        target[:, at] = new
    return Interval(*(t.reshape(known.lower.shape) for t in (lower, upper)))


def outward(rows: RowBounds) -> Tensor:
    """Lower bounds (B, R) that hold whatever was rounded."""
    below = rows.lower - rows.error
    # The subtraction rounds to nearest.
    return torch.where(rows.error > 0, torch.nextafter(below, torch.full_like(below, -torch.inf)), below)


def combine(by_intervals: Interval, by_lines: Interval, intersect: bool) -> Interval:
    """Intersect, or take the second; bounds that cross by more than rounding become NaN."""
    lower, upper = by_lines.lower, by_lines.upper
    if intersect:
        lower = torch.maximum(lower, by_intervals.lower)
        upper = torch.minimum(upper, by_intervals.upper)
    gap = lower - upper
    crossed = gap > 0
    if bool(crossed.any()):
        # Estimates of rounding may let two bounds cross by a little: then the value lies between them.
        wrong = gap > 1e-4 * torch.maximum(lower.abs(), upper.abs())
        lower, upper = torch.minimum(lower, upper), torch.maximum(lower, upper)
        nan = torch.full_like(lower, torch.nan)
        lower, upper = torch.where(wrong, nan, lower), torch.where(wrong, nan, upper)
    return Interval(lower, upper)


def lower_always_counts(graph: Graph, name: str) -> bool:
    """Whether a lower bound of a neuron of `name` matters even where its upper bound is <= 0."""
    readers = [graph[reader] for reader in graph.readers(name)]
    return name in graph.outputs or not all(
        node.op in REGISTRY and REGISTRY[node.op].ignores_lower(node.attrs) for node in readers
    )


def loose_neurons(weights: Weights, name: str, interval: Interval) -> Tensor:
    """Mask (B, all neurons) of those whose bounds matter to a nonlinearity that reads them."""
    graph = weights.graph
    mask = torch.zeros_like(interval.lower, dtype=torch.bool)
    for reader in graph.readers(name):
        node = graph[reader]
        if node.op in REGISTRY:
            mask |= REGISTRY[node.op].is_loose(node.attrs, interval.lower, interval.upper)
    return weights.whole(name, mask).flatten(1)


def interval_rows(weights: Weights, relaxed: Relaxed, start: Start, inputs: InputSet) -> RowBounds:
    """Rows over interval bounds of the outputs: C c - |C| r, with the error of both."""
    known = {name: relaxed.intervals.get(name) or inputs.interval(name) for name in start}
    box = Box({k: v.lower for k, v in known.items()}, {k: v.upper for k, v in known.items()})
    rows = {name: value for name, value in start.items() if isinstance(value, Tensor)}
    lower, error = weights.total(torch.stack(box.safe_minimum(rows, weights.rounding)))
    return rounded_bounds(lower, error, weights.dtype)
