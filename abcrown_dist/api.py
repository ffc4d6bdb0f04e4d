"""The Python API: bounds of a module, and verification of a property of it.

from abcrown_dist.api import compute_bounds, verify_module
lower, upper = compute_bounds(module, x, x - 0.01, x + 0.01, method="alpha-crown")
outcome = verify_module(module, x, load_vnnlib("property.vnnlib"))
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from abcrown_dist.attack.confirm import Confirmer
from abcrown_dist.bounds.concretize import Box
from abcrown_dist.bounds.propagate import bound_outputs
from abcrown_dist.bounds.settings import METHODS, BoundSettings
from abcrown_dist.config.keys import build
from abcrown_dist.graph.aten import unsupported
from abcrown_dist.graph.load_torch import load_torch
from abcrown_dist.problem import Problem, prepare
from abcrown_dist.relax import REGISTRY
from abcrown_dist.report.progress import Progress
from abcrown_dist.spec.property import Property
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.util.errors import ConfigError, LoadError
from abcrown_dist.util.numerics import Rounding, use_full_precision
from abcrown_dist.verify import Outcome, solve
from abcrown_dist.weights.adjoint import check_adjoints
from abcrown_dist.weights.local import LocalWeights


def compute_bounds(
    module: torch.nn.Module,
    example: Tensor,
    lower: Tensor,
    upper: Tensor,
    method: str = "alpha-crown",
    settings: BoundSettings | None = None,
) -> tuple[Tensor, Tensor]:
    """Bounds of a module's output over boxes around its input.

    Args:
        module: with one input and one output.
        example: one input, leading axis of 1 included; its dtype and device are computed in.
        lower, upper: (B, *example.shape[1:]), B boxes at once.
        method: a key of `abcrown_dist.bounds.settings.METHODS`.
        settings: everything else; `method` overrides its method.

    Returns:
        lower and upper bounds (B, *output shape without its leading 1), moved outward by all that rounding
        may have done, to them and to the module's own computation.

    Raises:
        LoadError: the module cannot be captured, or some op has no relaxation (all are named).
        ConfigError: unknown method, or boxes that do not fit the example.
    """
    if method not in METHODS:
        raise ConfigError(f"unknown bound method {method!r}, use one of {', '.join(METHODS)}")
    if lower.shape != upper.shape or lower.shape[1:] != example.shape[1:] or bool((lower > upper).any()):
        raise ConfigError(f"boxes must be (B, {', '.join(map(str, example.shape[1:]))}) with lower <= upper")
    use_full_precision()
    graph = load_torch(module, example).graph
    check_adjoints(graph)
    if missing := unsupported(graph, REGISTRY):
        raise LoadError(f"no relaxation for: {'; '.join(missing)}")
    if len(graph.inputs) != 1 or len(graph.outputs) != 1:
        raise LoadError("compute_bounds takes modules with one input and one output")
    weights = LocalWeights(graph, example.dtype, example.device, Rounding(model=example.dtype))
    (name,) = graph.inputs
    box = Box({name: lower.to(example)[:, None]}, {name: upper.to(example)[:, None]})
    base = settings or BoundSettings()
    with torch.no_grad():
        found = bound_outputs(weights, box, dataclasses.replace(base, method=method))[graph.outputs[0]]
    shape = (len(lower), *graph[graph.outputs[0]].shape[1:])
    return found.lower.reshape(shape), found.upper.reshape(shape)


def verify_module(
    module: torch.nn.Module,
    examples: Tensor | Sequence[Tensor],
    prop: Property,
    options: Mapping[str, Any] | None = None,
    timeout: float = math.inf,
) -> Outcome:
    """Verify a property of a module; the module itself confirms counterexamples.

    Args:
        examples: one example per argument of `forward`, leading axis of 1 included.
        prop: from `abcrown_dist.spec.vnnlib1`, or built by hand.
        options: configuration by dotted key, e.g. {"attack.pgd_order": "skip"}.
        timeout: seconds.

    Raises:
        LoadError: the module cannot be captured, or does not fit the property.
        ConfigError: an option that does not exist or cannot have that value.
    """
    config = build(dict(options or {}))
    use_full_precision()
    torch.manual_seed(config.general.seed)
    tensors = [examples] if isinstance(examples, Tensor) else list(examples)

    def run(flat: np.ndarray) -> np.ndarray:
        parts = torch.from_numpy(flat).split([tensor.numel() for tensor in tensors])
        with torch.no_grad():
            outputs = module(*(p.reshape(t.shape).to(t) for p, t in zip(parts, tensors, strict=True)))
        outputs = [outputs] if isinstance(outputs, Tensor) else outputs
        return np.concatenate([output.cpu().double().flatten().numpy() for output in outputs])

    module.eval()
    dtype = np.float64 if tensors[0].dtype == torch.float64 else np.float32

    def load_problem() -> Problem:
        return prepare(config, load_torch(module, tensors), prop, Confirmer(prop, run, dtype=dtype))

    return solve(config, load_problem, Deadline(timeout), Progress(mode="none"))
