"""What a search is given, what it finds, and what it takes to go on with it later."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from abcrown_dist.bab.domains import Domains
from abcrown_dist.bab.splitter import Splitter
from abcrown_dist.spec.property import Witness

Candidate = tuple[int, np.ndarray]
"""A disjunct, and a flat input (float64) that looks like a counterexample to it."""

# Replays points that look like counterexamples, the same ones on all ranks: the first that is one.
Confirm = Callable[[Sequence[Candidate]], "Witness | None"]


class Tried(Protocol):
    """Points that have been tried as counterexamples, see `attack.probe.Tried`."""

    @property
    def missing(self) -> Tensor: ...
    def select(self, index: Tensor) -> Tried: ...
    def promising(self) -> list[Candidate]: ...


class Probe(Protocol):
    """Tries points (N, inputs), the k-th of which might fulfil the k-th disjunct of a list."""

    most: int  # points to descend from in one round

    def measure(self, disjuncts: Sequence[int], points: Tensor) -> Tried: ...
    def descend(self, tried: Any) -> Tried: ...


@dataclass(frozen=True)
class LoopSettings:
    """How domains go through the loop.

    Attributes:
        batch: domains split in one round.
        min_batch_ratio: while fewer than this share of a batch is open, each is split several times at once.
        max_domains: open domains above which the search gives up.
        max_rounds, max_visited: rounds, or domains bounded, after which it does.
        device_bytes: memory that waiting domains may take on the device.
        forced: do the same work whatever the number of ranks: the most urgent domains of all of them next.
    """

    batch: int = 64
    min_batch_ratio: float = 0.1
    max_domains: float = math.inf
    max_rounds: float = math.inf
    max_visited: float = math.inf
    device_bytes: int = 1 << 30
    forced: bool = False


@dataclass
class Search:
    """What branch and bound has found; grows while it goes on.

    Attributes:
        refuted: disjuncts that cannot be fulfilled.
        given_up: disjuncts with leaves that are within rounding of proof.
        witness: a confirmed counterexample, which ends the search.
        reason: why it ended without an answer; empty if it did not.
        rounds: its course.
        margins: by disjunct, the least margin with which a domain of it was refuted.
        visited, verified: domains that were bounded, and those of them that were refuted.
    """

    refuted: set[int] = field(default_factory=set)
    given_up: set[int] = field(default_factory=set)
    witness: Witness | None = None
    reason: str = ""
    rounds: list[Round] = field(default_factory=list)
    margins: dict[int, float] = field(default_factory=dict)
    visited: int = 0
    verified: int = 0


@dataclass(frozen=True)
class Course:
    """How far a loop has come, all ranks together: with its domains, all that it takes to go on.

    Attributes:
        goals: the disjunct of every goal.
        rounds, visited, verified: so far.
        given_up: goals with leaves that nothing could decide.
        margins: by goal, the least margin with which a domain of it was refuted.
    """

    goals: tuple[int, ...]
    rounds: int = 0
    visited: int = 0
    verified: int = 0
    given_up: tuple[int, ...] = ()
    margins: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Start:
    """A loop to take up: its course, and this rank's domains."""

    course: Course
    domains: Sequence[Domains]


class Keeper(Protocol):
    """Keeps the state of a search now and then."""

    def due(self) -> bool:
        """Whether this rank wants it kept now; one is enough."""
        ...

    def keep(self, domains: Sequence[Domains], splitter: Splitter, course: Course) -> None:
        """Keep it. All ranks call this together."""
        ...


@dataclass(frozen=True)
class Round:
    """State after one round.

    Attributes:
        seconds: since the run began.
        number: of the round, from 1.
        open: domains in the store.
        verified: domains refuted so far.
        visited: domains bounded so far.
        worst: least margin (lower bound minus right-hand side) of an open domain; infinity when none is.
        depth: most decisions of a domain in this round.
        memory: bytes of the store.
    """

    seconds: float
    number: int
    open: int
    verified: int
    visited: int
    worst: float
    depth: int
    memory: int

    def line(self, rate: float) -> str:
        """One line for the progress display, given domains per second."""
        return (
            f"round {self.number}: {self.open} open, {self.verified} done, worst {self.worst:+.4g}, "
            f"{rate:.0f}/s, depth {self.depth}, {self.memory / 2**20:.1f} MiB"
        )
