"""From files, or a module, to a loaded and checked problem: what attacks and bounds work on."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch

from abcrown_dist.attack.confirm import Confirmer
from abcrown_dist.bab.checkpoint import hash_file
from abcrown_dist.config import Config
from abcrown_dist.config.resolve import resolve_device, resolve_dtype
from abcrown_dist.graph.aten import unsupported
from abcrown_dist.graph.cache import GraphCache, default_folder
from abcrown_dist.graph.ir import Graph
from abcrown_dist.graph.load_onnx import LoadedModel, load_onnx
from abcrown_dist.graph.stored import Unstorable, digest
from abcrown_dist.parallel.group import ALONE, Group
from abcrown_dist.parallel.launch import World, local_device
from abcrown_dist.parallel.mesh import Mesh, degrees
from abcrown_dist.plan.choose import choose
from abcrown_dist.relax import REGISTRY
from abcrown_dist.spec.property import Property, Witness
from abcrown_dist.spec.vnnlib1 import check_sizes, load_vnnlib
from abcrown_dist.util.errors import LoadError
from abcrown_dist.util.numerics import Rounding
from abcrown_dist.weights.adjoint import check_adjoints
from abcrown_dist.weights.base import Weights
from abcrown_dist.weights.fsdp import without_values
from abcrown_dist.weights.place import place_weights, share_values

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Instance:
    """A network and a property, as files, and the seconds allowed for them."""

    model: Path
    property: Path
    timeout: float


@dataclass(frozen=True)
class Problem:
    """A loaded instance with all that attacks and bounds need, and its configuration with a settled mode."""

    config: Config
    model: LoadedModel
    prop: Property
    weights: Weights
    confirmer: Confirmer | SharedConfirmer
    missing: list[str]  # ops without a relaxation
    mesh: Mesh = field(default_factory=Mesh)
    fingerprint: Mapping[str, str] | None = None  # of network and property, if checkpoints need it


def load(config: Config, instance: Instance, group: Group = ALONE) -> Problem:
    """Read both files and check the network against onnxruntime; rank 0 does, the others are told."""
    if group.size == 1:
        model, prop = read_instance(config, instance)
        problem = prepare(config, model, prop, _confirmer(instance, model, prop, group))
        return dataclasses.replace(problem, fingerprint=_fingerprint(config, instance, model))
    mine: list[LoadedModel] = []
    device = _device(config)

    def read() -> tuple[LoadedModel, Property, Config, Mapping[str, str] | None]:
        model, prop = read_instance(config, instance)
        check(model, prop)
        mine.append(model)
        can_bound = not unsupported(model.graph, REGISTRY)
        settled = with_enough_digits(config, model.graph)
        shards, _ = degrees(settled.parallel, group.size)
        settled = choose(settled, model.graph, prop, shards, device, can_bound=can_bound)
        bare = dataclasses.replace(model, graph=without_values(model.graph))
        return bare, prop, settled, _fingerprint(config, instance, model)

    model, prop, config, fingerprint = group.first(read)
    mesh = Mesh.of(group, config.parallel)
    graph = mine.pop().graph if mine else model.graph
    if mesh.weights.rank == 0:
        graph = share_values(graph, mesh.across)
    weights = _place(config, graph, model.dtype, mesh.weights, device)
    del graph  # whole models end here, where weights are shared
    missing = unsupported(model.graph, REGISTRY)
    confirmer = _confirmer(instance, model, prop, group)
    return Problem(config, model, prop, weights, confirmer, missing, mesh, fingerprint)


def prepare(
    config: Config, model: LoadedModel, prop: Property, confirmer: Confirmer | SharedConfirmer
) -> Problem:
    """A problem of this process alone, checked, with its weights in place."""
    check(model, prop)
    config = with_enough_digits(config, model.graph)
    missing = unsupported(model.graph, REGISTRY)
    weights = _place(config, model.graph, model.dtype, ALONE, _device(config))
    return Problem(config, model, prop, weights, confirmer, missing)


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
    """A confirmer on rank 0 that answers to every rank, made when it is first asked.

    Among several ranks it holds the whole model only while it is asked.
    """

    def __init__(self, make: Callable[[], Confirmer], group: Group = ALONE) -> None:
        self._make, self._group = make, group
        self._own: Confirmer | None = None

    def confirm(self, x: np.ndarray, disjunct_index: int) -> Witness | None:
        """As `Confirmer.confirm`; every rank must ask, and rank 0's point is the one that counts."""

        def ask() -> tuple[Witness | None]:
            if self._own is None:
                self._own = self._make()
            return (self._own.confirm(x, disjunct_index),)

        return self._group.first(ask)[0]

    def release(self) -> None:
        """Let go of onnxruntime's copy of the model until the next question.

        One process has room for it, and keeps it.
        """
        if self._group.size > 1:
            self._own = None


def _confirmer(instance: Instance, model: LoadedModel, prop: Property, group: Group) -> SharedConfirmer:
    make = partial(Confirmer, prop, instance.model, input_shapes=model.input_shapes)
    return SharedConfirmer(make, group)


def read_instance(config: Config, instance: Instance) -> tuple[LoadedModel, Property]:
    """Both files of an instance, the network compared with onnxruntime inside the property's boxes.

    Raises:
        LoadError: a file cannot be read or is not supported.
    """
    prop = load_vnnlib(instance.property)
    lower, upper = _hull(prop)
    cache = _cache(config)
    load_network = load_onnx if cache is None else cache.load
    return load_network(instance.model, config.model.input_shape, lower, upper), prop


def _fingerprint(config: Config, instance: Instance, model: LoadedModel) -> Mapping[str, str] | None:
    """Digests by which a checkpoint knows its network and property; None where there is none.

    The network is known by what was made of it: its weights may lie in files of their own.

    Raises:
        LoadError: the network has no digest, or the property cannot be read.
    """
    if config.bab.checkpoint is None and config.bab.resume is None:
        return None
    try:
        return {"network": digest(model), "property": hash_file(instance.property)}
    except Unstorable as error:
        raise LoadError(f"{instance.model}: checkpoints cannot tell this network: {error}") from None


def _cache(config: Config) -> GraphCache | None:
    if not config.model.cache_onnx_conversion:
        return None
    named = config.model.cache_dir
    try:
        return GraphCache(default_folder() if named is None else Path(named).expanduser())
    except RuntimeError as error:  # no home directory
        _log.warning("no graph cache: %s; model.cache_dir names a folder for it", error)
        return None


def _device(config: Config) -> torch.device:
    return local_device(resolve_device(config.general.device), World.from_environment())


def _place(
    config: Config, graph: Graph, model_dtype: torch.dtype, group: Group, device: torch.device
) -> Weights:
    parallel = config.parallel
    mode = parallel.mode if group.size > 1 else "none"
    return place_weights(
        graph,
        mode,
        group,
        resolve_dtype(config.general.double_fp),
        device,
        prefetch=parallel.prefetch,
        shard_rows=parallel.shard_rows,
        rounding=Rounding(config.general.rounding == "rigorous", model_dtype),
    )


def with_enough_digits(config: Config, graph: Graph) -> Config:
    """The configuration, in float64 if float32 cannot hold the network's constants to its own precision.

    The error of a bound counts rounding, not what became zero, subnormal or infinite before bounding began.
    """
    if config.general.double_fp:
        return config
    for value in graph.constants.values():
        if value.dtype == torch.float64:
            lost = (value - value.float().double()).abs() > 2.0**-23 * value.abs()
            if bool(lost.any()):
                _log.warning("float32 cannot hold this network's constants: computing in float64")
                return dataclasses.replace(
                    config, general=dataclasses.replace(config.general, double_fp=True)
                )
    return config


def _hull(prop: Property) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The smallest box around all boxes of the property, flat float64; none without disjuncts."""
    ends = [box.outward() for box, _ in prop.boxes()]
    if not ends:
        return None, None
    return np.min([low for low, _ in ends], axis=0), np.max([high for _, high in ends], axis=0)
