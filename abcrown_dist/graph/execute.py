"""Plain evaluation of a graph on one example, and the call of one ATen node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from abcrown_dist.graph.ir import Arg, Const, Graph, Node


@cache
def resolve_target(target: str) -> Callable[..., Any]:
    """The ATen overload with the full name `target`, e.g. `aten.view.default`."""
    namespace, name, overload = target.split(".")
    packet = getattr(getattr(torch.ops, namespace), name)
    return getattr(packet, overload)


def fill_template(template: Any, args: Sequence[torch.Tensor], constants: Mapping[str, torch.Tensor]) -> Any:
    """Put tensors in the places of `Arg` and `Const` in a template of nested tuples."""
    if isinstance(template, Arg):
        return args[template.index]
    if isinstance(template, Const):
        return constants[template.key]
    if isinstance(template, (tuple, list)):
        return [fill_template(item, args, constants) for item in template]
    return template


def call(node: Node, args: Sequence[torch.Tensor], constants: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Value of `node` when its inputs have the values `args`.

    Args:
        args: one tensor per entry of `node.inputs`, of that node's shape. Works under `torch.func`
            transforms, where the tensors carry hidden axes.
        constants: at least the constants that the node reads.
    """
    constants = {key: _as_operand(constants[key], args) for key in node.constants()}
    if not node.target:
        return _CANONICAL[node.op](node, args, constants)
    positional = [fill_template(item, args, constants) for item in node.args]
    keywords = {name: fill_template(item, args, constants) for name, item in node.kwargs.items()}
    result = resolve_target(node.target)(*positional, **keywords)
    return result if node.output is None else result[node.output]


def _as_operand(value: torch.Tensor, args: Sequence[torch.Tensor]) -> torch.Tensor:
    """A constant in the operands' type: fused ones keep float64 digits that float32 would round away."""
    if value.dtype == torch.float64 and args and args[0].dtype == torch.float32:
        return value.float()
    return value


def _constant(node: Node, name: str, constants: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    reference = node.attrs[name]
    return None if reference is None else constants[reference.key]


def _linear(node: Node, args: Sequence[torch.Tensor], constants: Mapping[str, torch.Tensor]) -> torch.Tensor:
    weight = constants[node.attrs["weight"].key]
    return F.linear(args[0], weight, _constant(node, "bias", constants))


def _conv(node: Node, args: Sequence[torch.Tensor], constants: Mapping[str, torch.Tensor]) -> torch.Tensor:
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    return torch.ops.aten.convolution.default(
        args[0],
        constants[node.attrs["weight"].key],
        _constant(node, "bias", constants),
        *(node.attrs[name] for name in names),
    )


def _relu(node: Node, args: Sequence[torch.Tensor], constants: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.relu(args[0])


def _leaky_relu(
    node: Node, args: Sequence[torch.Tensor], constants: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    return F.leaky_relu(args[0], node.attrs["negative_slope"])


_CANONICAL: dict[str, Callable[..., torch.Tensor]] = {
    "linear": _linear,
    "conv": _conv,
    "relu": _relu,
    "leaky_relu": _leaky_relu,
}


def execute_all(graph: Graph, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Values of all nodes on one example, by name.

    Raises:
        RuntimeError: when a value does not have the shape that its node declares (a defect).
    """
    values = dict(zip(graph.inputs, inputs, strict=True))
    with torch.no_grad():
        for node in graph.nodes:
            if node.op != "input":
                values[node.name] = call(node, [values[name] for name in node.inputs], graph.constants)
            found = tuple(values[node.name].shape)
            if found != node.shape:
                raise RuntimeError(f"node {node.name} ({node.op}) has shape {found}, declared {node.shape}")
    return values


def execute(graph: Graph, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs of the graph on one example.

    Args:
        inputs: one tensor per graph input, of that node's shape (the example's leading 1 included).

    Returns:
        one tensor per graph output.
    """
    values = execute_all(graph, inputs)
    return [values[name] for name in graph.outputs]


def cast(graph: Graph, dtype: torch.dtype) -> Graph:
    """The same graph with all floating constants in `dtype` (integer ones, e.g. indices, stay)."""
    constants = {
        key: value.to(dtype) if value.is_floating_point() else value for key, value in graph.constants.items()
    }
    return replace(graph, constants=constants)
