"""Values that passes exchange."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from abcrown_dist.graph.ir import Graph, Node
from abcrown_dist.relax import REGISTRY, Lines, Relaxation


@dataclass(frozen=True)
class Interval:
    """Elementwise bounds (B, *shape) of one node, moved outward by their own rounding error."""

    lower: Tensor
    upper: Tensor

    @property
    def magnitude(self) -> Tensor:
        """Largest absolute value in the interval."""
        return torch.maximum(self.lower.abs(), self.upper.abs())


@dataclass(frozen=True)
class OneHot:
    """R identity rows, not yet written out: row i is sign[i] e_index[i] over a node's own flat neurons.

    Sign 0 and index 0 stand for a neuron that another rank owns.
    """

    index: Tensor
    sign: Tensor

    def dense(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The rows (1, R, *shape)."""
        size = math.prod(shape)
        rows = torch.zeros(len(self.index), size, dtype=dtype, device=self.index.device)
        if size:
            rows.scatter_(1, self.index[:, None], self.sign[:, None].to(dtype))
        return rows.reshape(1, len(self.index), *shape)


@dataclass(frozen=True)
class RelaxedNode:
    """A nonlinear node replaced by lines for the present pre-activation bounds."""

    node: Node
    lines: Lines

    @property
    def relaxation(self) -> Relaxation:
        return REGISTRY[self.node.op]


@dataclass(frozen=True)
class Relaxed:
    """The network with every nonlinearity relaxed: what a backward pass walks through.

    Attributes:
        intervals: bounds of every pre-activation node.
        nodes: relaxed nonlinear nodes by name.
        execution, own: by node name (B, *shape), the rounding error per unit of |A| when a backward
            pass visits the node, of the network and of the pass; see `rounding.py`. Nodes that round nothing
            are absent.
        peak: by node name (B,) float64, the largest magnitude of a (own) neuron of it and of what it sums up;
            nodes that only move their operand's neurons are absent.
    """

    intervals: dict[str, Interval] = field(default_factory=dict)
    nodes: dict[str, RelaxedNode] = field(default_factory=dict)
    execution: dict[str, Tensor] = field(default_factory=dict)
    own: dict[str, Tensor] = field(default_factory=dict)
    peak: dict[str, Tensor] = field(default_factory=dict)

    def select(self, domains: Tensor) -> Relaxed:
        """The relaxation of some domains (n,); what all domains share (B = 1) stays shared."""

        def pick(value: Tensor) -> Tensor:
            return value if len(value) == 1 else value[domains]

        nodes = {name: RelaxedNode(item.node, item.lines.map(pick)) for name, item in self.nodes.items()}
        return self._changed(pick, self._intervals(pick), nodes)

    def map(self, change: Callable[[Tensor], Tensor]) -> Relaxed:
        """The same network relaxed for bounds that `change` makes of the present ones, as of all else."""
        intervals, nodes = self._intervals(change), {}
        for name, item in self.nodes.items():
            known = intervals[item.node.inputs[0]]
            lines = item.relaxation.lines(item.node.attrs, known.lower, known.upper)
            nodes[name] = RelaxedNode(item.node, lines)
        return self._changed(change, intervals, nodes)

    def _intervals(self, change: Callable[[Tensor], Tensor]) -> dict[str, Interval]:
        return {name: Interval(change(x.lower), change(x.upper)) for name, x in self.intervals.items()}

    def _changed(
        self,
        change: Callable[[Tensor], Tensor],
        intervals: dict[str, Interval],
        nodes: dict[str, RelaxedNode],
    ) -> Relaxed:
        execution, own, peak = (
            {name: change(value) for name, value in part.items()}
            for part in (self.execution, self.own, self.peak)
        )
        return Relaxed(intervals, nodes, execution, own, peak)


@dataclass(frozen=True)
class RowBounds:
    """Lower bounds (B, R) of rows over each domain, and by how much rounding may have raised them (B, R)."""

    lower: Tensor
    error: Tensor


def preactivations(graph: Graph) -> tuple[str, ...]:
    """Names of the nodes that some relaxed nonlinearity reads, in topological order."""
    return tuple(
        node.name for node in graph if any(graph[name].op in REGISTRY for name in graph.readers(node.name))
    )


def ancestors(graph: Graph, names: Mapping[str, object] | tuple[str, ...]) -> set[str]:
    """`names` and all nodes that they depend on."""
    found: set[str] = set()
    stack = list(names)
    while stack:
        name = stack.pop()
        if name not in found:
            found.add(name)
            stack.extend(graph[name].inputs)
    return found
