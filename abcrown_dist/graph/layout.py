"""Rules that remove calls without effect and merge consecutive reshapes and permutations."""

from __future__ import annotations

from dataclasses import replace

import torch

from abcrown_dist.graph.aten import IDENTITY
from abcrown_dist.graph.ir import Arg, Node
from abcrown_dist.graph.rebuild import Rebuild, Rule, permute_node, view_node

_NEUTRAL = {"mul": 1, "div": 1, "add": 0, "sub": 0, "pow": 1}


def identity(build: Rebuild, node: Node) -> str | None:
    """Calls that return their operand."""
    if len(node.inputs) != 1 or node.op == "input":
        return None
    source = node.inputs[0]
    if node.op in IDENTITY or _converts_float(node) or _inactive_dropout(node):
        return source
    if build[source].shape != node.shape:
        return None
    # A slice of the full extent has no room for a step or an offset.
    if node.op in ("view", "expand", "slice"):
        return source
    unmoved = node.op == "permute" and node.args[1] == tuple(range(len(node.shape)))
    unpadded = node.op == "constant_pad_nd" and not any(node.args[1])
    return source if unmoved or unpadded or _neutral_operand(build, node) else None


def _converts_float(node: Node) -> bool:
    """A cast to float32 or float64 (the engine chooses one type for the whole graph)."""
    return node.op == "_to_copy" and node.kwargs.get("dtype") in (None, torch.float32, torch.float64)


def _inactive_dropout(node: Node) -> bool:
    return node.op == "native_dropout" and node.output == 0 and not node.args[2]


def _neutral_operand(build: Rebuild, node: Node) -> bool:
    """x * 1, x / 1, x + 0, x - 0, x ** 1 and the commuted ones."""
    if node.op not in _NEUTRAL or len(node.args) != 2 or node.kwargs.get("rounding_mode"):
        return False
    first, second = node.args
    if second == Arg(0) and node.op in ("mul", "add"):
        first, second = second, first
    other = build.constant(second)
    return first == Arg(0) and other is not None and bool((other == _NEUTRAL[node.op]).all())


def merge_views(build: Rebuild, node: Node) -> str | None:
    """A view of a view."""
    if node.op != "view" or build[node.inputs[0]].op != "view":
        return None
    origin = build[node.inputs[0]].inputs[0]
    if build[origin].shape == node.shape:
        return origin
    return build.emit(view_node(node.name, origin, node.shape))


def merge_permutes(build: Rebuild, node: Node) -> str | None:
    """A permutation of a permutation."""
    if node.op != "permute" or build[node.inputs[0]].op != "permute":
        return None
    inner = build[node.inputs[0]]
    dims = tuple(inner.args[1][dim] for dim in node.args[1])
    if dims == tuple(range(len(dims))):
        return inner.inputs[0]
    return build.emit(permute_node(node.name, inner.inputs[0], node.shape, dims))


def permute_of_ones(build: Rebuild, node: Node) -> str | None:
    """A permutation that moves only axes of extent 1 is a view."""
    if node.op != "permute":
        return None
    before = build[node.inputs[0]].shape
    moved = [dim for dim in node.args[1] if before[dim] != 1]
    if moved != sorted(moved):
        return None
    return build.emit(view_node(node.name, node.inputs[0], node.shape))


def view_before_linear(build: Rebuild, node: Node) -> str | None:
    """linear(view(x)) = view(linear(x)) when the view keeps the last axis; then views can merge."""
    if node.op != "linear" or build[node.inputs[0]].op != "view":
        return None
    origin = build[build[node.inputs[0]].inputs[0]]
    if not origin.shape or origin.shape[-1] != build[node.inputs[0]].shape[-1]:
        return None
    shape = (*origin.shape[:-1], node.shape[-1])
    build.emit(replace(node, inputs=(origin.name,), shape=shape))
    return build.emit(view_node(build.fresh(f"{node.name}/view"), node.name, node.shape))


def unify_floats(constants: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The constants, floating ones in `dtype` where it holds their digits; fused ones need more."""
    return {
        key: value.to(dtype) if value.is_floating_point() and holds(dtype, value) else value
        for key, value in constants.items()
    }


def holds(dtype: torch.dtype, value: torch.Tensor) -> bool:
    """Whether a type holds all digits of a value."""
    return torch.equal(value.to(dtype).to(value.dtype).nan_to_num(nan=0.0), value.nan_to_num(nan=0.0))


RULES: tuple[Rule, ...] = (
    identity,
    permute_of_ones,
    merge_views,
    merge_permutes,
    view_before_linear,
)
