"""Foretold memory against what the meter counts, on the networks of the sharding benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from abcrown_dist.bounds.alpha import AlphaSettings
from abcrown_dist.bounds.concretize import Box
from abcrown_dist.bounds.forecast import Forecast, Task, forecast
from abcrown_dist.bounds.propagate import bound_outputs
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.graph.ir import Graph
from abcrown_dist.graph.load_torch import load_torch
from abcrown_dist.parallel.group import Group
from abcrown_dist.plan.predict import Choice
from abcrown_dist.util.memory import MemoryMeter
from abcrown_dist.weights.base import Weights
from abcrown_dist.weights.footprint import Mode, footprint
from abcrown_dist.weights.fsdp import without_values
from abcrown_dist.weights.place import place_weights
from tests.bounds import zoo

TOLERANCE = 0.15
NONE, FSDP, ROWS, TP = Choice("none"), Choice("fsdp"), Choice("fsdp", True), Choice("tp")
ALL_ROWS = 1 << 40  # a budget that cuts nothing


@dataclass(frozen=True)
class Case:
    """784-width-...-width-10 with `depth` hidden layers, and how it is bounded.

    Depth 0 stands for two convolutions of `width` channels and more, and two dense layers.
    """

    width: int
    depth: int
    choice: Choice
    prefetch: bool = False
    rows: int | None = None
    method: str = "crown"

    def settings(self) -> BoundSettings:
        """Settings of the pass; all rows of a layer at once unless `rows` says otherwise."""
        return BoundSettings(
            method=self.method,
            alpha=AlphaSettings(iteration=2),
            batch_rows=self.rows or 1_000_000_000,
            budget=ALL_ROWS,
            gathered=self.choice.mode == "fsdp",
            shard_rows=self.choice.shard_rows,
        )


def network(case: Case) -> Graph:
    torch.manual_seed(42)
    if case.depth == 0:
        return convolutional(case.width)
    sizes = [784, *[case.width] * case.depth, 10]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return load_torch(nn.Sequential(*layers[:-1]), torch.zeros(1, 1, 28, 28)).graph


def convolutional(channels: int) -> Graph:
    module = nn.Sequential(
        nn.Conv2d(3, channels, 4, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 4, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(2 * channels * 64, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    return load_torch(module, torch.zeros(1, 3, 32, 32)).graph


def image(weights: Weights, loose: bool) -> Box:
    """A box around an image; or one so large that no neuron is stable, where an image leaves many so."""
    (name,) = weights.graph.inputs
    shape = (1, *weights.graph[name].shape)
    centre = torch.rand(shape, generator=torch.Generator().manual_seed(42))
    lower, upper = (centre - 0.02).clamp(0, 1), (centre + 0.02).clamp(0, 1)
    if loose:
        lower, upper = centre - 1, centre + 1
    return Box({name: weights.own(name, lower)}, {name: weights.own(name, upper)})


def resting(holder: object) -> Iterator[torch.Tensor]:
    """Tensors with values that an object of the package holds, however deep."""
    if isinstance(holder, torch.Tensor):
        if holder.device.type != "meta":
            yield holder
    elif isinstance(holder, dict):
        for item in holder.values():
            yield from resting(item)
    elif type(holder).__module__.startswith("abcrown_dist.weights"):
        yield from resting(vars(holder))


def measure(group: Group, case: Case) -> tuple[int, int]:
    """Bytes at rest and at the peak of a pass, on this rank."""
    mine: list[Graph] = []

    def build() -> Graph:
        mine.append(network(case))
        return without_values(mine[0])

    shapes = group.first(build)
    weights = place_weights(
        mine.pop() if mine else shapes, case.choice.mode, group, torch.float32, torch.device("cpu"),
        prefetch=case.prefetch, shard_rows=case.choice.shard_rows,
    )  # fmt: skip
    box = image(weights, loose=case.depth == 0)
    peaks = []
    for _ in range(3 if case.choice.mode == "fsdp" else 1):
        with torch.no_grad(), MemoryMeter(already=resting(weights)) as meter:
            bound_outputs(weights, box, case.settings())
        peaks.append(meter.peak_bytes)
    # Gloo's threads may let go of a gathered weight a moment too late for one of the passes.
    return meter.baseline, min(peaks)


def foretell(case: Case, size: int) -> Forecast:
    graph = without_values(network(case))
    placed = footprint(graph, case.choice.mode, size, prefetch=case.prefetch)
    return forecast(placed, case.settings(), Task(domains=1, rows=20, varying=graph.input_size))


def check(case: Case, size: int, pools: Any) -> None:
    found = pools(size).run(measure, case, seconds=3600)
    told = foretell(case, size)
    assert told.weights == max(rest for rest, _ in found)
    peak = max(peak for _, peak in found)
    assert told.peak == pytest.approx(peak, rel=TOLERANCE)


def cases(width: int, depth: int, sizes: Sequence[int] = (2, 4)) -> list[Any]:
    """Every choice at every number of ranks."""
    spread = [(size, choice) for size in sizes for choice in (FSDP, ROWS, TP)]
    return [
        pytest.param(size, Case(width, depth, choice), id=f"{width}x{depth}-{choice}-{size}")
        for size, choice in [(1, NONE), *spread]
    ]


@pytest.mark.parametrize(("size", "case"), cases(256, 4, [2]))
def test_small_networks(size: int, case: Case, pools: Any) -> None:
    check(case, size, pools)


@pytest.mark.parametrize(
    ("size", "case"),
    [
        (1, Case(256, 4, NONE, rows=64)),
        (2, Case(256, 4, FSDP, rows=64)),
        (2, Case(256, 4, FSDP, prefetch=True, rows=64)),
        (2, Case(256, 4, ROWS, prefetch=True)),
        (2, Case(256, 4, TP, rows=64)),
        (1, Case(256, 3, NONE, rows=128, method="alpha-crown")),
        (2, Case(256, 3, FSDP, rows=128, method="alpha-crown")),
        (2, Case(256, 3, TP, rows=128, method="alpha-crown")),
        (1, Case(256, 8, NONE, method="crown-ibp")),
        (2, Case(256, 8, FSDP, method="ibp")),
        (2, Case(256, 8, TP, method="crown-ibp")),
        (1, Case(8, 0, NONE)),
        (2, Case(8, 0, FSDP)),
        (2, Case(8, 0, TP)),
    ],
    ids=str,
)
def test_chunks_prefetch_and_methods(size: int, case: Case, pools: Any) -> None:
    check(case, size, pools)


def test_weights_at_rest(pools: Any) -> None:
    """Of networks with operations of every kind, ragged and padded: exactly."""
    found = pools(2).run(rest_of_all)
    for name, mode in found[0]:
        told = footprint(zoo.graph(name), mode, 2).rest
        assert told == max(rests[name, mode] for rests in found), (name, mode)


def rest_of_all(group: Group) -> dict[tuple[str, Mode], int]:
    """Bytes at rest on this rank, by network and mode."""
    found: dict[tuple[str, Mode], int] = {}
    modes: tuple[Mode, ...] = ("fsdp", "tp")
    for name in zoo.NAMES:
        for mode in modes:
            weights = place_weights(
                zoo.graph(name), mode, group, torch.float32, torch.device("cpu"),
                prefetch=False, shard_rows=False,
            )  # fmt: skip
            found[name, mode] = MemoryMeter(already=resting(weights)).baseline
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("size", "case"), [*cases(256, 4, [4]), *cases(1024, 4), *cases(1024, 8)])
def test_networks_of_the_benchmark(size: int, case: Case, pools: Any) -> None:
    check(case, size, pools)


@pytest.mark.huge
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("size", "case"), [*cases(4096, 4), *cases(4096, 8)])
def test_the_largest_networks_of_the_benchmark(size: int, case: Case, pools: Any) -> None:
    """Minutes each: `make test-huge`."""
    check(case, size, pools)
