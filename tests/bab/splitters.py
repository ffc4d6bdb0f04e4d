"""Splitters over small networks, and all that a network does at points of its box."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from abcrown_dist.bab.clauses import Clauses, batches
from abcrown_dist.bab.domains import Domains
from abcrown_dist.bab.goals import Goals
from abcrown_dist.bab.split_input import InputSettings, InputSplitter
from abcrown_dist.bab.split_relu import ReluSettings, ReluSplitter
from abcrown_dist.bounds.beta import BetaSettings
from abcrown_dist.bounds.propagate import bound_intermediate
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.graph.execute import cast, execute_all
from abcrown_dist.spec.property import Property
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.weights.base import Weights
from abcrown_dist.weights.local import LocalWeights
from tests.searches import Case

SINGLE = float(np.finfo(np.float32).max)


def one_batch(weights: LocalWeights, prop: Property) -> Clauses:
    """All boxes of a property at once."""
    (clauses,) = batches(prop, weights, range(len(prop.disjuncts)), 64)
    return clauses


def relu_splitter(
    weights: LocalWeights, prop: Property, box: int = 0, largest: float = SINGLE, **options: Any
) -> ReluSplitter:
    """A splitter over one of the property's boxes, with few steps."""
    clauses = one_batch(weights, prop).select(torch.tensor([box]))
    bounds = BoundSettings(method="crown")
    relaxed = bound_intermediate(weights, clauses.box, bounds)
    few = BetaSettings(iteration=5)
    settings = ReluSettings(**{"beta": few, "root": few, "bounds": bounds, **options})
    wanted = set(clauses.disjunct.flatten().tolist()) - {-1}
    return ReluSplitter(
        weights, clauses.box, relaxed, Goals.of(clauses, wanted), largest, settings, Deadline()
    )


def input_splitter(
    weights: LocalWeights, prop: Property, largest: float = SINGLE, **options: Any
) -> InputSplitter:
    """A splitter over all boxes of a property."""
    clauses = one_batch(weights, prop)
    settings = InputSettings(**{"bounds": BoundSettings(method="crown"), **options})
    goals = Goals.of(clauses, set(range(len(prop.disjuncts))))
    return InputSplitter(weights, clauses.box, goals, largest, settings, Deadline())


def weights_of(case: Case, dtype: torch.dtype = torch.float32) -> LocalWeights:
    return LocalWeights(case.model.graph, dtype)


def values_at(weights: Weights, points: Tensor) -> Mapping[str, Tensor]:
    """Values of all nodes (points, *shape) at flat points (points, inputs) of a network of one input."""
    graph = cast(weights.graph, torch.float64)
    (entry,) = graph.inputs
    shaped = points.double().reshape(len(points), *graph[entry].shape)
    return torch.func.vmap(lambda x: execute_all(graph, [x]))(shaped)


def random_points(box: tuple[np.ndarray, np.ndarray], count: int, seed: int = 0) -> Tensor:
    """Flat points of a box; a quarter of their coordinates lie on faces."""
    random = np.random.default_rng(seed)
    share = random.random((count, len(box[0])))
    share = np.where(random.random(share.shape) < 0.25, share.round(), share)
    return torch.from_numpy(box[0] + share * (box[1] - box[0]))


def inside(splitter: ReluSplitter, domains: Domains, values: Mapping[str, Tensor]) -> Tensor:
    """Mask (domains, points) of the points that fulfil all decisions of each domain."""
    neurons = splitter.neurons
    z = torch.cat([values[name].flatten(1) for name in neurons.offset], dim=1)
    rows = []
    for neuron, sign in zip(domains.state["neuron"].long(), domains.state["sign"], strict=True):
        rows.append((z[:, neuron] * sign >= 0).all(1))
    return torch.stack(rows)
