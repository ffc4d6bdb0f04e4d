"""Rules that fold constant factors and summands into the linear map or convolution beside them.

All arithmetic is in float64; the result is rounded once, to the type of the constants. Nodes keep what the
calls that are fused away round where the network itself computes them: bounds hold for that as well. (Two
linear maps in a row stay two: the magnitudes of the first one's sums cannot be told from the product of
their weights.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from abcrown_dist.graph.ir import Arg, Node
from abcrown_dist.graph.rebuild import Rebuild, Rule, view_node

_LARGE = 1e9  # no factor of a trained network comes near, and two of them stay far from overflow


@dataclass(frozen=True)
class _Scaling:
    """x -> scale x + shift, elementwise; float64, each broadcasts to the shape of x.

    Attributes:
        roundings: by the network's own computation.
        magnitude: what these are relative to beside scale x and shift, where the shift is itself a sum.
    """

    scale: torch.Tensor
    shift: torch.Tensor
    roundings: int = 1
    magnitude: float = 0.0


def _scaling(build: Rebuild, node: Node) -> _Scaling | None:
    """What `node` does to its only dependent operand, if that is a constant scaling of it."""
    if node.op not in ("mul", "div", "add", "sub", "neg") or len(node.inputs) != 1 or node.output is not None:
        return None
    if build[node.inputs[0]].shape != node.shape or node.kwargs.get("rounding_mode"):
        return None
    one, zero = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    if node.op == "neg":
        return _Scaling(-one, zero, 0)
    count, magnitude = 1 + node.fused[0], node.fused[1]
    alpha = float(node.kwargs.get("alpha", 1))
    swapped = node.args[1] == Arg(0)
    value = build.constant(node.args[0] if swapped else node.args[1])
    if value is None:
        return None
    value = value.double()
    if not value.isfinite().all() or (node.op == "div" and (swapped or not value.all())):
        return None
    if node.op in ("mul", "div"):
        return _Scaling(value if node.op == "mul" else 1 / value, zero, count, magnitude)
    sign, count = 1.0 if node.op == "add" else -1.0, count + (alpha != 1)
    if swapped:
        return _Scaling(one * sign * alpha, value, count, magnitude)
    return _Scaling(one, sign * alpha * value, count, magnitude)


def _per_channel(value: torch.Tensor, shape: tuple[int, ...], axis: int) -> torch.Tensor | None:
    """`value`, broadcast to `shape`, as a vector over `axis`; None when it varies along another axis."""
    if value.numel() == 1 or bool((value == value.reshape(-1)[0]).all()):
        return value.reshape(-1)[:1].expand(shape[axis])
    full = value.reshape(*[1] * (len(shape) - value.ndim), *value.shape)
    if any(extent != 1 for index, extent in enumerate(full.shape) if index != axis):
        return None
    return full.reshape(-1).expand(shape[axis])


def scaling_after_affine(build: Rebuild, node: Node) -> str | None:
    """scale (W x + b) + shift, per output channel, becomes one linear map or convolution."""
    scaling = _scaling(build, node)
    if scaling is None:
        return None
    source = build[node.inputs[0]]
    if source.op not in ("linear", "conv") or not build.private(source.name):
        return None
    axis = len(node.shape) - 1 if source.op == "linear" else 1
    scale = _per_channel(scaling.scale, node.shape, axis)
    shift = _per_channel(scaling.shift, node.shape, axis)
    if scale is None or shift is None or not _tame(build, source, scale):
        return None
    before = _bias(build, source)
    weight = None if (scale == 1).all() else _scale_outputs(source, _weight(build, source), scale)
    reach = ((before.abs() + source.fused[1]) * scale.abs() + shift.abs()).amax() if len(before) else 0.0
    fused = _Fused(weight, before * scale + shift, scaling.roundings, float(reach) + scaling.magnitude)
    return _emit_fused(build, node, source, fused)


def _scale_outputs(node: Node, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The weight of `node` with output channel o multiplied by scale[o]."""
    if node.op == "linear" or not node.attrs["transposed"]:
        return weight * scale.reshape(-1, *[1] * (weight.ndim - 1))
    # Transposed convolutions keep their weight as (I, O / groups, *kernel).
    groups, (inputs, outputs) = node.attrs["groups"], weight.shape[:2]
    grouped = weight.reshape(groups, inputs // groups, outputs, *weight.shape[2:])
    factors = scale.reshape(groups, 1, outputs, *[1] * (weight.ndim - 2))
    return (grouped * factors).reshape(weight.shape)


def _tame(build: Rebuild, node: Node, factor: torch.Tensor) -> bool:
    """Whether the weight of `node` and a factor may become one.

    Large ones may overflow on the way, which fusing would hide. In half precision nearly all may.
    """
    own = build.constant(node.attrs["weight"])
    assert own is not None
    if own.dtype in (torch.float16, torch.bfloat16):
        return False
    return bool(max(own.abs().max(), factor.abs().max()) <= _LARGE) if own.numel() else True


def _weight(build: Rebuild, node: Node) -> torch.Tensor:
    """Weight of a `linear` or `conv`, in float64."""
    weight = build.constant(node.attrs["weight"])
    assert weight is not None
    return weight.double()


def _bias(build: Rebuild, node: Node) -> torch.Tensor:
    """Bias of a `linear` or `conv`, (channels,) in float64; zero where there is none."""
    bias = build.constant(node.attrs["bias"])
    channels = node.shape[-1] if node.op == "linear" else node.shape[1]
    return torch.zeros(channels, dtype=torch.float64) if bias is None else bias.double()


@dataclass(frozen=True)
class _Fused:
    """A weight and bias that stand for several calls.

    Attributes:
        weight: None where it stays as it is.
        roundings: by which calls that are fused away round each term when the network computes them.
        magnitude: the largest sum of magnitudes that make up an entry of the bias: what those roundings
            are relative to, besides the products.
    """

    weight: torch.Tensor | None
    bias: torch.Tensor
    roundings: int
    magnitude: float


def _emit_fused(build: Rebuild, node: Node, source: Node, fused: _Fused) -> str:
    """Emit `source` under the name and shape of `node`, with another bias and, if given, weight."""
    attrs: dict[str, Any] = dict(source.attrs)
    if fused.weight is not None:
        attrs["weight"] = build.add_constant(f"{node.name}.weight", fused.weight.contiguous())
    attrs["bias"] = build.add_constant(f"{node.name}.bias", fused.bias.contiguous())
    attrs["fused"] = (source.fused[0] + fused.roundings, fused.magnitude)
    return build.emit(replace(source, name=node.name, shape=node.shape, attrs=attrs))


def scaling_before_linear(build: Rebuild, node: Node) -> str | None:
    """W (scale x + shift) + b becomes one linear map, also through a view in between."""
    if node.op != "linear":
        return None
    before = build[node.inputs[0]]
    view = before if before.op == "view" else None
    inner = build[view.inputs[0]] if view else before
    scaling = _scaling(build, inner)
    if scaling is None or not build.private(inner.name) or (view and not build.private(view.name)):
        return None
    shape = before.shape
    scale, shift = (
        _per_channel(value.expand(inner.shape).reshape(shape) if view else value, shape, len(shape) - 1)
        for value in (scaling.scale, scaling.shift)
    )
    weight, bias = _weight(build, node), _bias(build, node)
    if scale is None or shift is None or not _tame(build, node, scale):
        return None
    origin = inner.inputs[0]
    if view is not None:
        origin = build.emit(view_node(build.fresh(f"{node.name}/view"), origin, shape))
    reach = float((bias.abs() + weight.abs() @ (shift.abs() + scaling.magnitude)).max()) if len(bias) else 0.0
    # Sums count only the inputs that are not zero; shifted ones are not zero where these are.
    count = scaling.roundings + int(shift.count_nonzero())
    fused = _Fused(weight * scale, bias + weight @ shift, count, reach + node.fused[1])
    return _emit_fused(build, node, replace(node, inputs=(origin,)), fused)


RULES: tuple[Rule, ...] = (scaling_after_affine, scaling_before_linear)
