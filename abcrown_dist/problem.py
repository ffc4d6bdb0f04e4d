"""From files, or a module, to a loaded and checked problem: what attacks and bounds work on."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from abcrown_dist.attack.confirm import Confirmer
from abcrown_dist.config import Config
from abcrown_dist.config.resolve import resolve_device, resolve_dtype
from abcrown_dist.graph.aten import unsupported
from abcrown_dist.graph.ir import Graph
from abcrown_dist.graph.load_onnx import LoadedModel, load_onnx
from abcrown_dist.parallel.group import ALONE, Group
from abcrown_dist.parallel.launch import World, local_device
from abcrown_dist.relax import REGISTRY
from abcrown_dist.spec.property import Property, Witness
from abcrown_dist.spec.vnnlib1 import check_sizes, load_vnnlib
from abcrown_dist.weights.adjoint import check_adjoints
from abcrown_dist.weights.base import Weights
from abcrown_dist.weights.fsdp import without_values
from abcrown_dist.weights.place import place_weights

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
    weights: Weights
    confirmer: Confirmer | SharedConfirmer
    missing: list[str]  # ops without a relaxation


def load(config: Config, instance: Instance, group: Group = ALONE) -> Problem:
    """Read both files and check the network against onnxruntime; rank 0 does, the others are told."""
    if group.size == 1:
        model, prop = _read(config, instance)
        return prepare(config, model, prop, Confirmer(prop, instance.model, input_shapes=model.input_shapes))
    mine: list[LoadedModel] = []

    def read() -> tuple[LoadedModel, Property]:
        model, prop = _read(config, instance)
        check(model, prop)
        mine.append(model)
        return dataclasses.replace(model, graph=without_values(model.graph)), prop

    model, prop = group.first(read)
    own = None if group.rank else Confirmer(prop, instance.model, input_shapes=model.input_shapes)
    graph = mine.pop().graph if mine else model.graph
    weights = _place(config, graph, group)
    del graph  # rank 0's whole model ends here
    missing = unsupported(model.graph, REGISTRY)
    return Problem(model, prop, weights, SharedConfirmer(own, group), missing)


def prepare(config: Config, model: LoadedModel, prop: Property, confirmer: Confirmer) -> Problem:
    """A problem of this process alone, checked, with its weights in place."""
    check(model, prop)
    missing = unsupported(model.graph, REGISTRY)
    return Problem(model, prop, _place(config, model.graph, ALONE), confirmer, missing)


def check(model: LoadedModel, prop: Property) -> None:
    """Check that network and property fit together and that the network can be bounded.

    Raises:
        LoadError: sizes differ, or an op is not what its derived rule takes it for.
    """
    for warning in model.warnings:
        _log.warning("%s", warning)
    check_sizes(prop, model.graph.input_size, model.graph.output_size)
    check_adjoints(model.graph)
    missing = unsupported(model.graph, REGISTRY)
    if missing:
        _log.warning("no relaxation for: %s; only the attack can decide", "; ".join(missing))


class SharedConfirmer:
    """A confirmer on rank 0 that answers to every rank."""

    def __init__(self, own: Confirmer | None, group: Group) -> None:
        self._own, self._group = own, group

    def confirm(self, x: np.ndarray, disjunct_index: int) -> Witness | None:
        """As `Confirmer.confirm`; every rank must ask, and rank 0's point is the one that counts."""
        own = self._own

        def ask() -> tuple[Witness | None]:
            assert own is not None
            return (own.confirm(x, disjunct_index),)

        return self._group.first(ask)[0]


def _read(config: Config, instance: Instance) -> tuple[LoadedModel, Property]:
    prop = load_vnnlib(instance.property)
    lower, upper = _hull(prop)
    return load_onnx(instance.model, config.model.input_shape, lower, upper), prop


def _place(config: Config, graph: Graph, group: Group) -> Weights:
    parallel = config.parallel
    device = local_device(resolve_device(config.general.device), World.from_environment())
    mode = parallel.mode if group.size > 1 else "none"
    return place_weights(
        graph,
        mode,
        group,
        resolve_dtype(config.general.double_fp),
        device,
        prefetch=parallel.prefetch,
        shard_rows=parallel.shard_rows,
    )


def _hull(prop: Property) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The smallest box around all boxes of the property, flat float64; none without disjuncts."""
    ends = [box.outward() for box, _ in prop.boxes()]
    if not ends:
        return None, None
    return np.min([low for low, _ in ends], axis=0), np.max([high for _, high in ends], axis=0)
