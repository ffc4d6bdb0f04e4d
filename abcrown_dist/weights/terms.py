"""How many products one output of an affine ATen call sums: the length that its rounding depends on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from abcrown_dist.graph.aten import absolute
from abcrown_dist.graph.execute import call
from abcrown_dist.graph.ir import Node

_ONE_EACH = frozenset({"mul", "div"})


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
