"""Rules that turn ATen calls into the canonical nodes of the IR, one for one."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from abcrown_dist.graph.aten import RESHAPE
from abcrown_dist.graph.ir import Arg, Const, Node
from abcrown_dist.graph.rebuild import Rebuild, Rule, linear_node, permute_node, view_node


def _emit_linear(
    build: Rebuild, node: Node, weight: torch.Tensor, bias: torch.Tensor | None, fused: int = 0
) -> str:
    """Emit `node` as x @ weight^T + bias; weight (O, I). `fused`: further roundings of the network's own."""
    weight_ref = build.add_constant(f"{node.name}.weight", weight.contiguous())
    bias_ref = None if bias is None else build.add_constant(f"{node.name}.bias", bias.contiguous())
    linear = linear_node(node.name, node.inputs[0], node.shape, weight_ref, bias_ref)
    return build.emit(replace(linear, attrs={**linear.attrs, "fused": (fused, 0.0)}) if fused else linear)


def _row_bias(bias: torch.Tensor, outputs: int) -> torch.Tensor | None:
    """`bias` as a vector (O,), when it is the same for every row; else None."""
    if bias.ndim and bias.numel() != bias.shape[-1]:
        return None
    return bias.reshape(-1).expand(outputs)


def addmm(build: Rebuild, node: Node) -> str | None:
    """bias + x @ W with constant W and bias."""
    if node.op != "addmm":
        return None
    bias, weight = build.constant(node.args[0]), build.constant(node.args[2])
    if bias is None or weight is None:
        return None
    row = _row_bias(bias, weight.shape[1])
    if row is None:
        return None
    alpha, beta = float(node.kwargs.get("alpha", 1)), float(node.kwargs.get("beta", 1))
    if alpha != 1:
        weight = weight.double() * alpha
    if beta != 1:
        row = row.double() * beta
    return _emit_linear(build, node, weight.t(), row, fused=(alpha != 1) + (beta != 1))


def mm(build: Rebuild, node: Node) -> str | None:
    """x @ W with constant W."""
    if node.op != "mm" or node.args[0] != Arg(0) or not isinstance(node.args[1], Const):
        return None
    weight = build.constant(node.args[1])
    return None if weight is None else _emit_linear(build, node, weight.t(), None)


def mv(build: Rebuild, node: Node) -> str | None:
    """W @ x with constant W and a vector x."""
    if node.op != "mv" or not isinstance(node.args[0], Const):
        return None
    weight = build.constant(node.args[0])
    return None if weight is None else _emit_linear(build, node, weight, None)


def bmm(build: Rebuild, node: Node) -> str | None:
    """x @ W with constant W that is the same for every member of the batch."""
    if node.op != "bmm" or node.args[0] != Arg(0):
        return None
    weight = build.constant(node.args[1])
    if weight is None or not torch.equal(weight, weight[:1].expand_as(weight)):
        return None
    return _emit_linear(build, node, weight[0].t(), None)


def aten_linear(build: Rebuild, node: Node) -> str | None:
    """`aten.linear` itself, where the backend has it."""
    if not node.target.startswith("aten.linear.") or node.args[0] != Arg(0):
        return None
    weight = build.constant(node.args[1])
    bias = build.constant(node.args[2]) if len(node.args) > 2 else None
    dependent_bias = len(node.args) > 2 and isinstance(node.args[2], Arg)
    if weight is None or dependent_bias:
        return None
    return _emit_linear(build, node, weight, bias)


def convolution(build: Rebuild, node: Node) -> str | None:
    """A convolution of one example by a constant kernel."""
    if node.op != "convolution" or node.shape[0] != 1 or node.args[0] != Arg(0):
        return None
    _, weight, bias, stride, padding, dilation, transposed, output_padding, groups = node.args
    if not isinstance(weight, Const) or not (bias is None or isinstance(bias, Const)):
        return None
    axes = len(node.shape) - 2
    attrs = {
        "weight": weight,
        "bias": bias,
        "stride": _per_axis(stride, axes),
        "padding": _per_axis(padding, axes),
        "dilation": _per_axis(dilation, axes),
        "transposed": transposed,
        "output_padding": _per_axis(output_padding, axes),
        "groups": groups,
    }
    return build.emit(Node(node.name, "conv", node.inputs, node.shape, attrs=attrs))


def _per_axis(value: tuple[int, ...], axes: int) -> tuple[int, ...]:
    return tuple(value) if len(value) == axes else tuple(value) * axes


_BATCH_NORMS = {
    # op: (position of `training`, position of eps)
    "native_batch_norm": (5, 7),
    "_native_batch_norm_legit": (5, 7),
    "cudnn_batch_norm": (5, 7),
    "_native_batch_norm_legit_no_training": (None, 6),
}


def batch_norm(build: Rebuild, node: Node) -> str | None:
    """Batch normalisation with fixed statistics, as a product and a sum per channel."""
    if node.op not in _BATCH_NORMS or node.output not in (None, 0) or node.args[0] != Arg(0):
        return None
    training, eps = _BATCH_NORMS[node.op]
    if training is not None and node.args[training]:
        return None
    weight, bias, mean, variance = (build.constant(item) for item in node.args[1:5])
    if mean is None or variance is None or len(node.inputs) != 1:
        return None
    scale = 1 / torch.sqrt(variance.double() + float(node.args[eps]))
    scale = scale if weight is None else scale * weight.double()
    shift = -mean.double() * scale if bias is None else bias.double() - mean.double() * scale
    shape = (-1, *[1] * (len(node.shape) - 2))
    scale_ref = build.add_constant(f"{node.name}.scale", scale.reshape(shape))
    shift_ref = build.add_constant(f"{node.name}.shift", shift.reshape(shape))
    scaled, target = build.fresh(f"{node.name}/scaled"), "aten.mul.Tensor"
    build.emit(Node(scaled, "mul", node.inputs, node.shape, (Arg(0), scale_ref), target=target))
    # (x - mean) / sqrt(variance + eps) * weight + bias: five roundings beside the addition, the first of them
    # relative to the mean.
    terms = (mean.double() * scale).abs() + (0 if bias is None else bias.double().abs())
    attrs = {"fused": (5, float(terms.max()) if terms.numel() else 0.0)}
    args, target = (Arg(0), shift_ref), "aten.add.Tensor"
    return build.emit(Node(node.name, "add", (scaled,), node.shape, args, attrs=attrs, target=target))


def relu(build: Rebuild, node: Node) -> str | None:
    """The ways to write max(x, 0)."""
    if len(node.inputs) != 1 or not node.target:
        return None
    if _is_maximum_with_zero(build, node):
        return build.emit(Node(node.name, "relu", build[node.inputs[0]].inputs, node.shape))
    if not _is_relu(build, node):
        return None
    return build.emit(Node(node.name, "relu", node.inputs, node.shape))


def _is_maximum_with_zero(build: Rebuild, node: Node) -> bool:
    """Max(x, 0) as onnx2pytorch writes it: the largest along a new first axis of (x, 0)."""
    stack = build[node.inputs[0]]
    if node.op != "amax" or len(node.args) < 2 or stack.op != "stack" or len(stack.inputs) != 1:
        return False
    items, *axis = stack.args
    others = [item for item in items if item != Arg(0)]
    return (
        tuple(node.args[1]) == (0,)
        and axis in ([], [0])
        and len(others) < len(items)
        and all(_is_zero(build, item) for item in others)
        and build[stack.inputs[0]].shape == node.shape
    )


def negative_part(build: Rebuild, node: Node) -> str | None:
    """min(x, 0) = -relu(-x)."""
    bounds = (*node.args[1:], None, None)
    upper = bounds[0] if node.op == "clamp_max" else bounds[1]
    free = node.op == "clamp_max" or (node.op == "clamp" and bounds[0] is None)
    if not free or len(node.inputs) != 1 or not _is_zero(build, upper):
        return None
    shape, target = node.shape, "aten.neg.default"
    names = [build.fresh(f"{node.name}/{part}") for part in ("negated", "relu")]
    build.emit(Node(names[0], "neg", node.inputs, shape, (Arg(0),), target=target))
    build.emit(Node(names[1], "relu", (names[0],), shape))
    return build.emit(Node(node.name, "neg", (names[1],), shape, (Arg(0),), target=target))


def leaky_relu_in_parts(build: Rebuild, node: Node) -> str | None:
    """relu(x) + slope min(x, 0), as onnx2pytorch writes PRelu, with one slope in [0, 1] for all."""
    if node.op != "add" or len(node.inputs) != 2 or node.kwargs.get("alpha", 1) != 1:
        return None
    positive, product = (build[name] for name in node.inputs)
    if product.op == "relu":
        positive, product = product, positive
    if positive.op != "relu" or product.op != "mul" or len(product.inputs) != 1:
        return None
    slopes = [value for value in map(build.constant, product.args) if value is not None]
    source = _negative_part_of(build, product.inputs[0])
    if source != positive.inputs[0] or not slopes or build[source].shape != node.shape:
        return None
    slope = float(slopes[0].reshape(-1)[0])
    if not (slopes[0] == slope).all() or not 0 <= slope <= 1:
        return None
    return build.emit(Node(node.name, "leaky_relu", (source,), node.shape, attrs={"negative_slope": slope}))


def _negative_part_of(build: Rebuild, name: str) -> str | None:
    """x, when the node is -relu(-x)."""
    node = build[name]
    for op in ("neg", "relu", "neg"):
        if node.op != op:
            return None
        node = build[node.inputs[0]]
    return node.name


def _is_relu(build: Rebuild, node: Node) -> bool:
    bounds = (*node.args[1:], None, None)
    if node.op == "relu":
        return True
    if node.op == "clamp_min":
        return _is_zero(build, bounds[0])
    if node.op == "clamp":
        upper = bounds[1]
        return _is_zero(build, bounds[0]) and (upper is None or upper == math.inf)
    if node.op == "threshold":
        return _is_zero(build, bounds[0]) and _is_zero(build, bounds[1])
    if node.op == "maximum":
        return any(_is_zero(build, item) for item in node.args)
    return False


def _is_zero(build: Rebuild, template: object) -> bool:
    value = build.constant(template)
    return value is not None and not value.any()


def leaky_relu(build: Rebuild, node: Node) -> str | None:
    """Leaky ReLU, also as a PReLU with one slope for all; outside [0, 1] as a sum of two ReLUs."""
    if not node.target or node.op not in ("leaky_relu", "_prelu_kernel", "prelu") or len(node.inputs) != 1:
        return None
    given = build.constant(node.args[1]) if len(node.args) > 1 else torch.tensor(0.01).double()
    if node.args[0] != Arg(0) or given is None or not (given == given.reshape(-1)[0]).all():
        return None
    slope = float(given.reshape(-1)[0])
    if 0 <= slope <= 1:
        attrs = {"negative_slope": slope}
        return build.emit(Node(node.name, "leaky_relu", node.inputs, node.shape, attrs=attrs))
    return _two_relus(build, node, slope)


def _two_relus(build: Rebuild, node: Node, slope: float) -> str:
    """relu(x) - slope relu(-x)."""
    shape = node.shape
    names = [build.fresh(f"{node.name}/{part}") for part in ("positive", "negated", "negative")]
    positive = build.emit(Node(names[0], "relu", node.inputs, shape))
    negated = build.emit(Node(names[1], "neg", node.inputs, shape, (Arg(0),), target="aten.neg.default"))
    negative = build.emit(Node(names[2], "relu", (negated,), shape))
    args, kwargs, target = (Arg(0), Arg(1)), {"alpha": slope}, "aten.sub.Tensor"
    return build.emit(Node(node.name, "sub", (positive, negative), shape, args, kwargs, target=target))


def reshape(build: Rebuild, node: Node) -> str | None:
    """Everything that keeps the elements in C order, as `view`."""
    if node.op not in RESHAPE or node.output is not None:
        return None
    return build.emit(view_node(node.name, node.inputs[0], node.shape))


def permute(build: Rebuild, node: Node) -> str | None:
    """Every exchange of axes, as `permute`."""
    axes = len(node.shape)
    if node.op == "permute":
        dims = [int(dim) % axes for dim in node.args[1]]
    elif node.op == "t" and axes == 2:
        dims = [1, 0]
    elif node.op == "transpose":
        dims = list(range(axes))
        first, second = int(node.args[1]) % axes, int(node.args[2]) % axes
        dims[first], dims[second] = second, first
    else:
        return None
    return build.emit(permute_node(node.name, node.inputs[0], node.shape, tuple(dims)))


def reversed_difference(build: Rebuild, node: Node) -> str | None:
    """rsub(x, y) = y - alpha x, as `sub`."""
    if node.op != "rsub":
        return None
    x, y, *alpha = node.args
    if not isinstance(y, (Arg, Const)):
        # sub takes a number only as its second operand.
        y = build.add_constant(f"{node.name}.minuend", torch.tensor(float(y), dtype=torch.float64))
    kwargs = {"alpha": alpha[0]} if alpha else node.kwargs
    return build.emit(replace(node, op="sub", args=(y, x), kwargs=kwargs, target="aten.sub.Tensor"))


RULES: tuple[Rule, ...] = (
    addmm,
    mm,
    mv,
    bmm,
    aten_linear,
    convolution,
    batch_norm,
    relu,
    negative_part,
    leaky_relu,
    leaky_relu_in_parts,
    reshape,
    permute,
    reversed_difference,
)
