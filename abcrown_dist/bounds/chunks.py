"""Row chunks: a pass over R rows in pieces whose workspace fits a budget.

The grid depends on R and the chunk size alone, never on ranks or free memory, and every chunk has
the same shape (the last one repeats rows to fill up), because the last bits of a row depend on the
shape it is computed in and on nothing else (design section 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from abcrown_dist.bounds.types import ancestors
from abcrown_dist.graph.aten import classify
from abcrown_dist.graph.ir import Graph

# Numbers per relaxed neuron: three of its pre-activation's interval, up to six of its lines, two
# sensitivities, and the temporaries of an interval step.
_PER_NEURON = 20


def rows_in_cache(graph: Graph, start: Sequence[str], dtype: torch.dtype, domains: int) -> int:
    """Rows for which the widest coefficient matrix stays near 4 MiB, but at least 256.

    Elementwise steps then find it in a core's cache: on ResNets this halves the time of a pass
    (benchmarks/bounds.py --rows); below 256 rows products lose more than that gains.
    """
    widest = max(graph[name].size for name in ancestors(graph, tuple(start)))
    return max(256, (4 << 20) // (widest * domains * dtype.itemsize))


def rows_to_deal(count: int) -> int:
    """Most rows of a chunk when `count` rows are dealt out over ranks: four chunks or more, if large."""
    return max(256, min(1024, -(-count // 4)), -(-count // 8))


def chunk_size(rows: int, per_row: int, budget: int, limit: int) -> int:
    """Rows per chunk, all chunks equally large, for `rows` in all.

    Args:
        per_row: bytes of workspace per row (`workspace.row_bytes`).
        budget: bytes that the workspace may take.
        limit: largest number of rows wanted (`solver.crown.batch_size`).
    """
    most = max(1, min(limit, budget // max(per_row, 1)))
    return math.ceil(rows / math.ceil(rows / most)) if rows else 0


def chunks(index: Tensor, size: int) -> Iterator[tuple[Tensor, int]]:
    """Cut `index` into pieces of `size`; yields (piece, how many of it count)."""
    for piece in index.split(size) if len(index) else ():
        count = len(piece)
        if count < size:
            piece = torch.cat([piece, piece[-1:].expand(size - count)])
        yield piece, count


def affine_weight_bytes(graph: Graph, dtype: torch.dtype) -> int:
    """Bytes of all constants that affine nodes read, once each, in `dtype`."""
    keys = {key for node in graph if classify(node) == "affine" for key in node.constants()}
    return sum(graph.constants[key].numel() * dtype.itemsize for key in keys)


def state_bytes(graph: Graph, dtype: torch.dtype, domains: int, own: Mapping[str, int] | None = None) -> int:
    """Bytes that are alive beside rows and weights: intervals, lines and sensitivities of all nodes.

    Args:
        own: neurons that a rank holds, by node name; default all.
    """
    sizes = {node.name: node.size for node in graph} if own is None else own
    kept = sum(sizes[node.name] for node in graph if classify(node) != "affine")
    return (_PER_NEURON * kept + sum(sizes.values())) * domains * dtype.itemsize
