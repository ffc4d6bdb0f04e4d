"""The consistency check finds every kind of broken graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from abcrown_dist.graph.check import GraphError, check
from abcrown_dist.graph.execute import execute
from abcrown_dist.graph.ir import Arg, Const, Graph, Node

X = Node("x", "input", (), (1, 2))
Y = Node("y", "linear", ("x",), (1, 3), attrs={"weight": Const("w"), "bias": None})
Z = Node("z", "add", ("y", "x"), (1, 3), (Arg(0), Arg(1)), target="aten.add.Tensor")
S = Node("s", "sin", ("y",), (1, 3), (Arg(0),), target="aten.sin.default")
W = {"w": torch.ones(3, 2)}


def _graph(*nodes: Node, output: str = "y", constants: dict[str, torch.Tensor] = W) -> Graph:
    return Graph(nodes, ("x",), (output,), constants)


def test_a_sound_graph_passes() -> None:
    graph = _graph(X, Y, S, output="s")
    assert check(graph) is graph


BROKEN = {
    "twice": (lambda: _graph(X, Y, Y), "y is defined twice"),
    "order": (lambda: _graph(X, S, Y), "s reads y, which is not defined before it"),
    "missing_constant": (lambda: _graph(X, Y, constants={}), "reads the constant w"),
    "unused_constant": (lambda: _graph(X, Y, constants={**W, "v": torch.ones(1)}), "no node reads.*v"),
    "missing_output": (lambda: _graph(X, Y, output="q"), "no node q"),
    "no_place": (lambda: _graph(X, Y, replace(Z, args=(Arg(0), 1))), "2 inputs and places for"),
    "no_input": (lambda: _graph(X, Y, replace(S, inputs=())), "depends on no input"),
    "shape": (lambda: _graph(X, replace(Y, shape=(1, 4))), "has shape"),
    "relu_shape": (lambda: _graph(X, Y, Node("r", "relu", ("y",), (3,))), "changes the shape"),
    "relu_template": (lambda: _graph(X, Y, Node("r", "relu", ("y",), (1, 3), (Arg(0),))), "no call template"),
    "unknown": (lambda: _graph(X, Y, Node("r", "sin", ("y",), (1, 3))), "neither canonical nor"),
    "weight": (lambda: _graph(X, replace(Y, attrs={"weight": 1, "bias": None})), "constant weight"),
    "stray_input": (lambda: _graph(X, Node("x2", "input", (), (1,)), Y), "not the graph's inputs"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_graphs(name: str) -> None:
    make, message = BROKEN[name]
    with pytest.raises(GraphError, match=message):
        check(make())


def test_execution_checks_shapes() -> None:
    graph = _graph(X, Y, replace(S, shape=(3, 1)), output="s")
    with pytest.raises(RuntimeError, match=r"node s \(sin\) has shape"):
        execute(graph, [torch.ones(1, 2)])
