"""Consistency of a graph: what every rewrite must leave true."""

from __future__ import annotations

from typing import Any

from abcrown_dist.graph.ir import Arg, Const, Graph, Node


class GraphError(AssertionError):
    """A graph that breaks its own rules: a defect of a rewrite, never of the user's model."""


def _arguments(template: Any) -> list[int]:
    if isinstance(template, Arg):
        return [template.index]
    if isinstance(template, (tuple, list)):
        return [index for item in template for index in _arguments(item)]
    return []


def _check_node(node: Node, known: set[str], graph: Graph) -> None:
    if node.name in known:
        raise GraphError(f"{node.name} is defined twice")
    for name in node.inputs:
        if name not in known:
            raise GraphError(f"{node.name} reads {name}, which is not defined before it")
    for key in node.constants():
        if key not in graph.constants:
            raise GraphError(f"{node.name} reads the constant {key}, which does not exist")
    if node.op == "input":
        return
    if not node.inputs:
        raise GraphError(f"{node.name} ({node.op}) depends on no input")
    if node.target:
        found = sorted(set(_arguments([*node.args, *node.kwargs.values()])))
        if found != list(range(len(node.inputs))):
            raise GraphError(f"{node.name} ({node.op}) has {len(node.inputs)} inputs and places for {found}")
    else:
        _check_canonical(node, graph)


def _check_canonical(node: Node, graph: Graph) -> None:
    if node.op not in ("linear", "conv", "relu", "leaky_relu"):
        raise GraphError(f"{node.name} has the op {node.op}, which is neither canonical nor an ATen call")
    if len(node.inputs) != 1 or node.args or node.kwargs:
        raise GraphError(f"{node.name} ({node.op}) must read one node and have no call template")
    source = graph[node.inputs[0]]
    if node.op in ("relu", "leaky_relu"):
        if node.shape != source.shape:
            raise GraphError(f"{node.name} ({node.op}) changes the shape {source.shape} to {node.shape}")
        return
    weight, bias = node.attrs["weight"], node.attrs["bias"]
    if not isinstance(weight, Const) or not (bias is None or isinstance(bias, Const)):
        raise GraphError(f"{node.name} ({node.op}) must have constant weight and bias")
    if node.op == "linear":
        expected = (*source.shape[:-1], graph.constants[weight.key].shape[0])
        if node.shape != expected or graph.constants[weight.key].shape[1] != source.shape[-1]:
            raise GraphError(f"{node.name} (linear) has shape {node.shape}, its operands give {expected}")


def check(graph: Graph) -> Graph:
    """Return `graph` when it is consistent: order, names, templates, constants, shapes of canonical
    nodes. (Shapes of ATen calls are checked by `execute`.)

    Raises:
        GraphError: naming the node and what is wrong with it.
    """
    known: set[str] = set()
    used: set[str] = set()
    for node in graph.nodes:
        _check_node(node, known, graph)
        known.add(node.name)
        used.update(node.constants())
    for name in (*graph.inputs, *graph.outputs):
        if name not in known:
            raise GraphError(f"the graph has no node {name}")
    if {node.name for node in graph.nodes if node.op == "input"} != set(graph.inputs):
        raise GraphError("the input nodes are not the graph's inputs")
    if used != set(graph.constants):
        raise GraphError(f"constants that no node reads: {sorted(set(graph.constants) - used)}")
    return graph
