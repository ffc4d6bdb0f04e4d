"""One pass over a graph that replaces nodes: the machinery under all rewrites."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from abcrown_dist.graph.ir import Arg, Const, Graph, Node


class Rebuild:
    """The graph under construction during one pass.

    Rules see each node once, in topological order, with its inputs already rewritten.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._nodes: dict[str, Node] = {}
        self._same: dict[str, str] = {}
        self._constants: dict[str, torch.Tensor] = dict(graph.constants)
        self._uses: Counter[str] = Counter(graph.outputs)
        for node in graph:
            self._uses.update(set(node.inputs))

    def __getitem__(self, name: str) -> Node:
        """A node that was emitted before."""
        return self._nodes[name]

    def constant(self, template: Any) -> torch.Tensor | None:
        """Value of a `Const`, or of a plain number; None for anything else."""
        if isinstance(template, Const):
            return self._constants[template.key]
        if isinstance(template, (int, float)) and not isinstance(template, bool):
            return torch.tensor(template, dtype=torch.float64)
        return None

    def add_constant(self, wanted: str, value: torch.Tensor) -> Const:
        """Register a new constant under a free name like `wanted`."""
        key, count = wanted, 1
        while key in self._constants:
            key, count = f"{wanted}.{count}", count + 1
        self._constants[key] = value
        return Const(key)

    def fresh(self, wanted: str) -> str:
        """A free node name like `wanted`."""
        name, count = wanted, 1
        while name in self._graph or name in self._nodes:
            name, count = f"{wanted}.{count}", count + 1
        return name

    def private(self, name: str) -> bool:
        """Whether only one node reads `name`, and no output does (when in doubt, False)."""
        return self._uses[name] == 1

    def emit(self, node: Node) -> str:
        """Add a node; its name must be `fresh`, or that of the node under rewriting."""
        self._nodes[node.name] = node
        self._uses.setdefault(node.name, 2)  # its readers are not known before the next pass
        return node.name

    def visit(self, node: Node, rules: Sequence[Rule]) -> None:
        """Rewrite one node by the first rule that applies, or copy it."""
        node = replace(node, inputs=tuple(self._same.get(name, name) for name in node.inputs))
        for rule in rules:
            result = rule(self, node)
            if result is not None:
                break
        else:
            result = self.emit(node)
        if result != node.name:
            self._same[node.name] = result
            self._uses[result] += self._uses[node.name]

    def finish(self) -> Graph:
        """The new graph, without the nodes and constants that nothing needs any more."""
        outputs = tuple(self._same.get(name, name) for name in self._graph.outputs)
        wanted = {*outputs, *self._graph.inputs}
        kept: list[Node] = []
        for node in reversed(self._nodes.values()):
            if node.name in wanted:
                kept.append(node)
                wanted.update(node.inputs)
        used = {key for node in kept for key in node.constants()}
        constants = {key: value for key, value in self._constants.items() if key in used}
        return Graph(tuple(kept[::-1]), self._graph.inputs, outputs, constants)


Rule = Callable[[Rebuild, Node], str | None]
"""Looks at a node; returns None when it does not apply, else the name of the node that now stands
for it (an earlier one, or one that the rule emitted)."""


def apply(graph: Graph, rules: Sequence[Rule]) -> Graph:
    """The graph after one pass of `rules`."""
    build = Rebuild(graph)
    for node in graph:
        build.visit(node, rules)
    return build.finish()


def linear_node(name: str, source: str, shape: tuple[int, ...], weight: Const, bias: Const | None) -> Node:
    """Canonical `linear`: (..., I) to `shape` (..., O) by a weight (O, I) and a bias (O,)."""
    return Node(name, "linear", (source,), shape, attrs={"weight": weight, "bias": bias})


def view_node(name: str, source: str, shape: tuple[int, ...]) -> Node:
    """Canonical `view`: the elements of `source` in C order, as `shape`."""
    return Node(name, "view", (source,), shape, (Arg(0), shape), target="aten.reshape.default")


def permute_node(name: str, source: str, shape: tuple[int, ...], dims: tuple[int, ...]) -> Node:
    """Canonical `permute`, with non-negative `dims`."""
    return Node(name, "permute", (source,), shape, (Arg(0), dims), target="aten.permute.default")
