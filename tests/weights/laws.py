"""The laws of affine maps, judged against the Jacobian of the call itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from abcrown_dist.graph.aten import IDENTITY, classify
from abcrown_dist.graph.execute import call
from abcrown_dist.graph.ir import Graph, Node
from abcrown_dist.graph.rewrite import rewrite
from abcrown_dist.graph.trace import trace
from abcrown_dist.weights.adjoint import check_adjoint
from abcrown_dist.weights.maps import AffineMap, build_map

DOUBLE = torch.float64


class Lambda(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


def captured(
    module: nn.Module, shapes: list[tuple[int, ...]], canonical: bool = True, dtype: torch.dtype = DOUBLE
) -> Graph:
    """The graph of a module of type `dtype`, with or without rewriting."""
    random = torch.Generator().manual_seed(0)
    graph = trace(module, [torch.rand(shape, generator=random, dtype=dtype) for shape in shapes])
    return rewrite(graph, dtype) if canonical else graph


def affine_nodes(graph: Graph) -> list[Node]:
    """Nodes that get a map."""
    return [node for node in graph if classify(node) == "affine" and node.op not in IDENTITY]


def map_of(graph: Graph, node: Node) -> AffineMap:
    return build_map(graph, node, lambda key: graph.constants[key], DOUBLE, torch.device("cpu"))


def jacobians(graph: Graph, node: Node) -> tuple[list[Tensor], Tensor]:
    """Matrix (outputs, inputs) per operand, and the value at zero (*out), column by column."""
    shapes = [graph[name].shape for name in node.inputs]
    zeros = [torch.zeros(shape, dtype=DOUBLE) for shape in shapes]
    base = call(node, zeros, graph.constants)
    matrices = []
    for position, shape in enumerate(shapes):
        columns = []
        for index in range(graph[node.inputs[position]].size):
            point = [zero.clone() for zero in zeros]
            point[position].view(-1)[index] = 1
            columns.append((call(node, point, graph.constants) - base).reshape(-1))
        matrices.append(torch.stack(columns, 1))
        assert matrices[-1].shape == (node.size, torch.Size(shape).numel())
    return matrices, base


def check_laws(graph: Graph, node: Node, affine: AffineMap | None = None) -> None:
    """Every method of the node's map against explicit matrices, for M of 1 and 3."""
    affine = affine or map_of(graph, node)
    shapes = [graph[name].shape for name in node.inputs]
    matrices, base = jacobians(graph, node)
    random = torch.Generator().manual_seed(1)
    for count in (1, 3):
        xs = [torch.randn(count, *shape, generator=random, dtype=DOUBLE) for shape in shapes]
        _check_forward(affine, node, xs, matrices, base)
        _check_backward(affine, node, xs, matrices, random)
    _check_terms(affine, matrices)
    check_adjoint(affine, node, shapes)


def check_rows(graph: Graph, node: Node) -> None:
    """`rows(index)` are the rows of the Jacobian, for any selection, with repetition."""
    affine = map_of(graph, node)
    (matrix,), _ = jacobians(graph, node)
    for index in (
        torch.arange(node.size),
        torch.tensor([node.size - 1, 0, 0]),
        torch.tensor([], dtype=torch.long),
    ):
        rows = affine.rows(index)
        assert rows is not None
        assert rows.shape == (len(index), *graph[node.inputs[0]].shape)
        close(rows.flatten(1), matrix[index])


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


def _product(matrices: list[Tensor], xs: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    flat = [x.flatten(1) @ matrix.T for matrix, x in zip(matrices, xs, strict=True)]
    return torch.stack(flat).sum(0).reshape(-1, *shape)


def _check_forward(
    affine: AffineMap, node: Node, xs: list[Tensor], matrices: list[Tensor], base: Tensor
) -> None:
    exact = _product(matrices, xs, node.shape)
    close(affine.linear(*xs), exact)
    close(affine.apply(*xs), exact + base)
    offset = affine.offset()
    if offset is None:
        assert (base == 0).all()
    else:
        assert offset.shape == node.shape
        close(offset, base)
    close(affine.absolute(*xs), _product([matrix.abs() for matrix in matrices], xs, node.shape))
    if affine.nonnegative:
        assert all((matrix >= 0).all() for matrix in matrices)
    _check_roundings(affine, node, matrices, base, xs)


def _check_roundings(
    affine: AffineMap, node: Node, matrices: list[Tensor], base: Tensor, xs: list[Tensor]
) -> None:
    """A sum of n terms that are not zero rounds n - 1 times at least, and a product by no sign once."""
    marks = [(x > 0).to(DOUBLE) for x in xs]
    counts = affine.roundings(*marks)
    assert counts.shape == (len(xs[0]), *node.shape)
    signs = [(matrix != 0).to(DOUBLE) for matrix in matrices]
    terms = _product(signs, marks, node.shape) + (base != 0)
    inexact = _product([((m != 0) & (m.abs() != 1)).to(DOUBLE) for m in matrices], marks, node.shape) > 0
    assert (counts >= (terms - 1).clamp(min=0) - 1e-9).all()
    assert (counts[inexact] >= 1).all()


def _check_backward(
    affine: AffineMap, node: Node, xs: list[Tensor], matrices: list[Tensor], random: torch.Generator
) -> None:
    A = torch.randn(len(xs[0]), *node.shape, generator=random, dtype=DOUBLE)
    parts = affine.transpose(A)
    assert len(parts) == len(xs)
    for part, matrix, x in zip(parts, matrices, xs, strict=True):
        close(part, (A.flatten(1) @ matrix).reshape(x.shape))


def _check_terms(affine: AffineMap, matrices: list[Tensor]) -> None:
    """`terms` bounds the length of every sum; a map said to round nothing sums nothing."""
    longest = int((torch.cat(matrices, 1) != 0).sum(1).max())
    assert affine.terms >= longest, f"a sum of {longest} products is charged as one of {affine.terms}"
    most = int(max((matrix != 0).sum(0).max() for matrix in matrices))
    assert affine.readers >= most, f"{most} outputs read an operand, not {affine.readers}"
    if affine.identity_rows:
        assert all(torch.equal(matrix, torch.eye(len(matrix), dtype=DOUBLE)) for matrix in matrices)
