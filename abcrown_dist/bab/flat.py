"""Points, boxes and rows over all inputs of a network in one axis, in the order of its inputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from abcrown_dist.bounds.backward import LinearBound
from abcrown_dist.bounds.concretize import Box
from abcrown_dist.weights.base import Weights


def flat(weights: Weights, parts: Mapping[str, Tensor]) -> Tensor:
    """(N, inputs), given (N, *shape) by input."""
    names = weights.graph.inputs
    return torch.cat([weights.whole(name, parts[name]).flatten(1) for name in names], dim=1)


def flat_points(weights: Weights, box: Box, points: Mapping[str, Tensor], count: int) -> Tensor:
    """Points by input (N, *shape) as (N, inputs) in float64; the box's lower ends where one is absent."""
    low = {name: side.expand(count, *side.shape[1:]) for name, side in box.lower.items()}
    return flat(weights, {**low, **points}).double()


def flat_rows(weights: Weights, linear: LinearBound, count: int) -> Tensor:
    """Coefficients (N, R, inputs) of all inputs in N domains."""
    graph, bias = weights.graph, linear.bias
    parts = []
    for name in graph.inputs:
        if name in linear.A:
            part = weights.whole(name, linear.A[name]).flatten(2)
        else:
            part = bias.new_zeros(1, bias.shape[1], graph[name].size)
        parts.append(part.expand(count, -1, -1))
    return torch.cat(parts, dim=2)
