"""From the raw capture to the graph that is verified: canonical nodes, nothing superfluous, fused."""

from __future__ import annotations

from dataclasses import replace

import torch

from abcrown_dist.graph import canonical, fuse, layout
from abcrown_dist.graph.check import check
from abcrown_dist.graph.ir import Graph
from abcrown_dist.graph.rebuild import Rule, apply

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
    """
    graph = check(apply(check(graph), canonical.RULES))
    while True:
        before = graph.nodes
        for rules in PASSES:
            graph = check(apply(graph, rules))
        if graph.nodes == before:
            break
    return replace(graph, constants=layout.unify_floats(dict(graph.constants), dtype))
