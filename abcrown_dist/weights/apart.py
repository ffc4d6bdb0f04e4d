"""Sharded weights for ranks that do different work at the same time.

Passes over different domains visit different nodes in a different order, as often as each of them needs.
A gather, though, takes every rank that holds a shard. So a visit begins with a small exchange in which
each rank names the node that it wants: what all want is gathered together, what some want is sent to
these, and a rank that has finished its own work serves the others until all have finished. Whatever
a rank does between two visits, by itself, cannot leave another one waiting in the wrong collective.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from abcrown_dist.graph.ir import Node
from abcrown_dist.parallel.group import ALONE, Pending, RankLost
from abcrown_dist.util.errors import describe
from abcrown_dist.weights.base import AllNeurons, Weights
from abcrown_dist.weights.fsdp import ShardedWeights, forget
from abcrown_dist.weights.maps import AffineMap, build_map

_NOTHING = -1  # wanted by a rank that has finished, or does not know what comes next


def apart(weights: Weights) -> Weights:
    """The same weights for ranks that work on different domains; `finish` ends each stretch of such work."""
    if isinstance(weights, ShardedWeights) and weights.group.size > 1:
        return ApartWeights(weights)
    return weights


def finish(weights: Weights) -> None:
    """Wait for, and serve, the ranks that share the weights and are not done yet."""
    if isinstance(weights, ApartWeights):
        weights.finish()


@dataclass
class _Fetched:
    """A node's constants in flat buffers, on their way or here."""

    number: int
    buffers: dict[str, Tensor]
    pending: list[Pending]

    def wait(self) -> None:
        for work in self.pending:
            work.wait()
        self.pending = []


class ApartWeights(AllNeurons):
    """Shards of a group, visited by each rank at its own pace.

    The group seems to be of one rank: votes, chunks and iterations are a rank's own business.

    Args:
        shared: the shards, which stay where they are.
    """

    transient = True
    group = ALONE

    def __init__(self, shared: ShardedWeights) -> None:
        self.graph, self.device, self.dtype = shared.graph, shared.device, shared.dtype
        self.rounding = shared.rounding
        self._shared = shared
        self._meeting = _Meeting(shared)
        self._queue: list[str] = []

    def constant(self, key: str) -> Tensor:
        """A constant of a node that is not affine."""
        return self._shared.constant(key)

    def to(self, dtype: torch.dtype) -> ApartWeights | None:
        """The same shards in another dtype; None where they hold fewer digits than the model does."""
        if dtype == self.dtype:
            return self
        shared = self._shared.to(dtype)
        if shared is None:
            return None
        other = copy.copy(self)
        other.dtype, other._shared, other._queue = dtype, shared, []
        return other  # it meets the others where this one does

    @contextmanager
    def visit(self, node: Node) -> Iterator[AffineMap]:
        """The map of `node`, its weights fetched for the duration of the block."""
        if not self._meeting.knows(node.name):
            yield build_map(self.graph, node, self.constant, self.dtype, self.device)
            return
        if node.name in self._queue:
            self._queue = self._queue[self._queue.index(node.name) + 1 :]
        following = self._queue[0] if self._queue and self._shared.prefetch else None
        values = self._meeting.fetch(node.name, following, self.dtype)
        affine = build_map(self.graph, node, values.__getitem__, self.dtype, self.device)
        try:
            yield affine
        finally:
            values.clear()
            forget(affine)

    def expect(self, names: Sequence[str]) -> None:
        """The nodes that will be visited next, in this order."""
        self._queue = [name for name in names if self._meeting.knows(name)]

    def finish(self) -> None:
        """Serve the others until every rank has called this."""
        self._queue = []
        self._meeting.finish()


class _Meeting:
    """Where the ranks of a group say what they want, and get it."""

    def __init__(self, shared: ShardedWeights) -> None:
        self._base, self._group = shared, shared.group
        keys = shared.shards.keys()
        self._names = [n.name for n in shared.graph if n.constants() and keys >= set(n.constants())]
        self._number = {name: number for number, name in enumerate(self._names)}
        self._early: _Fetched | None = None

    def knows(self, name: str) -> bool:
        """Whether a node has sharded constants."""
        return name in self._number

    def fetch(self, name: str, following: str | None, dtype: torch.dtype) -> dict[str, Tensor]:
        """The constants of a node, whole. What will be wanted next is fetched early, if all agree."""
        number = self._code(name, dtype)
        early, self._early = self._early, None
        if early is not None and early.number != number:
            early.wait()
            early = None
        # Memory that is missing must be missed before the others count on this rank.
        current = early or self._empty(number)
        ahead = None if following is None else self._empty(self._code(following, dtype))
        self._serve(number, early is not None, current, ahead)
        return {key: self._base.shards[key].whole(buffer) for key, buffer in current.buffers.items()}

    def finish(self) -> None:
        """Serve until nobody wants anything."""
        if self._early is not None:
            self._early.wait()
            self._early = None
        while self._serve(_NOTHING, False, None, None):
            pass

    def _serve(self, number: int, here: bool, current: _Fetched | None, ahead: _Fetched | None) -> bool:
        """One exchange, and all gathers that follow from it. False when nobody wanted anything."""
        follows = _NOTHING if ahead is None else ahead.number
        own = torch.tensor([number, int(here), follows])
        asked = self._group.gather_all(own).tolist()
        try:
            self._fulfil(asked, current, ahead)
        except Exception as error:
            # The others count on this rank now. Whatever it is, memory too, it ends them all.
            raise RankLost(f"rank {self._group.rank}: gathering weights failed: {describe(error)}") from error
        return any(wanted != _NOTHING for wanted, _, _ in asked)

    def _fulfil(self, asked: list[list[int]], current: _Fetched | None, ahead: _Fetched | None) -> None:
        """Send and gather what the ranks have asked for, and wait for what this one needs now."""
        wanting: dict[int, list[int]] = {}
        for rank, (wanted, has_it, _) in enumerate(asked):
            if wanted != _NOTHING and not has_it:
                wanting.setdefault(wanted, []).append(rank)
        for wanted, ranks in sorted(wanting.items()):
            mine = current if self._group.rank in ranks else None
            if len(ranks) == self._group.size:
                assert mine is not None
                self._gather(mine)
            else:
                self._send(wanted, ranks, mine)
        if ahead is not None and all(next_one == ahead.number for _, _, next_one in asked):
            self._gather(ahead)
            self._early = ahead
        if current is not None:
            current.wait()

    def _gather(self, into: _Fetched) -> None:
        """All ranks want the same: start the gather that they would have used in step."""
        for key, buffer in into.buffers.items():
            into.pending.append(self._base.shards[key].to(buffer.dtype).gather(self._group, buffer))

    def _send(self, number: int, ranks: list[int], into: _Fetched | None) -> None:
        """Every rank sends its pieces of a node to the `ranks` that want it."""
        me, group = self._group.rank, self._group
        name, dtype = self._decode(number)
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        for key in self._base.graph[name].constants():
            piece = self._base.shards[key].to(dtype).piece
            sends += [(rank, piece) for rank in ranks if rank != me]
            if into is not None:
                parts = into.buffers[key].view(group.size, -1) if piece.numel() else [piece] * group.size
                parts[me].copy_(piece)
                receives += [(rank, parts[rank]) for rank in range(group.size) if rank != me]
        group.exchange(sends, receives)

    def _empty(self, number: int) -> _Fetched:
        name, dtype = self._decode(number)
        keys, shards = self._base.graph[name].constants(), self._base.shards
        return _Fetched(number, {key: shards[key].empty(self._group.size, dtype) for key in keys}, [])

    def _code(self, name: str, dtype: torch.dtype) -> int:
        """A number for a node's constants in a dtype: the shards' own, or float64."""
        return self._number[name] + len(self._names) * int(dtype != self._base.dtype)

    def _decode(self, number: int) -> tuple[str, torch.dtype]:
        wider, index = divmod(number, len(self._names))
        return self._names[index], torch.float64 if wider else self._base.dtype
