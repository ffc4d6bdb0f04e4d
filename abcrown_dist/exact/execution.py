"""What the network's own computation may round, for programs that know only real arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from abcrown_dist.graph.aten import classify
from abcrown_dist.graph.ir import Node
from abcrown_dist.relax import REGISTRY
from abcrown_dist.weights.base import Weights

Array = np.ndarray


def execution_error(weights: Weights, node: Node, sizes: Sequence[Array]) -> Array:
    """By how much a run of the network may be off at a node, (neurons,), where its operands are right.

    Args:
        weights: in float64.
        sizes: largest magnitudes (neurons,) of the operands.
    """
    graph, rounding = weights.graph, weights.rounding
    xs = [
        torch.from_numpy(size).reshape(1, *graph[name].shape)
        for size, name in zip(sizes, node.inputs, strict=True)
    ]
    if classify(node) == "affine":
        with torch.no_grad(), weights.visit(node) as affine:
            rate = torch.as_tensor(rounding.execution(affine.roundings(*(torch.ones_like(x) for x in xs))))
            offset, total = affine.offset(), affine.absolute(*xs) + node.fused[1]
            total = total if offset is None else total + offset.abs()
    else:
        relaxation = REGISTRY[node.op]
        rate = torch.as_tensor(rounding.execution(relaxation.roundings(node.attrs)))
        total = torch.maximum(*(side.abs() for side in relaxation.interval(node.attrs, -xs[0], xs[0])))
    # Twice: the magnitudes are themselves rounded.
    return torch.where(rate > 0, 2 * rate * total, 0.0).flatten().double().numpy()
