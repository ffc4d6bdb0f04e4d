"""From files, or a module, to a loaded and checked problem: what attacks and bounds work on."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from abcrown_dist.attack.confirm import Confirmer
from abcrown_dist.config import Config
from abcrown_dist.config.resolve import resolve_device, resolve_dtype
from abcrown_dist.graph.aten import unsupported
from abcrown_dist.graph.load_onnx import LoadedModel, load_onnx
from abcrown_dist.relax import REGISTRY
from abcrown_dist.spec.property import Property
from abcrown_dist.spec.vnnlib1 import check_sizes, load_vnnlib
from abcrown_dist.weights.adjoint import check_adjoints
from abcrown_dist.weights.local import LocalWeights

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Instance:
    """A network and a property, as files, and the seconds allowed for them."""

    model: Path
    property: Path
    timeout: float


@dataclass(frozen=True)
class Problem:
    """A loaded instance with all that attacks and bounds need."""

    model: LoadedModel
    prop: Property
    weights: LocalWeights
    confirmer: Confirmer
    missing: list[str]  # ops without a relaxation


def load(config: Config, instance: Instance) -> Problem:
    """Read both files and check the network against onnxruntime."""
    prop = load_vnnlib(instance.property)
    lower, upper = _hull(prop)
    model = load_onnx(instance.model, config.model.input_shape, lower, upper)
    return prepare(config, model, prop, Confirmer(prop, instance.model, input_shapes=model.input_shapes))


def prepare(config: Config, model: LoadedModel, prop: Property, confirmer: Confirmer) -> Problem:
    """Check that network and property fit together and that the network can be bounded; place its weights."""
    for warning in model.warnings:
        _log.warning("%s", warning)
    check_sizes(prop, model.graph.input_size, model.graph.output_size)
    check_adjoints(model.graph)
    missing = unsupported(model.graph, REGISTRY)
    if missing:
        _log.warning("no relaxation for: %s; only the attack can decide", "; ".join(missing))
    device = resolve_device(config.general.device)
    weights = LocalWeights(model.graph, resolve_dtype(config.general.double_fp), device)
    return Problem(model, prop, weights, confirmer, missing)


def _hull(prop: Property) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The smallest box around all boxes of the property, flat float64; none without disjuncts."""
    ends = [box.outward() for box, _ in prop.boxes()]
    if not ends:
        return None, None
    return np.min([low for low, _ in ends], axis=0), np.max([high for _, high in ends], axis=0)
