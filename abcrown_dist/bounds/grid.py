"""How many rows a pass takes at once: settings, network and device decide, never ranks or free memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from abcrown_dist.bounds import chunks
from abcrown_dist.bounds.settings import AUTOMATIC, BoundSettings
from abcrown_dist.bounds.workspace import row_bytes
from abcrown_dist.graph.ir import Graph

_WORKSPACE = 512 << 20  # bytes beside the weights, when no budget is given
_ROWS_PER_GATHER = 1024  # fewer rows take less time than gathering the weights that they meet


@dataclass(frozen=True)
class Grid:
    """Chunks of the rows that start from the same nodes.

    Attributes:
        settings: what the user wants.
        graph, dtype, domains: what is bounded.
        on_cpu: chunks are then small enough for its caches, unless a budget is given.
        start: nodes from which rows start.
        optimise, one_hot: as for `workspace.row_bytes`.
    """

    settings: BoundSettings
    graph: Graph
    dtype: torch.dtype
    domains: int
    on_cpu: bool
    start: tuple[str, ...]
    optimise: bool
    one_hot: bool

    def rows(self, count: int) -> int:
        """Rows per chunk, all chunks equally large, when `count` rows are bounded."""
        if self.settings.fixed_rows is not None:
            return self.settings.fixed_rows
        return chunks.chunk_size(count, self._row_bytes(), self._workspace(), self._limit(count))

    def most_rows(self, count: int) -> int:
        """Largest chunk when `count` rows or fewer are bounded: fewer rows may make larger chunks."""
        if self.settings.fixed_rows is not None:
            return self.settings.fixed_rows
        return min(count, max(1, min(self._limit(count), self._workspace() // max(self._row_bytes(), 1))))

    def _row_bytes(self) -> int:
        return row_bytes(
            self.graph, self.start, self.dtype, self.domains, optimise=self.optimise, one_hot=self.one_hot
        )

    def _workspace(self) -> int:
        if self.settings.budget is None:
            return _WORKSPACE
        state = chunks.state_bytes(self.graph, self.dtype, self.domains)
        return self.settings.budget - chunks.affine_weight_bytes(self.graph, self.dtype) - state

    def _limit(self, count: int) -> int:
        limit = self.settings.batch_rows
        if limit < AUTOMATIC:
            return limit  # the user's own grid
        if self.settings.budget is None and self.on_cpu:
            fitting = chunks.rows_in_cache(self.graph, self.start, self.dtype, self.domains)
            limit = min(limit, max(fitting, _ROWS_PER_GATHER) if self.settings.gathered else fitting)
        if self.settings.shard_rows:
            limit = min(limit, chunks.rows_to_deal(count))
        return limit
