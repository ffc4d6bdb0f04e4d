"""What the bound engine has to know of each ATen op: whether it is affine, and with which signs.

Pure data. An op that is missing here is nonlinear and needs a relaxation of its own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from abcrown_dist.graph.ir import Arg, Graph, Node

Kind = Literal["input", "affine", "nonlinear"]
Positions = tuple[frozenset[int], ...]

IDENTITY = frozenset({"detach", "alias", "clone", "lift_fresh", "contiguous"})
"""Calls that return their operand's value. Rewriting removes them: their vector-Jacobian product is
not always the identity (that of `detach` is zero)."""

RESHAPE = frozenset(
    {"view", "_unsafe_view", "reshape", "_reshape_alias", "squeeze", "unsqueeze", "flatten", "unflatten"}
)
"""Calls that keep the elements in C order; rewriting makes them all `view`."""


@dataclass(frozen=True)
class Affine:
    """An op that is affine in its dependent operands.

    Attributes:
        dependent: sets of positions of arguments; the op is affine when the dependent operands all
            lie in one of them and the other operands are constant. Empty: always.
        absolute: how to get the map with the absolute values of its coefficients: the op itself
            (`same`), the op with the magnitudes of its constants (`magnitudes`), the sum instead of
            the difference (`sum`), or the identity (`identity`).
    """

    dependent: Positions = ()
    absolute: Literal["same", "magnitudes", "sum", "identity"] = "same"


def _only(*groups: Iterable[int]) -> Positions:
    return tuple(frozenset(group) for group in groups)


_FIRST = _only([0])

# Affine whatever depends on an input, with coefficients >= 0.
_ALWAYS = """
    permute transpose t slice select narrow expand cat stack split split_with_sizes chunk unbind flip roll
    repeat diagonal tril triu slice_scatter select_scatter pixel_shuffle pixel_unshuffle unfold im2col
    sum mean cumsum avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
    constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d
    replication_pad1d replication_pad2d replication_pad3d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
    upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d
"""

AFFINE: dict[str, Affine] = {
    **dict.fromkeys(RESHAPE | IDENTITY, Affine()),
    **dict.fromkeys(_ALWAYS.split(), Affine()),
    **dict.fromkeys(("index", "index_select", "gather"), Affine(_FIRST)),
    "_to_copy": Affine(_FIRST),
    "masked_fill": Affine(_FIRST),
    "where": Affine(_only([1, 2])),
    "add": Affine(absolute="magnitudes"),
    "sub": Affine(absolute="sum"),
    "neg": Affine(absolute="identity"),
    "mul": Affine(_only([0], [1]), "magnitudes"),
    "div": Affine(_FIRST, "magnitudes"),
    **dict.fromkeys(("mm", "bmm", "mv", "dot"), Affine(_only([0], [1]), "magnitudes")),
    **dict.fromkeys(("addmm", "addmv", "baddbmm"), Affine(_only([0, 1], [0, 2]), "magnitudes")),
    "convolution": Affine(_only([0, 2]), "magnitudes"),
}
"""Affine ATen ops. Batch normalisation and `rsub` are missing because rewriting replaces them; interpolations
with coefficients of both signs are missing because nothing here gives their absolute map."""


def _holds_argument(template: Any) -> bool:
    if isinstance(template, (tuple, list)):
        return any(_holds_argument(item) for item in template)
    return isinstance(template, Arg)


def dependent_positions(node: Node) -> frozenset[int]:
    """Positions of those arguments of an ATen call that depend on an input."""
    return frozenset(index for index, item in enumerate(node.args) if _holds_argument(item))


def _rounds(node: Node) -> bool:
    """Whether the call rounds its result, so that it is not affine whatever its name."""
    dtype = node.kwargs.get("dtype")
    if node.kwargs.get("rounding_mode") is not None:
        return True
    return isinstance(dtype, torch.dtype) and dtype not in (torch.float32, torch.float64)


def _pads_with_infinity(node: Node) -> bool:
    """Padding before a max-pooling: its offset is not finite, so that no linear bound passes it."""
    return node.op == "constant_pad_nd" and len(node.args) > 2 and not math.isfinite(node.args[2])


def classify(node: Node) -> Kind:
    """Whether `node` is an input, affine in the nodes that it reads, or neither."""
    if node.op == "input":
        return "input"
    if not node.target:
        return "affine" if node.op in ("linear", "conv") else "nonlinear"
    entry = AFFINE.get(node.op)
    if (
        entry is None
        or _rounds(node)
        or _pads_with_infinity(node)
        or any(_holds_argument(item) for item in node.kwargs.values())
    ):
        return "nonlinear"
    positions = dependent_positions(node)
    if entry.dependent and not any(positions <= group for group in entry.dependent):
        return "nonlinear"
    return "affine"


def unit_coefficients(node: Node, constants: Mapping[str, torch.Tensor]) -> bool:
    """Whether all coefficients of the affine `node` are 0, 1 or -1."""
    if node.op in ("linear", "conv"):
        return _units(constants[node.attrs["weight"].key])
    if node.op in ("mul", "div"):
        numbers = [item for item in node.args if isinstance(item, (int, float))]
        return all(abs(number) == 1 for number in numbers) and all(
            _units(constants[key]) for key in node.constants()
        )
    averages = node.op == "mean" or "avg_pool" in node.op or "linear" in node.op
    if node.op in ("add", "sub", "neg"):
        return node.kwargs.get("alpha", 1) in (1, -1)
    return AFFINE[node.op].absolute == "same" and not averages


def _units(value: torch.Tensor) -> bool:
    return bool(((value.abs() == 1) | (value == 0)).all())


def nonnegative(node: Node) -> bool:
    """Whether the affine ATen call `node` has no negative coefficient, whatever its constants."""
    if node.op == "add":
        return float(node.kwargs.get("alpha", 1)) >= 0
    return node.op in AFFINE and AFFINE[node.op].absolute == "same"


def absolute(node: Node) -> tuple[Node, frozenset[str]]:
    """The call whose linear part has the absolute values of the coefficients of `node`'s.

    Args:
        node: an affine ATen call (not `linear` or `conv`).

    Returns:
        the call, and the keys of those constants that must be replaced by their magnitudes in it.
        Its constant part is arbitrary.
    """
    how = AFFINE[node.op].absolute
    if how == "same":
        return node, frozenset()
    if how == "identity":
        return replace(node, op="clone", args=(Arg(0),), kwargs={}, target="aten.clone.default"), frozenset()
    if how == "sum":
        node = replace(node, op="add", target="aten.add.Tensor")
    node = replace(
        node,
        args=tuple(_magnitude(item) for item in node.args),
        kwargs={name: _magnitude(item) for name, item in node.kwargs.items()},
    )
    return node, frozenset(node.constants())


def _magnitude(template: Any) -> Any:
    if isinstance(template, (int, float)) and not isinstance(template, bool):
        return abs(template)
    return template


def unsupported(graph: Graph, relaxations: Collection[str]) -> list[str]:
    """All nonlinear ops of the graph for which there is no relaxation, each as `op (node, node, ...)`."""
    missing: dict[str, list[str]] = {}
    for node in graph:
        if classify(node) == "nonlinear" and node.op not in relaxations:
            missing.setdefault(node.op, []).append(node.name)
    return [f"{op} ({', '.join(names)})" for op, names in missing.items()]
