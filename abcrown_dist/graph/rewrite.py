"""From the raw capture to the graph that is verified: canonical nodes, nothing superfluous, fused."""

from __future__ import annotations

from dataclasses import replace

import torch

from abcrown_dist.graph import canonical, fuse, layout
from abcrown_dist.graph.check import check
from abcrown_dist.graph.ir import Graph
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
    graph = check(apply(check(graph), canonical.RULES))
    while True:
        before = graph.nodes
        for rules in PASSES:
            graph = check(apply(graph, rules))
        if graph.nodes == before:
            break
    return replace(graph, constants=layout.unify_floats(dict(graph.constants), dtype))


def _refuse_narrowing(graph: Graph) -> None:
    """Casts between float types are dropped, which only those that lose nothing may be."""
    for node in graph:
        if node.op == "_to_copy" and node.kwargs.get("dtype") == torch.float32:
            raise LoadError(f"{node.name}: a cast to float32 within a float64 model is not supported")
