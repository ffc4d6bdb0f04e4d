"""What ranks of a pool compute, for comparison with one process. Every rank builds its own copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from abcrown_dist.bab.root import Refutation, refute
from abcrown_dist.bounds.alpha import AlphaSettings
from abcrown_dist.bounds.concretize import Box
from abcrown_dist.bounds.propagate import bound_outputs
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.graph.ir import Graph
from abcrown_dist.parallel.clock import AgreedDeadline
from abcrown_dist.parallel.group import Group
from abcrown_dist.spec.property import Property
from abcrown_dist.weights.base import Weights
from abcrown_dist.weights.evaluate import flat_network
from abcrown_dist.weights.fsdp import without_values
from abcrown_dist.weights.place import place_weights
from tests.bounds import zoo
from tests.parallel import networks

METHODS = (
    "ibp", "crown", "crown-ibp", "forward", "forward+backward", "init-crown", "alpha-crown",
)  # fmt: skip

Values = tuple[Tensor, Tensor]  # lower, upper


@dataclass(frozen=True)
class Case:
    """One bounding of a network: how, over how many boxes, and in chunks of at most how many rows."""

    method: str
    domains: int = 1
    batch_rows: int = 1_000_000_000
    dtype: torch.dtype = torch.float32
    prop: str | None = None  # bound over its first box instead of random ones
    iterations: int = 20
    radius: float = 0.4
    budget: int | None = None

    def settings(self, shard_rows: bool) -> BoundSettings:
        return BoundSettings(
            self.method, AlphaSettings(self.iterations), batch_rows=self.batch_rows,
            budget=self.budget, shard_rows=shard_rows,
        )  # fmt: skip

    def box(self, graph: Graph) -> Box:
        if self.prop is not None:
            return networks.real_box(graph, Path(self.prop), self.dtype)
        return zoo.boxes(graph, self.domains, self.dtype, self.radius)


@dataclass(frozen=True)
class Mode:
    """Where weights live, and whether ranks take different rows."""

    name: str = "none"
    prefetch: bool = False
    shard_rows: bool = False

    def place(self, name: str, group: Group, dtype: torch.dtype = torch.float32) -> Weights:
        graph = networks.graph(name)
        if group.rank:
            graph = without_values(graph)
        return place_weights(
            graph, self.name, group, dtype, torch.device("cpu"),
            prefetch=self.prefetch, shard_rows=self.shard_rows,
        )  # fmt: skip


def own_box(weights: Weights, box: Box) -> Box:
    """A rank's part of a box."""
    return Box(
        {name: weights.own(name, value) for name, value in box.lower.items()},
        {name: weights.own(name, value) for name, value in box.upper.items()},
    )


def bounds(group: Group, name: str, mode: Mode, cases: Sequence[Case]) -> list[dict[str, Values]]:
    """By case, bounds of all neurons of every output."""
    placed: dict[torch.dtype, Weights] = {}
    found = []
    for case in cases:
        if case.dtype not in placed:
            placed[case.dtype] = mode.place(name, group, case.dtype)
        found.append(bounds_of(placed[case.dtype], case, mode.shard_rows))
    return found


def bounds_of(weights: Weights, case: Case, shard_rows: bool = False) -> dict[str, Values]:
    """Bounds of all neurons of every output."""
    box = own_box(weights, case.box(weights.graph))
    with torch.no_grad():
        result = bound_outputs(weights, box, case.settings(shard_rows))
    return {
        key: (
            weights.whole(key, value.lower).clone(),
            weights.whole(key, value.upper).clone(),
        )
        for key, value in result.items()
    }


def values_and_gradients(group: Group, name: str, mode: Mode, points: Tensor) -> tuple[Tensor, Tensor]:
    """The network at `points` (B, inputs), and the gradient of a weighted sum of all outputs."""
    weights = mode.place(name, group)
    x = points.clone().requires_grad_()
    y = flat_network(weights.graph, weights)(x)
    (y * torch.linspace(-1, 2, y.numel()).reshape(y.shape)).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def refutation(
    group: Group,
    name: str,
    mode: Mode,
    prop: Property,
    method: str,
    seconds: float = 1000,
    widen: bool = False,
) -> Refutation:
    """What bounds of all disjuncts prove; `widen` turns the weights into float64 first."""
    weights: Weights | None = mode.place(name, group)
    if widen:
        assert weights is not None
        weights = weights.to(torch.float64)
    assert weights is not None
    settings = BoundSettings(method, AlphaSettings(10), batch_rows=4, shard_rows=mode.shard_rows)
    return refute(
        weights, prop, range(len(prop.disjuncts)), settings, batch_size=2,
        largest=float(torch.finfo(torch.float32).max), deadline=AgreedDeadline(seconds, None, group),
    )  # fmt: skip
