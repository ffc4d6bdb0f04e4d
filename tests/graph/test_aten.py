"""The table of affine ops agrees with the ops themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from abcrown_dist.graph.aten import absolute, classify, nonnegative, unsupported
from abcrown_dist.graph.execute import call
from abcrown_dist.graph.ir import Graph, Node
from abcrown_dist.graph.rewrite import rewrite
from abcrown_dist.graph.trace import trace

C = torch.tensor([[1.0, -2.0, 3.0, -0.5], [0.5, 1.0, -1.0, 2.0], [1.5, -1.5, 0.0, 1.0]])
SQUARE = torch.tensor([[[1.0, -2.0], [0.5, -1.0]], [[3.0, 0.0], [-1.0, 2.0]]])
MASK = C > 0


class Lambda(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


def traced(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Graph:
    """The rewritten graph of a function."""
    random = torch.Generator().manual_seed(0)
    examples = [torch.rand(shape, generator=random) for shape in shapes]
    return rewrite(trace(Lambda(function), examples), torch.float32)


S, P = (3, 4), (1, 2, 4, 4)
AFFINE: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "add": (lambda x, y: x + y, [S, S]),
    "add_constant": (lambda x: x + C, [S]),
    "add_minus": (lambda x, y: torch.add(x, y, alpha=-2), [S, S]),
    "sub": (lambda x, y: x - y, [S, S]),
    "sub_alpha": (lambda x, y: torch.sub(x, y, alpha=-3), [S, S]),
    "sub_from_constant": (lambda x: C - x, [S]),
    "sub_from_number": (lambda x: 2 - x, [S]),
    "neg": (lambda x: -x, [S]),
    "mul": (lambda x: x * C, [S]),
    "mul_number": (lambda x: x * -2.5, [S]),
    "mul_left": (lambda x: C * x, [S]),
    "div": (lambda x: x / (C + 0.25), [S]),
    "div_number": (lambda x: x / -4, [S]),
    "mm_left": (lambda x: C @ x, [(4, 2)]),
    "bmm": (lambda x: torch.bmm(x, SQUARE), [(2, 3, 2)]),
    "bmm_left": (lambda x: torch.bmm(SQUARE, x), [(2, 2, 3)]),
    "addmm_bias_depends": (lambda b, x: torch.addmm(b, x, C, beta=-1), [(2, 4), (2, 3)]),
    "baddbmm": (lambda x: torch.baddbmm(SQUARE, x, SQUARE, beta=-1, alpha=-2), [(2, 2, 2)]),
    "dot": (lambda x: torch.dot(C[0], x), [(4,)]),
    "permute": (lambda x: x.permute(2, 0, 1), [(2, 3, 4)]),
    "view": (lambda x: x.view(-1), [S]),
    "slice": (lambda x: x[1:, ::2], [S]),
    "select": (lambda x: x.select(1, 2), [S]),
    "cat": (lambda x: torch.cat([x, C, x]), [S]),
    "stack": (lambda x, y: torch.stack([x, y], 1), [S, S]),
    "split": (lambda x: x.split(2, 1)[1], [S]),
    "split_sizes": (lambda x: x.split([1, 3], 1)[1], [S]),
    "unbind": (lambda x: x.unbind(1)[3], [S]),
    "expand": (lambda x: x.expand(3, 4), [(1, 4)]),
    "index": (lambda x: x[:, torch.tensor([3, 0, 0])], [S]),
    "index_select": (lambda x: torch.index_select(x, 0, torch.tensor([2, 2])), [S]),
    "gather": (lambda x: torch.gather(x, 1, torch.tensor([[0, 1], [3, 3], [2, 0]])), [S]),
    "where": (lambda x, y: torch.where(MASK, x, y), [S, S]),
    "masked_fill": (lambda x: x.masked_fill(MASK, 3.0), [S]),
    "pad": (lambda x: F.pad(x, (1, 2), value=7.0), [S]),
    "reflect": (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), [P]),
    "replicate": (lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"), [P]),
    "sum": (lambda x: x.sum(1), [S]),
    "sum_all": (lambda x: x.sum(), [S]),
    "mean": (lambda x: x.mean((0, 1), keepdim=True), [S]),
    "cumsum": (lambda x: x.cumsum(1), [S]),
    "flip": (lambda x: x.flip(1), [S]),
    "roll": (lambda x: x.roll(1, 1), [S]),
    "repeat": (lambda x: x.repeat(2, 1), [S]),
    "diagonal": (lambda x: torch.diagonal(x), [S]),
    "tril": (lambda x: x.tril(), [S]),
    "avg_pool": (lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), [P]),
    "adaptive": (lambda x: F.adaptive_avg_pool2d(x, 3), [P]),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), [P]),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear"), [P]),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), [(1, 4, 2, 2)]),
    "unfold": (lambda x: F.unfold(x, 2), [P]),
    "conv_of_a_batch": (lambda x: F.conv1d(x, C.view(3, 2, 2)), [(2, 2, 5)]),
}


def _jacobian(node: Node, shapes: list[tuple[int, ...]], constants: dict[str, torch.Tensor]) -> torch.Tensor:
    """Matrix of the linear part, (outputs, all inputs), column by column from the definition."""
    sizes = [torch.Size(shape).numel() for shape in shapes]

    def value(flat: torch.Tensor) -> torch.Tensor:
        parts = torch.split(flat, sizes)
        return call(
            node, [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)], constants
        ).reshape(-1)

    base = value(torch.zeros(sum(sizes)))
    return torch.stack([value(row) - base for row in torch.eye(sum(sizes))], dim=1)


@pytest.mark.parametrize("name", AFFINE)
def test_affine_ops(name: str) -> None:
    """Each last node is affine by table and by values; `nonnegative` and `absolute` tell its signs."""
    function, shapes = AFFINE[name]
    graph = traced(function, *shapes)
    for node in graph:
        if node.op in ("input", "linear", "conv"):
            continue
        assert classify(node) == "affine", node.op
        inputs = [graph[source].shape for source in node.inputs]
        jacobian = _jacobian(node, inputs, dict(graph.constants))
        random = torch.Generator().manual_seed(1)
        point = [torch.randn(shape, generator=random) for shape in inputs]
        zero = [torch.zeros(shape) for shape in inputs]
        flat = torch.cat([part.reshape(-1) for part in point])
        moved = call(node, point, graph.constants) - call(node, zero, graph.constants)
        torch.testing.assert_close(moved.reshape(-1), jacobian @ flat, rtol=1e-5, atol=1e-5)
        if nonnegative(node):
            assert (jacobian >= 0).all()
        other, keys = absolute(node)
        constants = {
            key: value.abs() if key in keys and value.is_floating_point() else value
            for key, value in graph.constants.items()
        }
        torch.testing.assert_close(_jacobian(other, inputs, constants), jacobian.abs())


NONLINEAR: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], str]] = {
    "mul": (lambda x, y: x * y, [S, S], "mul"),
    "square": (lambda x: x * x, [S], "mul"),
    "div": (lambda x: C / (x + 1), [S], "div"),
    "floor_div": (lambda x: torch.div(x, 2, rounding_mode="floor"), [S], "div"),
    "to_int": (lambda x: x.long(), [S], "_to_copy"),
    "mm": (lambda x, y: x @ y, [(2, 3), (3, 2)], "mm"),
    "argmax": (lambda x: x.argmax(1), [S], "argmax"),
    "where": (lambda x: torch.where(x > 0.5, x, 2 * x), [S], "where"),
    "index": (lambda x: C[x[0].long()], [S], "index"),
    "sigmoid": (lambda x: x.sigmoid(), [S], "sigmoid"),
    "pad_with_infinity": (lambda x: F.pad(x, (1, 0), value=float("-inf")), [S], "constant_pad_nd"),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), [P], "upsample_bicubic2d"),
}


@pytest.mark.parametrize("name", NONLINEAR)
def test_nonlinear_ops(name: str) -> None:
    function, shapes, op = NONLINEAR[name]
    graph = traced(function, *shapes)
    assert op in {node.op for node in graph if classify(node) == "nonlinear"}


def test_unsupported_lists_all_ops_with_their_nodes() -> None:
    graph = traced(lambda x: torch.relu(x.sin() + x.sin() * x.argmax(1, keepdim=True)), S)
    listed = unsupported(graph, {"relu"})
    assert [entry.split(" ")[0] for entry in listed] == ["sin", "argmax", "mul"]
    sines = [node.name for node in graph if node.op == "sin"]
    assert len(sines) == 2
    assert listed[0] == f"sin ({', '.join(sines)})"
    assert unsupported(graph, {"relu", "sin", "argmax", "mul"}) == []
