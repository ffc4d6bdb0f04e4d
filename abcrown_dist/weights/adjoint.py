"""Adjoint test of affine maps: a derived transpose that is wrong would give false bounds.

For random x and A it must hold that  <A, F(x) - F(0)> = <F^T A, x>  (design section 3). Run once a
network is loaded, in float64, for every distinct affine call whose rule is derived.
"""

from __future__ import annotations

import torch

from abcrown_dist.graph.aten import classify
from abcrown_dist.graph.ir import Graph, Node
from abcrown_dist.util.errors import LoadError
from abcrown_dist.weights.maps import AffineMap, AtenMap, build_map


def check_adjoints(graph: Graph) -> int:
    """Test every affine node of `graph` that has a derived rule; returns how many were tested.

    Raises:
        LoadError: naming the node and its op, when the identity fails.
    """
    seen: set[object] = set()
    for node in graph:
        if classify(node) != "affine":
            continue
        signature = _signature(graph, node)
        if signature in seen:
            continue
        affine = build_map(
            graph, node, lambda key: _double(graph.constants[key]), torch.float64, torch.device("cpu")
        )
        if isinstance(affine, AtenMap):
            seen.add(signature)
            check_adjoint(affine, node, [graph[name].shape for name in node.inputs])
    return len(seen)


def check_adjoint(affine: AffineMap, node: Node, in_shapes: list[tuple[int, ...]]) -> None:
    """Test one map on random float64 tensors; raises `LoadError` when the identity fails."""
    generator = torch.Generator().manual_seed(0)

    def random(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(2, *shape, dtype=torch.float64, generator=generator)

    with torch.no_grad():
        xs = [random(shape) for shape in in_shapes]
        A = random(node.shape)
        y = affine.linear(*xs)
        left = (A * y).flatten(1).sum(1)
        parts = [a * x for a, x in zip(affine.transpose(A), xs, strict=True)]
        right = sum((part.flatten(1).sum(1) for part in parts), torch.zeros(2, dtype=torch.float64))
        scale = 1 + (A * y).abs().flatten(1).sum(1) + sum(part.abs().sum() for part in parts)
        if not bool(((left - right).abs() <= 1e-9 * scale).all() | scale.isnan().any()):
            raise LoadError(
                f"node {node.name}: op {node.op} is not affine as it is used here "
                "(its derived bound rule fails the adjoint test)"
            )


def _signature(graph: Graph, node: Node) -> object:
    shapes = tuple(graph[name].shape for name in node.inputs)
    # Constants count by key: other values are another map.
    return (node.op, node.target, repr(node.args), repr(dict(node.kwargs)), node.output, shapes, node.shape)


def _double(value: torch.Tensor) -> torch.Tensor:
    return value.double() if value.is_floating_point() else value
