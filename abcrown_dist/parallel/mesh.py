"""The world as a mesh: ranks that share the weights, times ranks that work on different domains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from typing import TypeVar

import torch
import torch.distributed as dist

from abcrown_dist.config.schema import Parallel
from abcrown_dist.parallel.group import ALONE, Group
from abcrown_dist.util.errors import ConfigError, DeadlineExceeded

T = TypeVar("T")


@dataclass(frozen=True)
class Mesh:
    """All ranks, seen from one of them.

    Attributes:
        world: all of them.
        weights: those that share one copy of the weights with this one.
        across: those that have its place in every copy.
        domains: those among which branch and bound deals out domains. Under tp, which cuts every tensor by
            neuron, the ranks of a copy hold the same domains: `across`. Else all ranks hold different ones.
    """

    world: Group = ALONE
    weights: Group = ALONE
    across: Group = ALONE
    domains: Group = ALONE

    @classmethod
    def of(cls, world: Group, parallel: Parallel) -> Mesh:
        """The mesh of a settled mode; all ranks must call it.

        Raises:
            ConfigError: see `degrees`.
        """
        shards, _ = degrees(parallel, world.size)
        weights, across = _subgroups(world, shards)
        return cls(world, weights, across, across if parallel.mode == "tp" else world)

    @property
    def alike(self) -> int:
        """How many consecutive ranks hold the same domains."""
        return self.world.size // self.domains.size

    def together(self, work: Callable[[], T]) -> list[T]:
        """The small picklable result of `work` by each copy of the weights, in their order, on every rank.

        Raises:
            DeadlineExceeded: on all ranks, when one of them ran out of time.
        """
        if self.across.size == 1:
            return [work()]
        late: DeadlineExceeded | None = None
        value: T | None = None
        try:
            value = work()
        except DeadlineExceeded as error:
            late = error
        told = self.world.share_all((value, None if late is None else str(late)))
        for _, message in told:
            if message is not None:
                raise late or DeadlineExceeded(message)
        return [value for value, _ in told[:: self.weights.size]]  # type: ignore[misc]


def degrees(parallel: Parallel, size: int) -> tuple[int, int]:
    """How many ranks share one copy of the weights, and how many copies there are.

    Raises:
        ConfigError: they do not multiply to the number of ranks.
    """
    if parallel.mode == "none" and parallel.shards not in ("auto", 1):
        raise ConfigError(f"parallel.mode: none shares no weights, not among {parallel.shards} ranks")
    shards, domain = parallel.shards, parallel.domain
    if parallel.mode == "none":
        shards = 1
    if not isinstance(shards, int):
        shards = max(1, size // domain) if isinstance(domain, int) else size
    if not isinstance(domain, int):
        domain = max(1, size // shards)
    if shards * domain != size:
        raise ConfigError(
            f"parallel.shards {shards} times parallel.domain {domain} is not {size}, the number of ranks"
        )
    return shards, domain


@cache
def _subgroups(world: Group, shards: int) -> tuple[Group, Group]:
    """This rank's groups by copy and by place; made once, since groups cannot be taken back in step."""
    if shards == 1:
        return ALONE, world
    if shards == world.size:
        return world, ALONE
    copies = world.size // shards
    rows = [range(copy * shards, (copy + 1) * shards) for copy in range(copies)]
    columns = [range(place, world.size, shards) for place in range(shards)]
    return _own(world, rows), _own(world, columns)


def _own(world: Group, parts: list[range]) -> Group:
    """Form all groups, as torch demands of every rank; returns the one that this rank is in."""
    found = ALONE
    with world.together():
        for part in parts:
            handle = dist.new_group(list(part), timeout=timedelta(seconds=world.timeout))
            if world.rank in part:
                found = replace(world, rank=part.index(world.rank), size=len(part), handle=handle)
    if world.fused:
        found.warm_up(torch.device("cuda", torch.cuda.current_device()))
    return found
