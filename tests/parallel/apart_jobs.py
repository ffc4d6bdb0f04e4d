"""Shards visited by ranks that do different work: what they see, keep whole and send."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from abcrown_dist.graph.ir import Node
from abcrown_dist.parallel.group import Group
from abcrown_dist.weights.apart import ApartWeights, apart, finish
from abcrown_dist.weights.apart import _Meeting as Meeting
from abcrown_dist.weights.base import Weights
from abcrown_dist.weights.fsdp import ShardedWeights, without_values
from abcrown_dist.weights.local import LocalWeights
from abcrown_dist.weights.maps import AffineMap
from tests.bab.splitters import relu_splitter
from tests.parallel import networks
from tests.parallel.counting import Census, settled
from tests.parallel.jobs import Case, Values, bounds_of
from tests.searches import draw


@dataclass(frozen=True)
class Course:
    """What a rank does.

    Attributes:
        lengths: visits of every rank; 0: it only serves the others.
        seed: of what is visited; the same on all ranks where `aligned`.
        nested: a visit may go on during another one.
        wide: some visits are in float64.
        stretches: how often all ranks finish.
    """

    lengths: tuple[int, ...]
    seed: int
    prefetch: bool
    aligned: bool = False
    nested: bool = True
    wide: bool = True
    stretches: int = 2


@dataclass(frozen=True)
class Seen:
    """What a rank saw: visits, most nodes that were whole at once, tensors that it sent to single ranks."""

    visits: int
    most: int
    sent: int


def _tensors(affine: AffineMap) -> Mapping[str, Tensor]:
    return {name: value for name, value in vars(affine).items() if isinstance(value, Tensor)}


def _check(weights: Weights, local: LocalWeights, node: Node, affine: AffineMap) -> None:
    """The very bits of the model are there."""
    with local.visit(node) as expected:
        theirs, ours = _tensors(affine), _tensors(expected)
        assert theirs.keys() == ours.keys() and len(ours) >= 1
        for key, value in ours.items():
            assert theirs[key].dtype == value.dtype and torch.equal(theirs[key], value), (node.name, key)


@contextlib.contextmanager
def watched(census: Census) -> Iterator[list[int]]:
    """Count whole nodes, and tensors that are sent to single ranks."""
    sent: list[int] = []
    empty, exchange = Meeting._empty, Group.exchange

    def counted_empty(self: Meeting, number: int) -> Any:
        census.before()
        found = empty(self, number)
        census.enter(found.buffers)
        return found

    def counted_exchange(self: Group, sends: Sequence[Any], receives: Sequence[Any]) -> None:
        sent.append(len(sends) + len(receives))
        exchange(self, sends, receives)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Meeting, "_empty", counted_empty)
        patch.setattr(Group, "exchange", counted_exchange)
        yield sent


def visits(group: Group, name: str, course: Course) -> Seen:
    """Visit at random, each rank by itself."""
    graph = networks.graph(name)
    shared = ShardedWeights(
        graph if group.rank == 0 else without_values(graph), group, prefetch=course.prefetch
    )
    weights = apart(shared)
    wide = weights.to(torch.float64)
    assert isinstance(weights, ApartWeights) and isinstance(wide, ApartWeights)
    assert weights.group.size == wide.group.size == 1
    ways = [(weights, LocalWeights(graph)), (wide, LocalWeights(graph, torch.float64))]
    nodes = [node for node in graph if node.constants() and set(node.constants()) <= shared.shards.keys()]
    random = np.random.default_rng([course.seed, 0 if course.aligned else group.rank])
    limit = 1 + course.prefetch if not course.nested else 3 + course.prefetch
    census, done = Census(limit), 0

    def visit(names: list[str], depth: int = 0) -> None:
        nonlocal done
        chosen, local = ways[int(course.wide and random.random() < 0.3)]
        if random.random() < 0.4:
            promised = names if random.random() < 0.7 else names[::-1]
            chosen.expect(promised)
        node = graph[names[0]]
        with chosen.visit(node) as affine:
            _check(chosen, local, node, affine)
            if course.nested and depth < 2 and random.random() < 0.3:
                visit([nodes[int(random.integers(len(nodes)))].name], depth + 1)
            _check(chosen, local, node, affine)
        done += 1

    with watched(census) as sent:
        for _ in range(course.stretches):
            names = [nodes[int(k)].name for k in random.integers(len(nodes), size=course.lengths[group.rank])]
            for k in range(len(names)):
                visit(names[k : k + 3])
            finish(weights)
        settled(lambda: census.alive, 0)
    assert census.alive == 0
    return Seen(done, census.most, sum(sent))


def bounds_apart(group: Group, name: str, method: str, prefetch: bool) -> dict[str, Values]:
    """Bounds over another box on every rank."""
    graph = networks.graph(name)
    weights: Weights = LocalWeights(graph)
    if group.size > 1:
        mine = graph if group.rank == 0 else without_values(graph)
        weights = apart(ShardedWeights(mine, group, prefetch=prefetch))
    found = bounds_of(weights, case_of(group.rank, method))
    finish(weights)
    return found


def case_of(rank: int, method: str) -> Case:
    """Boxes of different widths, and different numbers of steps."""
    return Case(method, 1 + rank % 2, iterations=3 + 2 * rank, radius=0.1 + 0.2 * rank)


def children_apart(group: Group, prefetch: bool, box: int | None = None) -> list[Tensor]:
    """Margins and points of a domain's children and grandchildren under beta-CROWN, by box of a property."""
    case = draw("convolutional", 24, disjuncts=4, most=8)  # four boxes
    graph = case.model.graph
    weights: Weights = LocalWeights(graph)
    if group.size > 1:
        mine = graph if group.rank == 0 else without_values(graph)
        weights = apart(ShardedWeights(mine, group, prefetch=prefetch))
    prop = case.property([0.02] * 4)
    found = []
    with torch.no_grad():
        chosen = group.rank if box is None else box
        splitter = relu_splitter(weights, prop, chosen)  # type: ignore[arg-type]
        domains = splitter.roots()
        for levels in (1 + chosen % 2, 1):
            bounded = splitter.bound(domains)
            found += [bounded.domains.margin, bounded.points, bounded.proven]
            domains = splitter.branch(bounded.domains, levels).children
            if not len(domains):
                break
        else:
            found.append(splitter.bound(domains).domains.margin)
    finish(weights)
    return found
