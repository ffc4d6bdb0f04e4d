"""How many products an affine map sums, and how often that rounds: the lengths that errors depend on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from abcrown_dist.graph.aten import AFFINE, absolute
from abcrown_dist.graph.execute import call
from abcrown_dist.graph.ir import Node
from abcrown_dist.util.light_autograd import plain_shapes

_ONE_EACH = frozenset({"mul", "div"})
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


def readers_of(node: Node, weight: tuple[int, ...]) -> int:
    """Outputs of a `linear` or `conv` that read one entry of its operand, given the shape of its weight."""
    if node.op == "linear":
        return weight[0]
    outputs = weight[1] if node.attrs["transposed"] else weight[0] // int(node.attrs["groups"])
    return outputs * math.prod(weight[2:])


def fused_roundings(node: Node) -> int:
    """Roundings of the calls that rewriting has fused into a node, beside those of its own sum."""
    return int(node.attrs.get("fused", (0, 0.0))[0])


def fused_magnitude(node: Node) -> float:
    """Largest sum of magnitudes that the fused calls added up to make the node's bias."""
    return float(node.attrs.get("fused", (0, 0.0))[1])


def roundings_of(node: Node, terms: int, constants: Mapping[str, Tensor]) -> int:
    """How often one output of an affine ATen call is rounded at most, given the products that it sums."""
    kind, fused = AFFINE[node.op].absolute, fused_roundings(node)
    if kind == "identity":
        return fused
    if node.op in _ONE_EACH:
        return fused + (0 if _signs(node, constants) else 1)
    if node.op in ("add", "sub") and node.kwargs.get("alpha", 1) in (1, -1):
        return fused + 1
    if kind == "same" and not _averages(node):
        return fused + terms - 1
    # Coefficients of averages and interpolations are themselves computed.
    return fused + (2 * terms + 8 if _averages(node) else terms + 1)


def _signs(node: Node, constants: Mapping[str, Tensor]) -> bool:
    """Whether a call multiplies, or divides, by nothing but 1 and -1."""
    numbers = [item for item in node.args if isinstance(item, (int, float))]
    return all(abs(number) == 1 for number in numbers) and all(
        bool((constants[key].abs() == 1).all()) for key in node.constants()
    )


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
    counted, keys = absolute(node)
    ones = {key: torch.ones_like(constants[key]) if key in keys else constants[key] for key in constants}
    with torch.enable_grad():
        xs = [torch.ones(shape, requires_grad=True) for shape in in_shapes]
        y = call(counted, xs, _plain(ones))
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
    counted, keys = absolute(node)
    ones = {key: torch.ones_like(constants[key]) if key in keys else constants[key] for key in constants}
    with torch.no_grad():
        at_one, at_zero = (
            call(counted, [make(shape, device="cpu") for shape in in_shapes], _plain(ones))
            for make in (torch.ones, torch.zeros)
        )
    counts = (at_one - at_zero).nan_to_num(nan=1)  # an infinite offset, as of `masked_fill`
    if not counts.numel():  # a rank without own neurons
        return 1
    return max(1, math.ceil(float(counts.max()) - 1e-3))


def _plain(constants: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        key: value.float().cpu() if value.is_floating_point() else value.cpu()
        for key, value in constants.items()
    }


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
