"""Capture of a PyTorch module as a graph, by running it once and recording every ATen call.

The module runs on one example. A call is recorded when one of its operands depends on an input;
everything else is constant and folds by itself, whatever Python did to compute it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from abcrown_dist.graph.ir import Graph, Node
from abcrown_dist.graph.recorder import Constants, Recorder, tensors_in, unique_name
from abcrown_dist.util.errors import LoadError

Labels = Callable[[str], Sequence[str]]
"""From the qualified name of a submodule to names for its outputs."""


@contextmanager
def _scopes(
    module: torch.nn.Module, recorder: Recorder, found: dict[str, str], labels: Labels | None
) -> Iterator[None]:
    """While inside, nodes are named after the submodule that makes them, and its results by `labels`."""

    def enter(name: str) -> Callable[..., None]:
        scope = name if labels is None else next(iter(labels(name)), "")

        def hook(*_: Any) -> None:
            # A submodule without a label counts as part of the one that calls it.
            recorder.scopes.append(scope or (recorder.scopes[-1] if recorder.scopes else ""))

        return hook

    def leave(name: str) -> Callable[..., None]:
        def hook(_module: Any, _args: Any, result: Any) -> None:
            recorder.scopes.pop()
            if labels is None:
                return
            for label, tensor in zip(labels(name), tensors_in(result), strict=False):
                node = recorder.node_of(tensor)
                if node is not None and recorder.nodes[node].op != "input":
                    found.setdefault(node, label)

        return hook

    with ExitStack() as stack:
        for name, submodule in module.named_modules():
            before = submodule.register_forward_pre_hook(enter(name))
            after = submodule.register_forward_hook(leave(name))
            stack.callback(before.remove)
            stack.callback(after.remove)
        yield


@contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, and attention in its plain form; all restored afterwards."""
    training = [submodule for submodule in module.modules() if submodule.training]
    fastpath = torch.backends.mha.get_fastpath_enabled()
    kernels = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    module.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), kernels:
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        for submodule in training:
            submodule.training = True


def trace(
    module: torch.nn.Module,
    inputs: Sequence[torch.Tensor],
    input_names: Sequence[str] | None = None,
    labels: Labels | None = None,
) -> Graph:
    """Graph of ATen calls that `module` makes on one example.

    Args:
        module: run in evaluation mode, once; restored to its training mode.
        inputs: one example per positional argument, the leading 1 included.
        input_names: names of the inputs; default `input` or `input_0`, `input_1`, ...
        labels: names for the results of submodules, by qualified name of the submodule.

    Returns:
        Raw graph: nodes `input` and ATen calls only, in the order of the calls; only nodes that an
        output needs, and the constants that they read (float or integer, as the module has them).

    Raises:
        LoadError: an in-place write that cannot be expressed; a value that leaves PyTorch or steers
            Python's control flow; an output that is no tensor.
    """
    names = list(input_names or _default_names(len(inputs)))
    constants = Constants(module)
    recorder = Recorder(constants)
    examples = [tensor.detach().clone() for tensor in inputs]
    for name, tensor in zip(names, examples, strict=True):
        recorder.add_input(tensor, name)
    found: dict[str, str] = {}
    with evaluating(module), _scopes(module, recorder, found, labels), recorder:
        try:
            result = module(*examples)
        except LoadError:
            raise
        except Exception as error:  # whatever the model's own code raises
            raise LoadError(f"{recorder.place()}running the model failed: {error}") from error
    outputs = flatten_outputs(result)
    if not outputs:
        raise LoadError(f"the model returns {type(result).__name__}, no tensor")
    wanted = [recorder.output(tensor) for tensor in outputs]
    nodes = _needed(list(recorder.nodes.values()), wanted)
    used = {key for node in nodes for key in node.constants()}
    graph = Graph(tuple(nodes), tuple(names), tuple(wanted), constants.finish(used))
    return _rename(graph, found)


def flatten_outputs(result: Any) -> list[torch.Tensor]:
    """The tensors in what a module returned (a tensor, or nested tuples, lists and dicts of them)."""
    return list(tensors_in(result))


def _default_names(count: int) -> list[str]:
    return ["input"] if count == 1 else [f"input_{index}" for index in range(count)]


def _needed(nodes: list[Node], outputs: Sequence[str]) -> list[Node]:
    """The nodes that some output depends on, and all inputs."""
    wanted = set(outputs)
    kept: list[Node] = []
    for node in reversed(nodes):
        if node.name in wanted or node.op == "input":
            kept.append(node)
            wanted.update(node.inputs)
    return kept[::-1]


def _rename(graph: Graph, names: Mapping[str, str]) -> Graph:
    """The graph with the given new names, as far as they are still free."""
    final: dict[str, str] = {name: name for name in graph.inputs}
    taken: dict[str, None] = dict.fromkeys(graph.inputs)
    for node in graph.nodes:
        if node.op != "input":
            final[node.name] = unique_name(names.get(node.name, node.name), taken)
            taken[final[node.name]] = None
    nodes = tuple(
        replace(node, name=final[node.name], inputs=tuple(final[name] for name in node.inputs))
        for node in graph.nodes
    )
    return Graph(nodes, graph.inputs, tuple(final[name] for name in graph.outputs), graph.constants)
