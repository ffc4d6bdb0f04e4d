"""What weights will need on a rank, by mode, told from a network's shapes alone.

Mirrors `local.py`, `fsdp.py` and `tensor_parallel.py` in sizes: what rests on a rank, what is whole
only during a visit, how many neurons are a rank's own, and which temporaries a tiled step makes. All
figures are those of the rank that has most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch

from abcrown_dist.graph.aten import classify
from abcrown_dist.graph.ir import Graph, Node
from abcrown_dist.parallel.group import padded_piece
from abcrown_dist.weights.layout import Ends, plan_layouts

Mode = Literal["none", "fsdp", "tp"]

# Tiles of full width alive at once in a tensor-parallel step: one, and its pieces cut out for the
# reduction.
_TILES_ALIVE = 2


@dataclass(frozen=True)
class Footprint:
    """Sizes on one rank; elements are numbers of the bounds' dtype unless said otherwise.

    Attributes:
        graph: the network; its constants need no values.
        size: how many ranks share the weights.
        rest: bytes of weights between visits.
        fetched: elements of a node's weights that are whole only while it is visited, by node name.
        own: neurons of a node that are a rank's own, by node name.
        tiles: in how many tiles an affine step moves rows of full width; 0 where none are needed.
        replicated: nodes that every rank computes as a whole, by name.
        prefetch: the next node's weights are fetched during a visit.
    """

    graph: Graph
    size: int
    rest: int
    fetched: dict[str, int]
    own: dict[str, int]
    tiles: int = 0
    replicated: tuple[str, ...] = ()
    prefetch: bool = False

    @property
    def cut(self) -> bool:
        """Whether ranks hold only their own neurons of every tensor."""
        return self.tiles > 0

    def per_row(self, node: Node) -> int:
        """Temporaries that a tiled step through `node` makes, in elements per row of the whole pass."""
        if not self.tiles or node.name not in self._moves:
            return 0
        widths = sum(self.graph[name].size for name in node.inputs)
        if node.name in self.replicated:
            widths += node.size
        return _TILES_ALIVE * math.ceil(widths / self.tiles)

    @property
    def _moves(self) -> set[str]:
        return {node.name for node in self.graph if node.op in ("linear", "conv")} | set(self.replicated)


def footprint(
    graph: Graph, mode: Mode, size: int = 1, dtype: torch.dtype = torch.float32, *, prefetch: bool = False
) -> Footprint:
    """Footprint of `graph` on each of `size` ranks.

    Args:
        mode: `none` and any size of 1 keep everything on every rank.
        prefetch: as `parallel.prefetch`, for fsdp.
    """
    if mode == "none" or size == 1:
        whole = {node.name: node.size for node in graph}
        rest = sum(_bytes(graph, key, dtype, count) for key, count in _counts(graph).items())
        return Footprint(graph, 1, rest, {}, whole)
    return _sharded(graph, size, dtype, prefetch) if mode == "fsdp" else _cut(graph, size, dtype)


def _sharded(graph: Graph, size: int, dtype: torch.dtype, prefetch: bool) -> Footprint:
    affine = _affine_keys(graph)
    counts = _counts(graph)
    rest = sum(
        _bytes(graph, key, dtype, padded_piece(count, size) if key in affine else count)
        for key, count in counts.items()
    )
    fetched = {node.name: _gathered(graph, node, size, dtype) for node in graph if classify(node) == "affine"}
    return Footprint(graph, size, rest, fetched, {node.name: node.size for node in graph}, prefetch=prefetch)


def _cut(graph: Graph, size: int, dtype: torch.dtype) -> Footprint:
    """Every affine node by its own outputs; those that are replicated, as under fsdp."""
    layouts = plan_layouts(graph, size)
    replicated = tuple(name for name, (how, _) in layouts.items() if how == "replicated")
    together = {key for name in replicated for key in graph[name].constants()}
    affine = _affine_keys(graph)
    rest = 0
    for key, count in _counts(graph).items():
        if key not in affine:
            rest += _bytes(graph, key, dtype, count)
        elif key in together:
            rest += _bytes(graph, key, dtype, padded_piece(count, size))
    for node in graph:
        how, ends = layouts[node.name]
        if how == "replicated" or classify(node) != "affine":
            continue
        # A rank's share of the outputs is its share of the weight; of a constant that is broadcast, too.
        for key in node.constants():
            count = graph.constants[key].numel()
            owner = count if how != "local" or count == 1 else node.size
            share = count if count == 1 else math.ceil(owner * _widest(ends) / max(node.size, 1))
            rest += _bytes(graph, key, dtype, share)
    fetched = {
        name: _gathered(graph, graph[name], size, dtype)
        for name in replicated
        if classify(graph[name]) == "affine"
    }
    own = {name: _widest(ends) for name, (_, ends) in layouts.items()}
    return Footprint(graph, size, rest, fetched, own, 4 * size, replicated)


def _affine_keys(graph: Graph) -> set[str]:
    return {key for node in graph if classify(node) == "affine" for key in node.constants()}


def _counts(graph: Graph) -> dict[str, int]:
    return {key: value.numel() for key, value in graph.constants.items()}


def _bytes(graph: Graph, key: str, dtype: torch.dtype, count: int) -> int:
    kind = graph.constants[key].dtype
    return count * (dtype if kind.is_floating_point else kind).itemsize


def _gathered(graph: Graph, node: Node, size: int, dtype: torch.dtype) -> int:
    """Elements of the whole constants of a node with their padding."""
    total = sum(
        _bytes(graph, key, dtype, size * padded_piece(graph.constants[key].numel(), size))
        for key in node.constants()
    )
    return math.ceil(total / dtype.itemsize)


def _widest(ends: Ends) -> int:
    return max(last - first for first, last in pairwise(ends))
