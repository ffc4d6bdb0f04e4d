"""The network's concrete values for many points at once, differentiable in the points."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from abcrown_dist.graph.aten import classify
from abcrown_dist.graph.execute import call
from abcrown_dist.graph.ir import Graph, Node
from abcrown_dist.weights.base import Weights


def evaluate(graph: Graph, weights: Weights, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Values of all outputs; `inputs` and the result hold (B, *shape) by node name.

    Every tensor is let go as soon as its last reader has run (unless autograd keeps it).
    """
    pending = {node.name: len(graph.readers(node.name)) for node in graph}
    values: dict[str, Tensor] = {}
    for node in graph:
        if node.op == "input":
            values[node.name] = _Own.apply(inputs[node.name], weights, node.name)
        else:
            values[node.name] = _value(weights, node, [values[name] for name in node.inputs])
        for name in dict.fromkeys(node.inputs):
            pending[name] -= 1
            if pending[name] == 0 and name not in graph.outputs:
                del values[name]
    return {name: _Whole.apply(values[name], weights, name) for name in graph.outputs}


def flat_network(graph: Graph, weights: Weights) -> Callable[[Tensor], Tensor]:
    """The network as a function of flat inputs (B, inputs) to flat outputs (B, outputs)."""

    def network(x: Tensor) -> Tensor:
        outputs = evaluate(graph, weights, split_inputs(graph, x))
        return torch.cat([outputs[name].flatten(1) for name in graph.outputs], dim=1)

    return network


def split_inputs(graph: Graph, x: Tensor) -> dict[str, Tensor]:
    """Cut flat input variables (B, inputs) into one (B, *shape) tensor per input node."""
    sizes = [graph[name].size for name in graph.inputs]
    parts = torch.split(x, sizes, dim=-1)
    return {
        name: part.reshape(*x.shape[:-1], *graph[name].shape)
        for name, part in zip(graph.inputs, parts, strict=True)
    }


def _value(weights: Weights, node: Node, operands: list[Tensor]) -> Tensor:
    if node.op == "relu":
        return operands[0].relu()
    if node.op == "leaky_relu":
        return torch.nn.functional.leaky_relu(operands[0], node.attrs["negative_slope"])
    if classify(node) == "affine":
        if weights.transient and torch.is_grad_enabled():
            return _TransientCall.apply(weights, node, *operands)
        with weights.visit(node) as affine:
            return affine.apply(*operands)
    constants = {key: weights.constant(key) for key in node.constants()}
    wholes = [_Whole.apply(x, weights, name) for x, name in zip(operands, node.inputs, strict=True)]
    value = torch.func.vmap(lambda *xs: call(node, xs, constants))(*wholes)
    return _Own.apply(value, weights, node.name)


class _TransientCall(torch.autograd.Function):
    """An affine node whose weights must not outlive the visit: the gradient visits it again."""

    @staticmethod
    def forward(ctx: Any, weights: Weights, node: Node, *operands: Tensor) -> Tensor:
        ctx.weights, ctx.node = weights, node
        with weights.visit(node) as affine:
            return affine.apply(*operands)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        with ctx.weights.visit(ctx.node) as affine:
            return (None, None, *affine.transpose(grads[0]))


class _Own(torch.autograd.Function):
    """All neurons -> own neurons. Every rank holds the same whole, whose gradient is gathered again."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, weights: Weights, name: str) -> Tensor:
        ctx.weights, ctx.name = weights, name
        return weights.own(name, whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return ctx.weights.whole(ctx.name, grads[0]), None, None


class _Whole(torch.autograd.Function):
    """Own neurons -> all neurons, on every rank."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, weights: Weights, name: str) -> Tensor:
        ctx.weights, ctx.name = weights, name
        return weights.whole(name, own)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return ctx.weights.own(ctx.name, grads[0]), None, None
