"""Where interval bounds are exact already, so that no backward pass can tighten them."""

from __future__ import annotations

from abcrown_dist.graph.aten import classify
from abcrown_dist.graph.ir import Graph, Node

# Affine calls of one operand that keep every coordinate apart: the image of a box is a box.
_COORDINATEWISE = frozenset(
    {
        "view",
        "_unsafe_view",
        "reshape",
        "unsqueeze",
        "squeeze",
        "permute",
        "transpose",
        "t",
        "slice",
        "mul",
        "div",
        "add",
        "sub",
        "neg",
        "constant_pad_nd",
    }
)


def exact_by_intervals(graph: Graph) -> set[str]:
    """Names of nodes whose interval bounds over a box of inputs are the tightest there are.

    These are coordinatewise images of the inputs, one further affine map of them with a single
    operand (each of its outputs sees every coordinate once), and coordinatewise images of that.
    """
    box: set[str] = set()
    exact: set[str] = set()
    for node in graph:
        if node.op == "input":
            box.add(node.name)
        elif classify(node) == "affine" and len(node.inputs) == 1:
            if _coordinatewise(graph, node):
                if node.inputs[0] in box:
                    box.add(node.name)
                if node.inputs[0] in exact:
                    exact.add(node.name)
            elif node.inputs[0] in box:
                exact.add(node.name)
    return exact | box


def _coordinatewise(graph: Graph, node: Node) -> bool:
    if node.op not in _COORDINATEWISE:
        return False
    # Broadcasting would repeat a coordinate.
    return node.size <= graph[node.inputs[0]].size or node.op == "constant_pad_nd"
