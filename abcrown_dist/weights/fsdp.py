"""Fully sharded weights: every constant cut over the ranks, whole only while its node is visited.

Zhao et al., "PyTorch FSDP", VLDB 2023, carried over to bound propagation: as no pass keeps a weight
(gradients are taken in closed form), at most one node's weights are whole at any time, two with
prefetch. Each constant is a flat buffer of ceil(n / P) elements a rank; only the tail is padding, so
that any shape shards and no layer is left out. The gathered values are the very bits of the
unsharded ones, and so are all bounds.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from abcrown_dist.graph.aten import classify
from abcrown_dist.graph.ir import Graph, Node
from abcrown_dist.parallel.group import Group, Pending, padded_piece
from abcrown_dist.util.numerics import REAL_ARITHMETIC, Rounding
from abcrown_dist.weights.base import AllNeurons
from abcrown_dist.weights.maps import AffineMap, build_map


@dataclass(frozen=True)
class Shard:
    """This rank's piece of a constant of a shape; every rank's is as long, padding included."""

    piece: Tensor
    shape: tuple[int, ...]

    def to(self, dtype: torch.dtype) -> Shard:
        """The same piece in another dtype; whole numbers keep theirs."""
        return Shard(_cast(self.piece, dtype), self.shape)

    def empty(self, ranks: int, dtype: torch.dtype) -> Tensor:
        """A buffer for the pieces of all ranks."""
        kind = dtype if self.piece.is_floating_point() else self.piece.dtype
        return torch.empty(self.piece.numel() * ranks, dtype=kind, device=self.piece.device)

    def gather(self, group: Group, buffer: Tensor) -> Pending:
        """Fill a buffer with the pieces of all ranks."""
        size = self.piece.numel()
        return group.gather(self.piece, buffer, [size * r for r in range(group.size + 1)])

    def whole(self, buffer: Tensor) -> Tensor:
        """The constant in a filled buffer, without the padding."""
        return buffer[: math.prod(self.shape)].view(self.shape)


@dataclass
class _Gathered:
    """Constants of one node, whole or on their way."""

    values: dict[str, Tensor]
    pending: list[Pending]

    def ready(self) -> Mapping[str, Tensor]:
        for work in self.pending:
            work.wait()
        self.pending = []
        return self.values


class ShardedWeights(AllNeurons):
    """Constants of affine nodes in shards; others (small, of nonlinear nodes) on every rank.

    Args:
        graph: the first rank's with its constants' values; `without_values` of it on the others.
        group: the ranks that share the weights.
        dtype, device: of the shards.
        shard_rows: ranks bound different chunks of rows, see `own_chunks`.
        only: keys of the constants to take, of affine nodes; default all. Constants of other nodes
            are always taken.
        prefetch: start gathering the next node's weights while one is visited.
        rounding: see `weights.base.Weights`; default for real arithmetic.
    """

    transient = True

    def __init__(
        self,
        graph: Graph,
        group: Group,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        prefetch: bool = True,
        shard_rows: bool = False,
        only: Collection[str] | None = None,
        rounding: Rounding = REAL_ARITHMETIC,
    ) -> None:
        self.rounding = rounding
        self.group, self.dtype, self.device, self.prefetch = group, dtype, torch.device(device), prefetch
        self.shard_rows = shard_rows
        self.shards: dict[str, Shard] = {}
        self._whole: dict[str, Tensor] = {}
        sharded = {key for node in graph if classify(node) == "affine" for key in node.constants()}
        for key, value in graph.constants.items():
            kind = dtype if value.is_floating_point() else value.dtype
            mine = value if group.rank == 0 else None
            if key in sharded and only is not None and key not in only:
                continue
            self._distribute(key, mine, tuple(value.shape), kind, key in sharded)
        self.graph = without_values(graph)
        self._rounded = rounds(graph, dtype)
        self._queue: list[str] = []
        self._early: tuple[str, _Gathered] | None = None

    def to(self, dtype: torch.dtype) -> ShardedWeights | None:
        """The same shards in another dtype; None where shards hold fewer digits than the model does."""
        if self._rounded:
            return None
        other = copy.copy(self)
        other.dtype, other._queue, other._early = dtype, [], None
        other.shards = {
            key: shard.to(dtype) for key, shard in self.shards.items()
        }
        other._whole = {key: _cast(value, dtype) for key, value in self._whole.items()}
        return other

    def own_chunks(self, count: int) -> list[tuple[int, bool]]:
        """Chunks dealt out in turn, if rows are sharded.

        All ranks take equally many, because they gather together: whoever has none left repeats the
        last one, for nothing.
        """
        if not self.shard_rows:
            return super().own_chunks(count)
        rank, size = self.group.rank, self.group.size
        turns = [turn * size + rank for turn in range(-(-count // size))]
        return [(min(number, count - 1), number < count) for number in turns]

    def merge_rows(self, own: Tensor) -> Tensor:
        """Zeros elsewhere: adding them up changes no bit."""
        return self.group.total(own) if self.shard_rows else own

    def constant(self, key: str) -> Tensor:
        """A constant of a node that is not affine."""
        return self._whole[key]

    @contextmanager
    def visit(self, node: Node) -> Iterator[AffineMap]:
        """The map of `node`, its weights gathered for the duration of the block."""
        gathered = self._take_early(node) or self._gather(node)
        values = gathered.ready()
        self._fetch_next(node)
        affine = build_map(self.graph, node, values.__getitem__, self.dtype, self.device)
        try:
            yield affine
        finally:
            gathered.values.clear()
            forget(affine)

    def expect(self, names: Sequence[str]) -> None:
        """The nodes that will be visited next, in this order; what was fetched for others is dropped."""
        self._queue = [name for name in names if self.graph[name].constants()]

    def _distribute(
        self, key: str, value: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, sharded: bool
    ) -> None:
        if not sharded:
            like = torch.empty(shape, dtype=dtype, device=self.device)
            self._whole[key] = self.group.send_from_first(value, like)
            return
        count = math.prod(shape)
        size = padded_piece(count, self.group.size)
        pieces = None
        if self.group.rank == 0:
            assert value is not None
            flat = torch.zeros(size * self.group.size, dtype=dtype, device=self.device)
            flat[:count] = value.to(self.device, dtype).flatten()
            pieces = flat.split(size) if size else [flat] * self.group.size
        own = torch.empty(size, dtype=dtype, device=self.device)
        self.shards[key] = Shard(self.group.scatter_from_first(pieces, own), shape)

    def _gather(self, node: Node) -> _Gathered:
        values, pending = {}, []
        for key in node.constants():
            shard = self.shards[key]
            buffer = shard.empty(self.group.size, self.dtype)
            pending.append(shard.gather(self.group, buffer))
            values[key] = shard.whole(buffer)
        return _Gathered(values, pending)

    def _take_early(self, node: Node) -> _Gathered | None:
        """What was fetched ahead for `node`; anything else that was fetched is waited for and dropped."""
        early, self._early = self._early, None
        if early is None:
            return None
        name, gathered = early
        if name == node.name:
            return gathered
        gathered.ready()
        return None

    def _fetch_next(self, node: Node) -> None:
        if node.name in self._queue:
            self._queue = self._queue[self._queue.index(node.name) + 1 :]
        if self.prefetch and self._queue and self.group.size > 1:
            self._early = (self._queue[0], self._gather(self.graph[self._queue[0]]))


def forget(affine: AffineMap) -> None:
    """Drop the map's references, in case somebody keeps the map itself."""
    for name in list(vars(affine)):
        if isinstance(getattr(affine, name), (Tensor, Mapping)):
            setattr(affine, name, None)


def rounds(graph: Graph, dtype: torch.dtype) -> bool:
    """Whether some constant of the model has more digits than `dtype` holds."""
    floats = [value.dtype for value in graph.constants.values() if value.is_floating_point()]
    return any(torch.finfo(kind).eps < torch.finfo(dtype).eps for kind in floats)


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def without_values(graph: Graph) -> Graph:
    """The same nodes, and constants that have shapes but no values (on the meta device)."""
    shapes = {
        key: torch.empty(value.shape, dtype=value.dtype, device="meta")
        for key, value in graph.constants.items()
    }
    return replace(graph, constants=shapes)
