"""Affine nodes as maps: apply, transpose and absolute value, over one leading batch axis M.

For a node  y = sum_i W_i x_i + b  every map offers

    apply(x_1, ...)     sum_i W_i x_i + b        (M, *in_i) -> (M, *out)
    linear(x_1, ...)    sum_i W_i x_i
    absolute(x_1, ...)  sum_i |W_i| x_i
    roundings(x_1, ...) how often each output is rounded on its way at most, if only the marked operands
                        (1, the others 0) are not zero; 0 where the map is exact. (M, *out)
    transpose(A)        (W_i^T A)_i              (M, *out) -> (M, *in_i) for each i
    offset()            b (*out), or None where it is zero
    rows(index)         rows of W_1 for the given flat output neurons, (len, *in_1), or None where
                        multiplying by an identity is no slower

The engine folds domains and rows into M. `terms` is the number of products that one output sums,
`readers` the number of outputs that read one operand: what an entry of `transpose` sums.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from abcrown_dist.graph.aten import RESHAPE, absolute, nonnegative
from abcrown_dist.graph.execute import call
from abcrown_dist.graph.ir import Graph, Node
from abcrown_dist.util.light_autograd import plain_shapes
from abcrown_dist.weights.terms import (
    longest_sum,
    most_readers,
    readers_of,
    roundings_of,
    sum_counts,
    sum_roundings,
)

_NARROW = 12  # columns of a product
_BLOCK = 1 << 22  # entries of a changed weight at once


class AffineMap(ABC):
    """One affine node with its weights at hand. See the module's text for the methods."""

    terms: int = 1
    readers: int = 1
    nonnegative: bool = False  # all coefficients of W are >= 0: an interval maps end to end
    identity_rows: bool = False  # every W_i keeps the flat order: an identity row stays one

    @abstractmethod
    def linear(self, *xs: Tensor) -> Tensor: ...

    @abstractmethod
    def absolute(self, *xs: Tensor) -> Tensor: ...

    @abstractmethod
    def roundings(self, *xs: Tensor) -> Tensor: ...

    @abstractmethod
    def transpose(self, A: Tensor) -> tuple[Tensor, ...]: ...

    @abstractmethod
    def offset(self) -> Tensor | None: ...

    def apply(self, *xs: Tensor) -> Tensor:
        y, b = self.linear(*xs), self.offset()
        return y if b is None else y + b

    def rows(self, index: Tensor) -> Tensor | None:
        return None


def product(rows: Tensor, matrix: Tensor) -> Tensor:
    """rows (..., K) times a matrix (K, N); the bits of a row do not depend on its place among the rows.

    MKL's kernels for few columns treat rows of one product differently: measured for N up to 11.
    """
    width = matrix.shape[1]
    if width >= _NARROW or not width:
        return rows @ matrix
    padded = torch.nn.functional.pad(matrix, (0, _NARROW - width))
    return (rows @ padded)[..., :width].contiguous()


class LinearMap(AffineMap):
    """Canonical `linear`: acts on the last axis; weight (O, I), bias (O,)."""

    def __init__(self, node: Node, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias, self.shape = weight, bias, node.shape
        self.terms, self.readers = weight.shape[1], readers_of(node, tuple(weight.shape))
        self.fused = node.fused[0]
        self._counts: tuple[Tensor, Tensor] | None = None

    def linear(self, *xs: Tensor) -> Tensor:
        return product(xs[0], self.weight.T)

    def apply(self, *xs: Tensor) -> Tensor:
        if len(self.weight) < _NARROW:
            value = product(xs[0], self.weight.T)
            return value if self.bias is None else value + self.bias
        return torch.nn.functional.linear(xs[0], self.weight, self.bias)

    def absolute(self, *xs: Tensor) -> Tensor:
        return self._in_blocks(xs[0], torch.abs)

    def roundings(self, *xs: Tensor) -> Tensor:
        self._counts = self._counts or sum_counts(self.weight, self.bias)
        products = torch.minimum(xs[0].sum(-1, keepdim=True), self._counts[0])
        return sum_roundings(products, self._counts[1], self.fused)

    def _in_blocks(self, x: Tensor, entrywise: Callable[[Tensor], Tensor]) -> Tensor:
        """x times entrywise(W)^T in blocks of outputs, so that entrywise(W) never exists as a whole."""
        step = max(1, _BLOCK // self.weight.shape[1])
        return torch.cat([product(x, entrywise(block).T) for block in self.weight.split(step)], dim=-1)

    def transpose(self, A: Tensor) -> tuple[Tensor, ...]:
        return (product(A, self.weight),)

    def offset(self) -> Tensor | None:
        return None if self.bias is None else self.bias.expand(self.shape)

    def rows(self, index: Tensor) -> Tensor | None:
        outputs, inputs = self.weight.shape
        lead = math.prod(self.shape[:-1])
        if lead == 1:
            return self.weight[index].reshape(len(index), *self.shape[:-1], inputs)
        out = self.weight.new_zeros(len(index), lead, inputs)
        position = torch.arange(len(index), device=index.device)
        out[position, index // outputs] = self.weight[index % outputs]
        return out.reshape(len(index), *self.shape[:-1], inputs)


class ConvMap(AffineMap):
    """Canonical `conv`: grouped, strided, dilated, possibly transposed, in 1 to 3 dimensions."""

    def __init__(self, node: Node, in_shape: tuple[int, ...], weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.in_shape, self.shape = in_shape, node.shape
        attrs = node.attrs
        self.stride, self.padding, self.dilation = attrs["stride"], attrs["padding"], attrs["dilation"]
        self.transposed, self.groups = bool(attrs["transposed"]), int(attrs["groups"])
        self.output_padding = attrs["output_padding"]
        read = weight.shape[0] // self.groups if self.transposed else weight.shape[1]
        self.terms = read * math.prod(weight.shape[2:])
        self.readers = readers_of(node, tuple(weight.shape))
        self.fused = node.fused[0]
        self._counts: tuple[Tensor, Tensor] | None = None

    def linear(self, *xs: Tensor) -> Tensor:
        return self._forward(xs[0], self.weight, None)

    def apply(self, *xs: Tensor) -> Tensor:
        return self._forward(xs[0], self.weight, self.bias)

    def absolute(self, *xs: Tensor) -> Tensor:
        return self._forward(xs[0], self.weight.abs(), None)

    def roundings(self, *xs: Tensor) -> Tensor:
        self._counts = self._counts or sum_counts(self._by_output(), self.bias)
        axes = [1] * (len(self.shape) - 2)
        marks = xs[0].flatten(0, 1).unflatten(1, (self.groups, -1)).sum(2)
        ones = marks.new_ones(self.groups, 1, *self.weight.shape[2:])
        reached = torch.ops.aten.convolution(
            marks, ones, None, self.stride, self.padding, self.dilation, self.transposed,
            self.output_padding, self.groups,
        ).round()  # fmt: skip
        reached = reached.repeat_interleave(self.shape[1] // self.groups, dim=1)
        own, constant = (count.reshape(-1, *axes) for count in self._counts)
        counts = sum_roundings(torch.minimum(reached, own), constant, self.fused)
        return counts.reshape(xs[0].shape[0], *self.shape)

    def _by_output(self) -> Tensor:
        """The weight as (outputs, entries that one output reads)."""
        if not self.transposed:
            return self.weight.flatten(1)
        groups, outputs = self.groups, self.weight.shape[1]
        grouped = self.weight.unflatten(0, (groups, -1)).transpose(1, 2)
        return grouped.reshape(groups * outputs, -1)

    def transpose(self, A: Tensor) -> tuple[Tensor, ...]:
        batch = A.flatten(0, 1)  # the example's own leading axis is 1
        if self.transposed:
            result = torch.ops.aten.convolution(
                batch,
                self.weight,
                None,
                self.stride,
                self.padding,
                self.dilation,
                False,
                [0] * len(self.stride),
                self.groups,
            )
        else:
            result = torch.ops.aten.convolution(
                batch,
                self.weight,
                None,
                self.stride,
                self.padding,
                self.dilation,
                True,
                self._missing_border(),
                self.groups,
            )
        return (result.reshape(A.shape[0], *self.in_shape),)

    def offset(self) -> Tensor | None:
        if self.bias is None:
            return None
        return self.bias.reshape(1, -1, *[1] * (len(self.shape) - 2)).expand(self.shape)

    def rows(self, index: Tensor) -> Tensor | None:
        if self.transposed:
            return None
        out_sizes, in_sizes = self.shape[2:], self.in_shape[2:]
        space = math.prod(out_sizes)
        channel, rest = index // space, index % space
        per_group = self.weight.shape[1]
        first = channel // (self.weight.shape[0] // self.groups) * per_group
        # Flat input position of every weight entry of every row, and whether it lies inside.
        position = (first[:, None] + torch.arange(per_group, device=index.device))[:, :, None]
        inside = torch.ones_like(position, dtype=torch.bool)
        for axis, (extent, in_extent) in enumerate(zip(out_sizes, in_sizes, strict=True)):
            inner = math.prod(out_sizes[axis + 1 :])
            taps = torch.arange(self.weight.shape[2 + axis], device=index.device) * self.dilation[axis]
            start = rest // inner % extent * self.stride[axis] - self.padding[axis]
            at = (start[:, None] + taps)[:, None, None, :]
            inside = (inside[..., None] & (at >= 0) & (at < in_extent)).flatten(2)
            position = (position[..., None] * in_extent + at).flatten(2)
        out = self.weight.new_zeros(len(index), math.prod(self.in_shape))
        values = self.weight[channel].flatten(2) * inside
        out.scatter_add_(1, torch.where(inside, position, 0).flatten(1), values.flatten(1))
        return out.reshape(len(index), *self.in_shape)

    def _forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        result = torch.ops.aten.convolution(
            x.flatten(0, 1),
            weight,
            bias,
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding,
            self.groups,
        )
        return result.reshape(x.shape[0], *self.shape)

    def _missing_border(self) -> list[int]:
        """Input cells at the far end that no stride reaches: the transpose must give them back."""
        missing = []
        for axis, (extent, out) in enumerate(zip(self.in_shape[2:], self.shape[2:], strict=True)):
            kernel = (self.weight.shape[2 + axis] - 1) * self.dilation[axis] + 1
            covered = (out - 1) * self.stride[axis] - 2 * self.padding[axis] + kernel
            missing.append(extent - covered)
        return missing


class AtenMap(AffineMap):
    """Any other affine ATen call: rules derived by `torch.func`, checked by `adjoint.check`."""

    def __init__(
        self,
        node: Node,
        in_shapes: tuple[tuple[int, ...], ...],
        constants: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.node, self.constants = node, constants
        self.nonnegative = nonnegative(node)
        self.terms = longest_sum(node, in_shapes, constants)
        self.readers = most_readers(node, in_shapes, constants)
        self._zeros = tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in in_shapes)
        with torch.no_grad():
            at_zero = self._once(*self._zeros)
        self._offset = at_zero if bool((at_zero != 0).any()) else None

    def _once(self, *xs: Tensor) -> Tensor:
        return call(self.node, xs, self.constants)

    def apply(self, *xs: Tensor) -> Tensor:
        return torch.func.vmap(self._once)(*xs)

    def linear(self, *xs: Tensor) -> Tensor:
        y = self.apply(*xs)
        return y if self._offset is None else y - self._offset

    def absolute(self, *xs: Tensor) -> Tensor:
        return self.linear(*xs) if self.nonnegative else self._entrywise(*absolute(self.node), torch.abs, xs)

    def roundings(self, *xs: Tensor) -> Tensor:
        count = roundings_of(self.node, self.terms)
        return xs[0].new_full((1, *self.node.shape), count).expand(len(xs[0]), *self.node.shape)

    def _entrywise(
        self, node: Node, keys: Collection[str], change: Callable[[Tensor], Tensor], xs: tuple[Tensor, ...]
    ) -> Tensor:
        constants = {**self.constants, **{key: change(self.constants[key]) for key in keys}}
        y = torch.func.vmap(lambda *x: call(node, x, constants))(*xs)
        return y - call(node, self._zeros, constants)

    def transpose(self, A: Tensor) -> tuple[Tensor, ...]:
        # Not torch.func.vjp: its first call imports torch's compiler, which takes a second.
        with torch.enable_grad():
            xs = tuple(zero.detach().requires_grad_() for zero in self._zeros)
            y = self._once(*xs)
        with plain_shapes():
            return torch.autograd.grad(y, xs, A, is_grads_batched=True, materialize_grads=True)

    def offset(self) -> Tensor | None:
        return self._offset


class ReshapeMap(AffineMap):
    """`view` and its kin: the flat order stays, so that no `torch.func` is needed."""

    nonnegative = True
    identity_rows = True

    def __init__(self, in_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
        self.in_shape, self.shape = in_shape, shape

    def linear(self, *xs: Tensor) -> Tensor:
        return xs[0].reshape(xs[0].shape[0], *self.shape)

    absolute = linear

    def roundings(self, *xs: Tensor) -> Tensor:
        return xs[0].new_zeros(len(xs[0]), *self.shape)

    def transpose(self, A: Tensor) -> tuple[Tensor, ...]:
        return (A.reshape(A.shape[0], *self.in_shape),)

    def offset(self) -> Tensor | None:
        return None


class SumMap(AffineMap):
    """Sum of two operands of equal shape, as in residual networks."""

    nonnegative = True
    identity_rows = True
    terms = 2

    def linear(self, *xs: Tensor) -> Tensor:
        return xs[0] + xs[1]

    absolute = linear

    def roundings(self, *xs: Tensor) -> Tensor:
        return torch.minimum(xs[0], xs[1])  # a sum with zero is exact

    def transpose(self, A: Tensor) -> tuple[Tensor, ...]:
        return (A, A)

    def offset(self) -> Tensor | None:
        return None


def build_map(
    graph: Graph, node: Node, fetch: Callable[[str], Tensor], dtype: torch.dtype, device: torch.device
) -> AffineMap:
    """The map of an affine `node`, its constants taken through `fetch`."""
    in_shapes = tuple(graph[name].shape for name in node.inputs)
    if node.op in ("linear", "conv"):
        weight = fetch(node.attrs["weight"].key)
        bias = node.attrs.get("bias")
        bias_value = None if bias is None else fetch(bias.key)
        if node.op == "linear":
            return LinearMap(node, weight, bias_value)
        return ConvMap(node, in_shapes[0], weight, bias_value)
    if node.op in RESHAPE:
        return ReshapeMap(in_shapes[0], node.shape)
    if is_plain_sum(graph, node):
        return SumMap()
    constants = {key: fetch(key) for key in node.constants()}
    return AtenMap(node, in_shapes, constants, dtype, device)


def is_plain_sum(graph: Graph, node: Node) -> bool:
    """Whether `node` adds two nodes of its own shape, unscaled."""
    return (
        node.op == "add"
        and len(node.inputs) == 2
        and len(node.args) == 2
        and node.kwargs.get("alpha", 1) == 1
        and all(graph[name].shape == node.shape for name in node.inputs)
    )


def changed_entries(graph: Graph, node: Node, own: int) -> int:
    """Most entries of |W| that exist at once, for the map of `own` outputs of an affine node."""
    if node.op == "linear":
        outputs, inputs = graph.constants[node.attrs["weight"].key].shape
        return min(math.ceil(outputs * own / node.size), max(1, _BLOCK // inputs)) * inputs
    entries = sum(graph.constants[key].numel() for key in node.constants())
    return math.ceil(entries * own / max(node.size, 1))
