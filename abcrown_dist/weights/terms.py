"""How many products an affine map sums, and how often that rounds: the lengths that errors depend on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from abcrown_dist.graph.aten import AFFINE, absolute
from abcrown_dist.graph.execute import call
from abcrown_dist.graph.ir import Node
from abcrown_dist.util.light_autograd import plain_shapes

_ONE_EACH = frozenset({"mul", "div"})
_SCALARS = ("alpha", "beta")  # factors of whole operands
_BLOCK = 1 << 22  # weights looked at once


def sum_counts(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """For outputs  sum_i w_i x_i + b:  numbers of nonzero products, and further roundings.

    Args:
        weight: (outputs, entries).
        bias: (outputs,).

    Returns:
        both (outputs,) in the weight's dtype; the second counts the rounding of products (none where all
        weights are 1, -1 or 0) and the addition of a bias that is not zero.
    """
    step = max(1, _BLOCK // max(1, weight.shape[1]))
    found = [(part.count_nonzero(1), ((part.abs() != 1) & (part != 0)).any(1)) for part in weight.split(step)]
    products, rounded = (torch.cat(parts) for parts in zip(*found, strict=True))
    extra = rounded.to(weight.dtype)
    return products.to(weight.dtype), extra if bias is None else extra + (bias != 0)


def sum_roundings(products: Tensor, constant: Tensor, fused: int) -> Tensor:
    """How often sums of so many products are rounded, one addition less than there are products.

    Args:
        constant: what `sum_counts` adds; not where nothing is summed.
        fused: of `Node.fused`. Shifts that are fused away make products of inputs that are zero.
    """
    some = (products > 0) | (fused > 0)
    return (products - 1).clamp(min=0) + torch.where(some, constant, 0) + fused


def readers_of(node: Node, weight: tuple[int, ...]) -> int:
    """Outputs of a `linear` or `conv` that read one entry of its operand, given the shape of its weight."""
    if node.op == "linear":
        return weight[0]
    outputs = weight[1] if node.attrs["transposed"] else weight[0] // int(node.attrs["groups"])
    return outputs * math.prod(weight[2:])


def roundings_of(node: Node, terms: int) -> int:
    """How often one output of an affine ATen call is rounded at most, given the products that it sums."""
    kind, fused = AFFINE[node.op].absolute, node.fused[0]
    if kind == "identity":
        return fused
    if node.op in _ONE_EACH:
        return fused + (0 if node.unit else 1)
    if node.op in ("add", "sub") and node.kwargs.get("alpha", 1) in (1, -1):
        return fused + 1
    if kind == "same" and not _averages(node):
        return fused + terms - 1
    if _averages(node):  # their coefficients are computed, too
        return fused + 2 * terms + 8
    return fused + terms + 1 + sum(node.kwargs.get(name, 1) != 1 for name in _SCALARS)


def most_readers(node: Node, in_shapes: Sequence[tuple[int, ...]], constants: Mapping[str, Tensor]) -> int:
    """Upper bound of the outputs of the affine call `node` that read any entry of an operand."""
    if not node.size or not all(math.prod(shape) for shape in in_shapes):  # a rank without own neurons
        return 1
    ratios = [[-(-a // b) for a, b in zip(node.shape, shape, strict=False)] for shape in in_shapes]
    if node.op in _ONE_EACH:
        return max(math.ceil(node.size / max(1, math.prod(shape))) for shape in in_shapes)
    if node.op == "mean":
        return 1
    if _averages(node):  # windows that overlap, and interpolation between neighbours
        around = max(math.prod(2 * extent + 2 for extent in ratio) for ratio in ratios)
        return max(_window(node, in_shapes[0]), around)
    counted, ones = _with_ones(node, constants)
    with torch.enable_grad():
        xs = [torch.ones(shape, requires_grad=True) for shape in in_shapes]
        y = call(counted, xs, ones)
    with plain_shapes():
        grads = torch.autograd.grad(y, xs, torch.ones_like(y), allow_unused=True)
    counts = [float(grad.nan_to_num(nan=1).max()) for grad in grads if grad is not None and grad.numel()]
    return max(1, math.ceil(max(counts, default=1.0) - 1e-3))


def longest_sum(node: Node, in_shapes: Sequence[tuple[int, ...]], constants: Mapping[str, Tensor]) -> int:
    """Upper bound of the products that any output of the affine call `node` sums, at least 1.

    Counted by running the call on ones with all its constants one, which is exact where coefficients
    are 0, 1 or constants. Averages have smaller ones and are counted by the size of their window.
    """
    if node.op in _ONE_EACH:
        return 1
    if _averages(node):
        return _window(node, in_shapes[0])
    counted, ones = _with_ones(node, constants)
    with torch.no_grad():
        at_one, at_zero = (
            call(counted, [make(shape, device="cpu") for shape in in_shapes], ones)
            for make in (torch.ones, torch.zeros)
        )
    counts = (at_one - at_zero).nan_to_num(nan=1)  # an infinite offset, as of `masked_fill`
    if not counts.numel():  # a rank without own neurons
        return 1
    return max(1, math.ceil(float(counts.max()) - 1e-3))


def _with_ones(node: Node, constants: Mapping[str, Tensor]) -> tuple[Node, dict[str, Tensor]]:
    """The affine call with all its coefficients 1, and its constants: on ones it counts what it sums."""
    counted, keys = absolute(node)
    kwargs = {name: 1 if name in _SCALARS else value for name, value in counted.kwargs.items()}
    ones = {}
    for key, value in constants.items():
        value = torch.ones_like(value) if key in keys else value
        ones[key] = value.float().cpu() if value.is_floating_point() else value.cpu()
    return replace(counted, kwargs=kwargs), ones


def _averages(node: Node) -> bool:
    return node.op == "mean" or "avg_pool" in node.op or "linear" in node.op


def _window(node: Node, in_shape: tuple[int, ...]) -> int:
    if node.op.startswith("avg_pool"):
        axes = int(node.op[-2])
        kernel = node.args[1] if isinstance(node.args[1], (tuple, list)) else (node.args[1],)
        return math.prod(kernel) if len(kernel) == axes else kernel[0] ** axes
    ratio = [math.ceil(a / b) for a, b in zip(in_shape, node.shape, strict=False)]
    if node.op == "mean":
        return math.ceil(math.prod(in_shape) / node.size)
    # Adaptive windows and interpolation reach one cell further at either end of a spatial axis.
    return math.prod(extent + 1 for extent in ratio[-int(node.op[-2]) :])
