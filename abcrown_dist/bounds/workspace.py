"""How many bytes one row of a pass needs: a rehearsal of the pass with sizes in place of tensors.

Follows `backward.py`, `rules.py` and `alpha.py` step by step: which coefficients are alive, which
temporaries a step makes, and from where on rows differ from domain to domain. Where memory order may
force a copy, the copy is counted. Tests hold the result between once and twice what is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from abcrown_dist.bounds.types import ancestors
from abcrown_dist.graph.aten import RESHAPE, classify
from abcrown_dist.graph.ir import Graph, Node
from abcrown_dist.relax import REGISTRY
from abcrown_dist.weights.maps import is_plain_sum

_VECTORS = 16  # numbers per row and domain in bounds, errors, biases and indices
_INDEX_BYTES = 25  # per weight entry, to place a convolution's rows: two int64, two values, a mask


def row_bytes(
    graph: Graph, start: Sequence[str], dtype: torch.dtype, domains: int, *, optimise: bool, one_hot: bool
) -> int:
    """Bytes per row at the worst moment of a pass over rows from the nodes `start`.

    Args:
        optimise: alpha-CROWN, with its slopes, moments and gradients; else plain CROWN.
        one_hot: rows are signed identity rows of a single node; else they are written out.
    """
    rehearsal = _Rehearsal(graph, start, domains, optimise)
    rehearsal.walk_back(one_hot)
    if optimise:
        rehearsal.sweep()
    return (rehearsal.peak + _VECTORS * domains) * dtype.itemsize


class _Rehearsal:
    """Live numbers per row, and their peak, while a pass goes through its motions."""

    def __init__(self, graph: Graph, start: Sequence[str], domains: int, optimise: bool) -> None:
        self.graph, self.start, self.domains, self.optimise = graph, start, domains, optimise
        self.needed = ancestors(graph, tuple(start))
        movable = [node for node in graph if node.name in self.needed and node.op in REGISTRY]
        slopes = sum(node.size for node in movable) * domains
        # Slopes and their two moments, if they are optimised.
        self.live = 3 * slopes if optimise else 0
        self.peak = self.live
        self.pending: dict[str, _Rows | None] = {}  # None: identity rows, not written out
        self.inputs: list[_Rows] = []
        self.tape: dict[str, _Rows] = {}

    def use(self, temporaries: int) -> None:
        """Note what is alive when a step has made `temporaries`."""
        self.peak = max(self.peak, self.live + temporaries)

    def make(self, size: int, copies: int) -> _Rows:
        """New coefficients of `size` neurons for 1 or all domains."""
        rows = _Rows(size * copies, copies)
        self.live += rows.size
        self.use(0)
        return rows

    def drop(self, rows: _Rows) -> None:
        rows.holders -= 1
        if rows.holders == 0:
            self.live -= rows.size

    def walk_back(self, one_hot: bool) -> None:
        """Coefficients from the start to the inputs, and the minimum there."""
        for name in self.start:
            self.pending[name] = None if one_hot else self._given(name)
        for node in reversed(self.graph.nodes):
            if node.name in self.pending:
                self._pass(node, self.pending.pop(node.name))
        widest = max((rows.size for rows in self.inputs), default=0)
        self.use(2 * widest)  # |A|, and A in contiguous order

    def sweep(self) -> None:
        """Minimisers forward through the chosen lines, as far as slopes want them; gradients."""
        last = ancestors(self.graph, tuple(self.tape))
        readers = {name: sum(reader in last for reader in self.graph.readers(name)) for name in last}
        values: dict[str, int] = {}
        for name in self.graph.inputs:
            if name in last:
                size = self.graph[name].size * self.domains
                self.use(3 * size)  # sign, product and point
                readers[name] += 1  # the dictionary of points
                values[name] = size
                self.live += size
        for rows in self.inputs:
            self.drop(rows)
        for node in self.graph:
            if node.name not in last or node.op == "input":
                continue
            size = node.size * self.domains
            if node.name in self.tape:
                self.live += size  # the gradient
                self.use(self.tape[node.name].size if self.domains > 1 else 0)
            if readers[node.name]:
                operands = sum(self.graph[name].size for name in dict.fromkeys(node.inputs)) * self.domains
                # Chosen slope, value and intercept with a mask; or an operand in contiguous order.
                self.use(size * 9 // 4 if node.op in REGISTRY else size + self._copied(node, operands))
                values[node.name] = size
                self.live += size
            for name in dict.fromkeys(node.inputs):
                readers[name] -= 1
                if readers[name] == 0:
                    self.live -= values.pop(name)

    def _given(self, name: str) -> _Rows:
        rows = self.make(self.graph[name].size, self.domains)
        rows.holders += 1  # the caller
        return rows

    def _written_out(self, name: str, rows: _Rows | None) -> _Rows:
        return self.make(self.graph[name].size, 1) if rows is None else rows

    def _pass(self, node: Node, rows: _Rows | None) -> None:
        if node.op == "input":
            self.inputs.append(self._written_out(node.name, rows))
        elif classify(node) != "affine":
            self._pass_nonlinear(node, self._written_out(node.name, rows))
        elif rows is None and self._keeps_identity(node):
            for name in node.inputs:
                self._add(name, None)
        elif rows is None and (node.op == "linear" or (node.op == "conv" and not node.attrs["transposed"])):
            self._add(node.inputs[0], self._first_rows(node))
        else:
            if rows is not None:
                self.use(2 * rows.size)  # squares for the error, and rows in contiguous order
            self._pass_affine(node, self._written_out(node.name, rows))

    def _pass_affine(self, node: Node, rows: _Rows) -> None:
        if self._keeps_identity(node):
            for name in node.inputs:
                rows.holders += 1
                self._add(name, rows)
        else:
            parts = [self.make(self.graph[name].size, rows.copies) for name in node.inputs]
            self.use(self._copied(node, rows.size + sum(part.size for part in parts)))
            for name, part in zip(node.inputs, parts, strict=True):
                self._add(name, part)
        self.drop(rows)

    def _pass_nonlinear(self, node: Node, rows: _Rows) -> None:
        result = _Rows(node.size * self.domains, self.domains)
        shared = rows.size if rows.copies < self.domains else 0
        self.use(2 * result.size + shared)  # negative part and result, or the negative part twice
        self.live += result.size
        if self.optimise:
            self.tape[node.name] = rows
        else:
            self.drop(rows)
        self._add(node.inputs[0], result)

    def _add(self, name: str, rows: _Rows | None) -> None:
        if name not in self.pending:
            self.pending[name] = rows
            return
        first, second = self._written_out(name, self.pending.pop(name)), self._written_out(name, rows)
        self.pending[name] = self.make(self.graph[name].size, max(first.copies, second.copies))
        self.drop(first)
        self.drop(second)

    def _keeps_identity(self, node: Node) -> bool:
        return node.op in RESHAPE or is_plain_sum(self.graph, node)

    def _first_rows(self, node: Node) -> _Rows:
        """Rows of a weight, taken instead of multiplying an identity."""
        size = self.graph[node.inputs[0]].size
        if node.op == "conv":
            weight = self.graph.constants[node.attrs["weight"].key]
            self.use(size + weight[0].numel() * _INDEX_BYTES // 4)
        self.use(2 * size)
        return self.make(size, 1)

    def _copied(self, node: Node, size: int) -> int:
        """Further temporaries of an affine step that moves `size` numbers."""
        if self._keeps_identity(node):
            return 0
        return math.ceil(size / 2) if node.op in ("linear", "conv") else size


class _Rows:
    """Coefficients per row of one node, for one or all domains, and how many places hold them."""

    def __init__(self, size: int, copies: int) -> None:
        self.size, self.copies, self.holders = size, copies, 1
