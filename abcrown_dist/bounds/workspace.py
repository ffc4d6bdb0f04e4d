"""How many bytes a pass over rows needs: a rehearsal of the pass with sizes in place of tensors.

Follows `backward.py`, `rules.py` and `alpha.py` step by step: which coefficients are alive, which
temporaries a step makes, which weights are gathered meanwhile, and from where on rows differ from
domain to domain. Where memory order may force a copy, the copy is counted. Tests hold the bytes of a
row between once and twice what is measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from abcrown_dist.bounds.types import ancestors
from abcrown_dist.graph.aten import RESHAPE, classify
from abcrown_dist.graph.ir import Graph, Node
from abcrown_dist.relax import REGISTRY
from abcrown_dist.weights.footprint import Footprint, footprint
from abcrown_dist.weights.maps import is_plain_sum

VECTORS = 29  # numbers per row and domain in bounds, errors, biases and indices, many in float64
_INDEX_BYTES = 25  # per weight entry, to place a convolution's rows: two int64, two values, a mask


def row_bytes(
    graph: Graph, start: Sequence[str], dtype: torch.dtype, domains: int, *, optimise: bool, one_hot: bool
) -> int:
    """Bytes per row at the worst moment of a pass over rows from the nodes `start`.

    Args:
        optimise: alpha-CROWN, with its slopes, moments and gradients; else plain CROWN.
        one_hot: rows are signed identity rows of a single node; else they are written out.
    """
    rehearsal = _Rehearsal(footprint(graph, "none"), start, domains, optimise, rows=1)
    rehearsal.run(one_hot)
    return (rehearsal.peak + VECTORS * domains) * dtype.itemsize


@dataclass(frozen=True)
class Workspace:
    """Bytes beside the weights at rest: at the worst moment, and what each kind takes at its own worst.

    Attributes:
        peak: all together.
        gathers: weights that are whole for a visit, with what is fetched ahead.
        coefficients: coefficient matrices and their temporaries.
        alpha: optimised slopes with their moments and gradients.
    """

    peak: int
    gathers: int
    coefficients: int
    alpha: int


def workspace(
    placed: Footprint,
    start: Sequence[str],
    dtype: torch.dtype,
    domains: int,
    rows: int,
    *,
    optimise: bool,
    one_hot: bool,
) -> Workspace:
    """What a pass over `rows` rows at once needs on one rank; arguments as of `row_bytes`."""
    rehearsal = _Rehearsal(placed, start, domains, optimise, rows)
    rehearsal.run(one_hot)
    width, vectors = dtype.itemsize, VECTORS * domains * rows
    return Workspace(
        peak=(rehearsal.peak + vectors) * width,
        gathers=rehearsal.most_fetched * width,
        coefficients=rehearsal.most_rows * rows * width,
        alpha=(rehearsal.slopes + rehearsal.gradients) * rows * width,
    )


class _Rehearsal:
    """Live numbers, and their peak, while a pass goes through its motions.

    Sizes are per row; `fetched` alone counts weights, which serve all rows.
    """

    def __init__(
        self, placed: Footprint, start: Sequence[str], domains: int, optimise: bool, rows: int
    ) -> None:
        self.placed, self.graph, self.own = placed, placed.graph, placed.own
        self.start, self.domains, self.optimise, self.rows = start, domains, optimise, rows
        self.needed = ancestors(self.graph, tuple(start))
        movable = [node for node in self.graph if node.name in self.needed and node.op in REGISTRY]
        # Slopes and their two moments, if they are optimised.
        self.slopes = 3 * sum(self.own[node.name] for node in movable) * domains if optimise else 0
        self.gradients = 0
        self.live = self.most_rows = 0
        self.fetched = self.most_fetched = 0
        self.peak = self.slopes * rows
        self.pending: dict[str, _Rows | None] = {}  # None: identity rows, not written out
        self.inputs: list[_Rows] = []
        self.tape: dict[str, _Rows] = {}

    def run(self, one_hot: bool) -> None:
        """The whole pass, its gradient included if slopes are optimised."""
        self.walk_back(one_hot)
        if self.optimise:
            self.sweep()

    def use(self, temporaries: int) -> None:
        """Note what is alive when a step has made `temporaries`."""
        alive = self.live + temporaries
        self.most_rows = max(self.most_rows, alive)
        self.most_fetched = max(self.most_fetched, self.fetched)
        self.peak = max(self.peak, (alive + self.slopes + self.gradients) * self.rows + self.fetched)

    def visits(self, order: Sequence[Node]) -> Iterator[Node]:
        """Go through nodes in order, each with its weights fetched, and the next one's if so placed."""
        queue = [node.name for node in order if self.placed.fetched.get(node.name)]
        early = 0
        for node in order:
            here = self.placed.fetched.get(node.name, 0)
            if here:
                queue.pop(0)
                early = self.placed.fetched[queue[0]] if queue and self.placed.prefetch else 0
            self.fetched = here + early
            self.use(0)
            yield node
        self.fetched = 0

    def make(self, size: int, copies: int, ordered: bool = True) -> _Rows:
        """New coefficients of `size` neurons for 1 or all domains."""
        rows = _Rows(size * copies, copies, ordered)
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
        order = [node for node in reversed(self.graph.nodes) if node.name in self.needed]
        for node in self.visits(order):
            self._pass(node, self.pending.pop(node.name))
        # |A|, and A in contiguous order.
        self.use(max((rows.size if rows.ordered else 2 * rows.size for rows in self.inputs), default=0))

    def sweep(self) -> None:
        """Minimisers forward through the chosen lines, as far as slopes want them; gradients."""
        last = ancestors(self.graph, tuple(self.tape))
        readers = {name: sum(reader in last for reader in self.graph.readers(name)) for name in last}
        values: dict[str, _Rows] = {}
        for name in self.graph.inputs:
            if name in last:
                self.use(2 * self.own[name] * self.domains)  # sign and product, then product and point
                readers[name] += 1  # the dictionary of points
                values[name] = self.make(self.own[name], self.domains)
        for rows in self.inputs:
            self.drop(rows)
        for node in self.visits([node for node in self.graph if node.name in last]):
            if node.op != "input":
                self._sweep(node, values, bool(readers[node.name]))
            for name in dict.fromkeys(node.inputs):
                readers[name] -= 1
                if readers[name] == 0:
                    self.drop(values.pop(name))

    def _sweep(self, node: Node, values: dict[str, _Rows], is_read: bool) -> None:
        """Gradient of a node's slopes, and its value if another node reads it."""
        size = self.own[node.name] * self.domains
        if node.name in self.tape:
            self.gradients += size
            self.use(self.tape[node.name].size if self.domains > 1 else 0)
        if not is_read:
            return
        operands = [values[name] for name in dict.fromkeys(node.inputs)]
        ordered = all(rows.ordered for rows in operands)
        if node.op in RESHAPE and ordered:  # a view
            operands[0].holders += 1
            values[node.name] = operands[0]
            return
        if node.op in REGISTRY:
            self.use(size * 9 // 4)  # chosen slope, value and intercept with a mask
        else:
            copied = self._copied(node, sum(rows.size for rows in operands), ordered)
            self.use(size + copied + self.placed.per_row(node) * self.domains)
        values[node.name] = self.make(self.own[node.name], self.domains, ordered and self._orders(node))

    def _given(self, name: str) -> _Rows:
        rows = self.make(self.own[name], self.domains)
        rows.holders += 1  # the caller
        return rows

    def _written_out(self, name: str, rows: _Rows | None) -> _Rows:
        return self.make(self.own[name], 1) if rows is None else rows

    def _pass(self, node: Node, rows: _Rows | None) -> None:
        if node.op == "input":
            self.inputs.append(self._written_out(node.name, rows))
        elif classify(node) != "affine":
            self._pass_nonlinear(node, self._written_out(node.name, rows))
        elif rows is None and self._keeps_identity(node):
            for name in node.inputs:
                self._add(name, None)
        elif rows is None and self._gives_rows(node):
            self._add(node.inputs[0], self._first_rows(node))
        else:
            if rows is not None:
                # Squares for the error, and rows in contiguous order.
                self.use(rows.size if rows.ordered else 2 * rows.size)
            self._pass_affine(node, self._written_out(node.name, rows))

    def _pass_affine(self, node: Node, rows: _Rows) -> None:
        if self._keeps_identity(node):
            for name in node.inputs:
                rows.holders += 1
                self._add(name, rows)
        else:
            ordered = rows.ordered and self._orders(node)
            parts = [self.make(self.own[name], rows.copies, ordered) for name in node.inputs]
            moved = rows.size + sum(part.size for part in parts)
            self.use(self._copied(node, moved, rows.ordered) + self.placed.per_row(node) * rows.copies)
            for name, part in zip(node.inputs, parts, strict=True):
                self._add(name, part)
        self.drop(rows)

    def _pass_nonlinear(self, node: Node, rows: _Rows) -> None:
        result = _Rows(self.own[node.name] * self.domains, self.domains, rows.ordered)
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
        copies, ordered = max(first.copies, second.copies), first.ordered and second.ordered
        self.pending[name] = self.make(self.own[name], copies, ordered)
        self.drop(first)
        self.drop(second)

    def _gives_rows(self, node: Node) -> bool:
        """Whether identity rows become rows of the weight; where neurons are cut they are written out."""
        if self.placed.cut:
            return False
        return node.op == "linear" or (node.op == "conv" and not node.attrs["transposed"])

    def _keeps_identity(self, node: Node) -> bool:
        return node.op in RESHAPE or is_plain_sum(self.graph, node)

    def _orders(self, node: Node) -> bool:
        """Whether a step through `node` leaves ordered numbers in C order for certain."""
        return node.op in ("linear", "conv", *REGISTRY) or self._keeps_identity(node)

    def _first_rows(self, node: Node) -> _Rows:
        """Rows of a weight, taken instead of multiplying an identity."""
        size = self.graph[node.inputs[0]].size
        if node.op == "conv":
            weight = self.graph.constants[node.attrs["weight"].key]
            self.use(size + weight[0].numel() * _INDEX_BYTES // 4)
        self.use(2 * size)
        return self.make(size, 1)

    def _copied(self, node: Node, size: int, ordered: bool) -> int:
        """Further temporaries of an affine step that moves `size` numbers."""
        if self._keeps_identity(node) or (node.op in ("linear", "conv") and ordered):
            return 0
        return math.ceil(size / 2) if node.op in ("linear", "conv") else size


class _Rows:
    """Coefficients per row of one node, for one or all domains, and how many places hold them.

    `ordered` says that they certainly lie in C order.
    """

    def __init__(self, size: int, copies: int, ordered: bool) -> None:
        self.size, self.copies, self.ordered, self.holders = size, copies, ordered, 1
