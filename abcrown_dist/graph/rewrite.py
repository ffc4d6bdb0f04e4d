"""From the raw capture to the graph that is verified: canonical nodes, nothing superfluous, fused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from abcrown_dist.graph import canonical, fuse, layout
from abcrown_dist.graph.aten import classify, unit_coefficients
from abcrown_dist.graph.check import check
from abcrown_dist.graph.ir import Graph, Node
from abcrown_dist.graph.rebuild import Rule, apply
from abcrown_dist.util.errors import LoadError

PASSES: tuple[tuple[Rule, ...], ...] = (layout.RULES, fuse.RULES)
"""Repeated until nothing changes, after the canonical rules ran once."""


def rewrite(graph: Graph, dtype: torch.dtype) -> Graph:
    """The canonical graph of the same function.

    Args:
        graph: raw capture.
        dtype: type of all floating constants of the result.

    Returns:
        a graph whose values differ from those of `graph` by rounding only. The consistency check
        runs after every pass.

    Raises:
        GraphError: a rewrite broke the graph (a defect).
        LoadError: a float64 model rounds values to float32 on the way.
    """
    if dtype == torch.float64:
        _refuse_narrowing(graph)
    graph = check(apply(check(_with_rounded_numbers(graph, dtype)), canonical.RULES))
    while True:
        before = graph.nodes
        for rules in PASSES:
            graph = check(apply(graph, rules))
        if graph.nodes == before:
            break
    return _marked(replace(graph, constants=layout.unify_floats(dict(graph.constants), dtype)))


def _marked(graph: Graph) -> Graph:
    """The graph with the attr `unit` where it belongs: weights may be spread over ranks later on.

    Not where constants are computed, or lose digits in float32.
    """

    def unit(node: Node) -> bool:
        if classify(node) != "affine" or "fused" in node.attrs:
            return False
        values = (graph.constants[key] for key in node.constants())
        exact = all(layout.holds(torch.float32, value) for value in values if value.is_floating_point())
        return exact and unit_coefficients(node, graph.constants)

    nodes = [replace(node, attrs={**node.attrs, "unit": True}) if unit(node) else node for node in graph]
    return replace(graph, nodes=tuple(nodes))


def _with_rounded_numbers(graph: Graph, dtype: torch.dtype) -> Graph:
    """Numbers among the arguments as the network's own arithmetic takes them: 0.1 times a float32 tensor
    is its product with the float32 next to 0.1."""

    def rounded(item: Any) -> Any:
        if isinstance(item, (tuple, list)):
            return tuple(rounded(part) for part in item)
        return float(torch.tensor(item, dtype=dtype)) if isinstance(item, float) else item

    nodes = [
        replace(node, args=rounded(node.args), kwargs={key: rounded(v) for key, v in node.kwargs.items()})
        for node in graph
    ]
    return replace(graph, nodes=tuple(nodes))


def _refuse_narrowing(graph: Graph) -> None:
    """Casts between float types are dropped, which only those that lose nothing may be."""
    for node in graph:
        if node.op == "_to_copy" and node.kwargs.get("dtype") == torch.float32:
            raise LoadError(f"{node.name}: a cast to float32 within a float64 model is not supported")
