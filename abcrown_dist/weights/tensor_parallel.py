"""Tensor parallelism: every affine node cut by its output neurons, exact at any depth.

After Shoeybi et al., "Megatron-LM", 2019, but with one kind of cut only. Rank r holds the weight rows
of its own output neurons, and of every tensor over a node the columns of its own neurons (`layout.py`):
coefficients, slopes, bounds. A backward step multiplies its columns by its weight rows, which gives a
partial sum over *all* input neurons; summing these and leaving each rank its own is one
reduce-scatter. A forward step gathers the inputs. Both are tiled by rows, so that what is full width
is at most 1/(4 P) of a coefficient matrix. Nothing is approximated: the bounds are those of one
process up to the order of summation.

(In the terms of arXiv 2606.09377 every layer here is a `BoundLinearTP_Col` whose inputs are gathered
or, going backwards, reduce-scattered; its `BoundLinearTP_Row` has no counterpart, because no zone ends.)
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from abcrown_dist.graph.ir import Const, Graph, Node
from abcrown_dist.parallel.group import Group
from abcrown_dist.util.numerics import REAL_ARITHMETIC, Rounding
from abcrown_dist.weights.fsdp import ShardedWeights, without_values
from abcrown_dist.weights.layout import Ends, How, plan_layouts, weight_ends
from abcrown_dist.weights.maps import (
    AffineMap,
    AtenMap,
    ConvMap,
    LinearMap,
    ReshapeMap,
    SumMap,
    is_plain_sum,
)
from abcrown_dist.weights.terms import readers_of


class TensorParallelWeights:
    """Weights cut by output neurons over a group; hands out maps over own neurons, (M, own) flat.

    Args:
        graph: the first rank's with its constants' values; `without_values` of it on the others.
        group: the ranks that share the weights.
        dtype, device: of the parts.
        rounding: see `weights.base.Weights`; default for real arithmetic.
    """

    transient = True

    def __init__(
        self,
        graph: Graph,
        group: Group,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        rounding: Rounding = REAL_ARITHMETIC,
    ) -> None:
        self.parts, self.rounding = group.size, rounding
        self.group, self.dtype, self.device = group, dtype, torch.device(device)
        self.graph = without_values(graph)
        self.layouts = plan_layouts(graph, group.size)
        together = {
            key for node in graph for key in node.constants() if self.layouts[node.name][0] == "replicated"
        }
        self._sharded = ShardedWeights(graph, group, dtype, device, prefetch=False, only=together)
        self._parts: dict[tuple[str, str], Tensor] = {}
        for node in graph:
            how, ends = self.layouts[node.name]
            if how != "replicated":
                for key in node.constants():
                    self._parts[node.name, key] = self._deal(graph, node, key, how, ends)

    def to(self, dtype: torch.dtype) -> TensorParallelWeights | None:
        """The same parts in another dtype; None where parts hold fewer digits than the model does."""
        sharded = self._sharded.to(dtype)
        if sharded is None:
            return None
        other = copy.copy(self)
        other.dtype, other._sharded = dtype, sharded
        other._parts = {
            key: value.to(dtype) if value.is_floating_point() else value for key, value in self._parts.items()
        }
        return other

    # What the bound passes ask for, see `weights.base.Weights`.

    def constant(self, key: str) -> Tensor:
        """A constant of a node that is not affine."""
        return self._sharded.constant(key)

    def shape(self, name: str) -> tuple[int, ...]:
        """Own neurons are flat, whatever the node's shape."""
        first, last = self._range(name)
        return (last - first,)

    def total(self, value: Tensor) -> Tensor:
        """Sum over the ranks: what own neurons contribute, added up."""
        return self.group.total(value)

    def own(self, name: str, whole: Tensor) -> Tensor:
        """The own part of a tensor (..., *shape) over all neurons of a node: (..., own)."""
        lead = whole.dim() - len(self.graph[name].shape)
        first, last = self._range(name)
        return whole.flatten(lead)[..., first:last]

    def whole(self, name: str, own: Tensor) -> Tensor:
        """All neurons (..., *shape) of a tensor (..., own)."""
        return self._gather(own, self.layouts[name][1]).unflatten(-1, self.graph[name].shape)

    def locate(self, name: str, index: Tensor) -> tuple[Tensor, Tensor]:
        """Which entries of `index` (flat neurons of a node) are own ones, and their own flat indices."""
        first, last = self._range(name)
        mine = torch.nonzero((index >= first) & (index < last)).flatten()
        return mine, index[mine] - first

    def expect(self, names: Sequence[str]) -> None:
        """Weights stay where they are."""

    def own_chunks(self, count: int) -> list[tuple[int, bool]]:
        """All ranks work on every chunk, each on its own neurons."""
        return [(number, True) for number in range(count)]

    def merge_rows(self, own: Tensor) -> Tensor:
        """Every rank has all rows."""
        return own

    @contextmanager
    def visit(self, node: Node) -> Iterator[AffineMap]:
        """The map of `node` over own neurons."""
        how, ends = self.layouts[node.name]
        before = [self.layouts[name][1] for name in node.inputs]
        if how == "replicated":
            with self._sharded.visit(node) as inner:
                yield _Replicated(self, node, inner, before, ends)
        elif how in ("neurons", "channels"):
            yield _OwnOutputs(self, node, self._inner(node, ends), before[0])
        elif how == "pooled":
            yield self._pooled(node, ends, before[0])
        else:
            yield self._local(node)

    def _range(self, name: str) -> tuple[int, int]:
        ends = self.layouts[name][1]
        return ends[self.group.rank], ends[self.group.rank + 1]

    def _deal(self, graph: Graph, node: Node, key: str, how: How, ends: Ends) -> Tensor:
        """Own part of a constant, sent by the first rank."""
        value = graph.constants[key]
        dtype = self.dtype if value.is_floating_point() else value.dtype
        if value.numel() == 1:
            return self.group.send_from_first(
                value if self.group.rank == 0 else None,
                torch.empty(value.shape, dtype=dtype, device=self.device),
            )
        axis, cut, viewed = _cut(node, key, how, ends, value)
        pieces = None
        if self.group.rank == 0:
            moved = viewed.to(self.device, dtype)
            pieces = [
                moved.narrow(axis, cut[r], cut[r + 1] - cut[r]).contiguous() for r in range(self.group.size)
            ]
        extent = list(viewed.shape)
        extent[axis] = cut[self.group.rank + 1] - cut[self.group.rank]
        return self.group.deal(pieces, torch.empty(extent, dtype=dtype, device=self.device))

    def _inner(self, node: Node, ends: Ends) -> AffineMap | None:
        """The map from all inputs to the own outputs; None without own outputs."""
        cut = weight_ends(node, ends)
        count = cut[self.group.rank + 1] - cut[self.group.rank]
        if count == 0:
            return None
        weight = self._parts[node.name, node.attrs["weight"].key]
        bias = node.attrs.get("bias")
        own_bias = None if bias is None else self._parts[node.name, bias.key]
        if node.op == "linear":
            return LinearMap(replace(node, shape=(*node.shape[:-1], count)), weight, own_bias)
        part = replace(node, shape=(node.shape[0], count, *node.shape[2:]))
        return ConvMap(part, self.graph[node.inputs[0]].shape, weight, own_bias)

    def _local(self, node: Node) -> AffineMap:
        """The map of a node that moves nothing between neurons."""
        own = self.shape(node.name)
        if (
            not node.constants()
            and len(node.inputs) == 1
            and node.op not in ("mul", "div", "add", "sub", "neg")
        ):
            return ReshapeMap(own, own)
        if is_plain_sum(self.graph, node):
            return SumMap()
        parts = {key: self._parts[node.name, key] for key in node.constants()}
        constants = {key: part.reshape(()) if part.numel() == 1 else part for key, part in parts.items()}
        part = replace(node, shape=own)
        return AtenMap(part, (own,) * len(node.inputs), constants, self.dtype, self.device)

    def _pooled(self, node: Node, ends: Ends, before: Ends) -> AffineMap:
        """The map of a channelwise node on own channels."""
        source = self.graph[node.inputs[0]]

        def own_shape(full: Node, cut: Ends) -> tuple[int, ...]:
            channels = (cut[self.group.rank + 1] - cut[self.group.rank]) // math.prod(full.shape[2:])
            return (full.shape[0], channels, *full.shape[2:])

        part, in_shape = replace(node, shape=own_shape(node, ends)), own_shape(source, before)
        if not part.size:  # pooling refuses images without channels
            return ReshapeMap((0,), (0,))
        return _Pooled(AtenMap(part, (in_shape,), {}, self.dtype, self.device), in_shape)

    def _gather(self, own: Tensor, ends: Ends) -> Tensor:
        """(..., own) -> (..., all neurons)."""
        if self.group.size == 1:
            return own
        lead = own.shape[:-1]
        count = math.prod(lead)
        buffer = torch.empty(count * ends[-1], dtype=own.dtype, device=own.device)
        bounds = [count * end for end in ends]
        self.group.gather(own.reshape(-1), buffer, bounds).wait()
        parts = [
            buffer[bounds[r] : bounds[r + 1]].reshape(*lead, ends[r + 1] - ends[r])
            for r in range(self.group.size)
        ]
        return torch.cat(parts, dim=-1)

    def _tiles(self, rows: int) -> list[slice]:
        """Cut rows so that a tile of full width is at most 1/(4 P) of the whole."""
        count = min(rows, 4 * self.group.size)
        return [slice(rows * i // count, rows * (i + 1) // count) for i in range(count)] if rows else []


class _OwnOutputs(AffineMap):
    """Own outputs from all inputs: `linear` or `conv` with the weights of the own outputs."""

    def __init__(
        self, weights: TensorParallelWeights, node: Node, inner: AffineMap | None, before: Ends
    ) -> None:
        self.weights, self.inner, self.before = weights, inner, before
        self.in_shape = weights.graph[node.inputs[0]].shape
        self.own = weights.shape(node.name)[0]
        self.terms = 1 if inner is None else inner.terms
        self.readers = readers_of(node, tuple(weights.graph.constants[node.attrs["weight"].key].shape))
        self.out_shape = () if inner is None else _own_out_shape(node, self.own)

    def linear(self, *xs: Tensor) -> Tensor:
        return self._forward(xs[0], "linear")

    def apply(self, *xs: Tensor) -> Tensor:
        return self._forward(xs[0], "apply")

    def absolute(self, *xs: Tensor) -> Tensor:
        return self._forward(xs[0], "absolute")

    def roundings(self, *xs: Tensor) -> Tensor:
        return self._forward(xs[0], "roundings")

    def transpose(self, A: Tensor) -> tuple[Tensor, ...]:
        rank, size = self.weights.group.rank, self.weights.group.size
        result = A.new_empty(len(A), self.before[rank + 1] - self.before[rank])
        for tile in self.weights._tiles(len(A)):
            if self.inner is None:
                partial = A.new_zeros(tile.stop - tile.start, self.before[-1])
            else:
                partial = self.inner.transpose(A[tile].reshape(-1, *self.out_shape))[0].flatten(1)
            parts = [partial[:, self.before[r] : self.before[r + 1]].contiguous() for r in range(size)]
            result[tile] = self.weights.group.reduce_scatter(parts)
            del partial, parts  # before the next tile exists
        return (result,)

    def offset(self) -> Tensor | None:
        found = None if self.inner is None else self.inner.offset()
        return None if found is None else found.flatten()

    def _forward(self, x: Tensor, how: str) -> Tensor:
        result = x.new_empty(len(x), self.own)
        for tile in self.weights._tiles(len(x)):
            whole = self.weights._gather(x[tile], self.before)
            if self.inner is not None:
                result[tile] = getattr(self.inner, how)(whole.reshape(-1, *self.in_shape)).flatten(1)
        return result


class _Replicated(AffineMap):
    """Everything on every rank, of which each keeps its own neurons."""

    def __init__(
        self, weights: TensorParallelWeights, node: Node, inner: AffineMap, before: list[Ends], ends: Ends
    ) -> None:
        self.weights, self.inner, self.before, self.ends = weights, inner, before, ends
        self.in_shapes = [weights.graph[name].shape for name in node.inputs]
        self.out_shape = node.shape
        self.first, self.last = weights._range(node.name)
        self.terms, self.readers, self.nonnegative = inner.terms, inner.readers, inner.nonnegative

    def linear(self, *xs: Tensor) -> Tensor:
        return self._forward(xs, "linear")

    def apply(self, *xs: Tensor) -> Tensor:
        return self._forward(xs, "apply")

    def absolute(self, *xs: Tensor) -> Tensor:
        return self._forward(xs, "absolute")

    def roundings(self, *xs: Tensor) -> Tensor:
        return self._forward(xs, "roundings")

    def transpose(self, A: Tensor) -> tuple[Tensor, ...]:
        rank = self.weights.group.rank
        results = tuple(A.new_empty(len(A), ends[rank + 1] - ends[rank]) for ends in self.before)
        for tile in self.weights._tiles(len(A)):
            whole = self.weights._gather(A[tile], self.ends).reshape(-1, *self.out_shape)
            for result, part, ends in zip(results, self.inner.transpose(whole), self.before, strict=True):
                result[tile] = part.flatten(1)[:, ends[rank] : ends[rank + 1]]
        return results

    def offset(self) -> Tensor | None:
        found = self.inner.offset()
        return None if found is None else found.flatten()[self.first : self.last]

    def _forward(self, xs: tuple[Tensor, ...], how: str) -> Tensor:
        result = xs[0].new_empty(len(xs[0]), self.last - self.first)
        for tile in self.weights._tiles(len(xs[0])):
            wholes = [
                self.weights._gather(x[tile], ends).reshape(-1, *shape)
                for x, ends, shape in zip(xs, self.before, self.in_shapes, strict=True)
            ]
            result[tile] = getattr(self.inner, how)(*wholes).flatten(1)[:, self.first : self.last]
        return result


class _Pooled(AffineMap):
    """A channelwise map on own channels, between flat tensors."""

    def __init__(self, inner: AtenMap, in_shape: tuple[int, ...]) -> None:
        self.inner, self.in_shape = inner, in_shape
        self.terms, self.readers, self.nonnegative = inner.terms, inner.readers, inner.nonnegative

    def linear(self, *xs: Tensor) -> Tensor:
        return self.inner.linear(self._shaped(xs[0])).flatten(1)

    def absolute(self, *xs: Tensor) -> Tensor:
        return self.inner.absolute(self._shaped(xs[0])).flatten(1)

    def roundings(self, *xs: Tensor) -> Tensor:
        return self.inner.roundings(self._shaped(xs[0])).flatten(1)

    def transpose(self, A: Tensor) -> tuple[Tensor, ...]:
        return (self.inner.transpose(A.reshape(-1, *self.inner.node.shape))[0].flatten(1),)

    def offset(self) -> Tensor | None:
        return None

    def _shaped(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), *self.in_shape)


def _cut(node: Node, key: str, how: How, ends: Ends, value: Tensor) -> tuple[int, Ends, Tensor]:
    """Along which axis a constant is cut, where, and the view of it that is cut."""
    if how in ("neurons", "channels"):
        is_weight = node.attrs["weight"] == Const(key)
        axis = 1 if is_weight and how == "channels" and node.attrs["transposed"] else 0
        return axis, weight_ends(node, ends), value
    return 0, ends, value.expand(node.shape).reshape(-1)


def _own_out_shape(node: Node, own: int) -> tuple[int, ...]:
    if node.op == "linear":
        return (*node.shape[:-1], own)
    return (node.shape[0], own // math.prod(node.shape[2:]), *node.shape[2:])
