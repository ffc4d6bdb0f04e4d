"""Who owns which neurons under tensor parallelism.

Every rank owns one contiguous range of a node's flat neurons (C order, so that whole channels of a
convolution are contiguous), and holds its part of any tensor over the node as a flat last axis.
Reshaping then moves nothing, and elementwise work needs no other rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from abcrown_dist.graph.aten import RESHAPE, classify
from abcrown_dist.graph.ir import Graph, Node
from abcrown_dist.parallel.group import even_bounds

Ends = tuple[int, ...]  # size + 1 ends: rank r owns flat neurons ends[r] up to ends[r + 1]
How = Literal["input", "neurons", "channels", "local", "pooled", "replicated"]

_COORDINATEWISE = frozenset({"mul", "div", "add", "sub", "neg"})


def plan_layouts(graph: Graph, size: int) -> dict[str, tuple[How, Ends]]:
    """How each node is computed by `size` ranks, and who owns its neurons.

    `neurons`, `channels`: each rank computes its own outputs from all inputs, which are gathered.
    `local`: each rank computes its own neurons from its own neurons. `pooled`: likewise, channel by
    channel. `replicated`: operands and weights are gathered and every rank computes everything, then
    keeps its own: slower, never wrong.
    """
    plan: dict[str, tuple[How, Ends]] = {}
    for node in graph:
        plan[node.name] = _place(graph, node, plan, size)
    return plan


def _place(graph: Graph, node: Node, plan: Mapping[str, tuple[How, Ends]], size: int) -> tuple[How, Ends]:
    if node.op == "input":
        return "input", tuple(even_bounds(node.size, size))
    operands = [plan[name][1] for name in node.inputs]
    if classify(node) == "nonlinear":
        if not node.target and len(operands) == 1:  # canonical: elementwise
            return "local", operands[0]
        return "replicated", tuple(even_bounds(node.size, size))
    if node.op == "linear" and math.prod(node.shape[:-1]) == 1:
        return "neurons", tuple(even_bounds(node.size, size))
    if node.op == "conv" and node.attrs["groups"] == 1:
        return "channels", _channel_ends(node, size)
    if node.op in RESHAPE:
        return "local", operands[0]
    if node.op in _COORDINATEWISE and _keeps_places(graph, node, operands):
        return "local", operands[0]
    if node.op.startswith("avg_pool") and _by_channels(graph[node.inputs[0]], operands[0]):
        space = math.prod(node.shape[2:])
        before = math.prod(graph[node.inputs[0]].shape[2:])
        return "pooled", tuple(end // before * space for end in operands[0])
    return "replicated", tuple(even_bounds(node.size, size))


def _channel_ends(node: Node, size: int) -> Ends:
    space = math.prod(node.shape[2:])
    return tuple(end * space for end in even_bounds(node.shape[1], size))


def _keeps_places(graph: Graph, node: Node, operands: list[Ends]) -> bool:
    """Whether every output depends only on the operands' neurons at its own place."""
    same = all(graph[name].shape == node.shape for name in node.inputs)
    return same and len(set(operands)) == 1


def _by_channels(node: Node, ends: Ends) -> bool:
    space = math.prod(node.shape[2:])
    return len(node.shape) > 2 and all(end % space == 0 for end in ends)


def weight_ends(node: Node, ends: Ends) -> Ends:
    """Ends of the output neurons or channels that each rank's part of a weight belongs to."""
    if node.op == "linear":
        return ends
    space = math.prod(node.shape[2:])
    return tuple(end // space for end in ends)
