"""PyTorch modules as graphs: capture, rewriting, comparison with the module itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from abcrown_dist.graph.agreement import compare, sample_points
from abcrown_dist.graph.load_onnx import LoadedModel
from abcrown_dist.graph.rewrite import rewrite
from abcrown_dist.graph.trace import evaluating, flatten_outputs, trace
from abcrown_dist.util.errors import LoadError


def load_torch(module: torch.nn.Module, example_inputs: torch.Tensor | Sequence[torch.Tensor]) -> LoadedModel:
    """Capture, rewrite and check a module.

    Args:
        module: run in evaluation mode; its parameters and mode stay as they are.
        example_inputs: one example per positional argument of `forward`, leading axis included;
            floating, all of one type.

    Raises:
        LoadError: the module cannot be captured, or computes something else than the capture (a
            value that left PyTorch, or control flow that depends on the input).
    """
    examples = [example_inputs] if isinstance(example_inputs, torch.Tensor) else list(example_inputs)
    if not examples:
        raise LoadError("the model needs an example input")
    kinds = {tensor.dtype for tensor in examples}
    if len(kinds) != 1 or not examples[0].is_floating_point():
        raise LoadError(f"example inputs must share one floating type, not {sorted(map(str, kinds))}")
    graph = rewrite(trace(module, examples), examples[0].dtype)

    def reference(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with evaluating(module):
            return flatten_outputs(module(*(tensor.clone() for tensor in inputs)))

    shapes = [tuple(tensor.shape) for tensor in examples]
    difference, not_finite = compare(graph, reference, sample_points(shapes, examples[0].dtype))
    if difference is not None:
        raise LoadError(
            f"the captured network differs from the module by {difference.error:.3g} in output "
            f"{difference.output} (outputs up to {difference.scale:.3g}); does a value leave PyTorch, or "
            "does control flow depend on the input?"
        )
    notes = (f"outputs are NaN or infinite at {not_finite} of the points tried",) if not_finite else ()
    return LoadedModel(
        graph=graph,
        input_names=graph.inputs,
        input_shapes=tuple(shapes),
        output_names=graph.outputs,
        output_shapes=tuple(graph[name].shape for name in graph.outputs),
        dtype=examples[0].dtype,
        warnings=notes,
    )
