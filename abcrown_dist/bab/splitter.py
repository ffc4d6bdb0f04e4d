"""What the loop asks of a way to split domains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from abcrown_dist.bab.domains import Domains, concatenate
from abcrown_dist.weights.base import Weights


@dataclass(frozen=True)
class Bounded:
    """N domains with their new bounds.

    Attributes:
        domains: with new margins and states, in the order in which they were given.
        proven: (N,) bool, refuted beyond rounding.
        doubtful: (N,) bool, open only because a bound is within its rounding error of proof.
        points: (N, inputs) float64, where the best bound of each takes its minimum: the likeliest
            counterexamples that a bound can name.
    """

    domains: Domains
    proven: Tensor
    doubtful: Tensor
    points: Tensor

    def first(self, count: int) -> Bounded:
        """The first `count` domains."""
        if count == len(self.proven):
            return self
        kept = torch.arange(count, device=self.proven.device)
        return Bounded(
            self.domains.select(kept), self.proven[:count], self.doubtful[:count], self.points[:count]
        )


def joined(parts: Sequence[Bounded]) -> Bounded:
    """All domains of several parts, one after the other."""
    return Bounded(
        concatenate([part.domains for part in parts]),
        torch.cat([part.proven for part in parts]),
        torch.cat([part.doubtful for part in parts]),
        torch.cat([part.points for part in parts]),
    )


@dataclass(frozen=True)
class Branched:
    """What became of N domains.

    Attributes:
        children: to be bounded next.
        leaves: domains that cannot be split any more.
    """

    children: Domains
    leaves: Domains


def by_levels(domains: Domains, free: Tensor, levels: int) -> Iterator[tuple[Domains, int]]:
    """Domains that are split equally often: `levels` times, or as often as `free` (N,) >= 1 allows."""
    depth = free.clamp(max=levels)
    for count in depth.unique().tolist():
        chosen = depth == count
        yield domains if bool(chosen.all()) else domains.select(chosen), count


@dataclass(frozen=True)
class Examined:
    """The exact answer on N leaves.

    Attributes:
        proven: (N,) bool.
        margin: (N,) float64, positive where one is proven: by how much its constraints cannot be met.
        points: (N, inputs) float64, the least violated point of each.
    """

    proven: Tensor
    margin: Tensor
    points: Tensor


class Splitter(Protocol):
    """A kind of domain: how to bound it, how to split it, what to do where nothing is left to split."""

    disjuncts: tuple[int, ...]  # the property's disjunct of every goal
    weights: Weights  # of the network

    def roots(self) -> Domains:
        """One domain per goal, not bounded yet."""
        ...

    def bound(self, domains: Domains) -> Bounded:
        """Bound domains, from what their parents knew."""
        ...

    def branch(self, domains: Domains, levels: int) -> Branched:
        """Split each domain into 2^levels children, or fewer where it has less left to split.

        What becomes of a domain must not depend on those that come with it.
        """
        ...

    def examine(self, leaves: Domains) -> Examined:
        """Decide leaves exactly, as far as the arithmetic allows."""
        ...

    def columns(self) -> Mapping[str, Tensor]:
        """For states whose last axis holds a rank's own neurons only: the numbers of these among all."""
        ...

    def root(self) -> Mapping[str, Tensor]:
        """All that domains rest on, on all neurons, for a checkpoint; every rank must ask."""
        ...
