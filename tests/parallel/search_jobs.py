"""Whole verifications on the ranks of a pool, with a record of every domain that they bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from abcrown_dist.bab.crew import Crew
from abcrown_dist.bab.domains import Domains
from abcrown_dist.bab.split_input import InputSplitter
from abcrown_dist.bab.split_relu import ReluSplitter
from abcrown_dist.bab.splitter import Bounded
from abcrown_dist.parallel.clock import AgreedDeadline
from abcrown_dist.parallel.group import Group
from abcrown_dist.problem import Instance
from abcrown_dist.report.progress import Progress
from abcrown_dist.spec.property import Witness
from abcrown_dist.spec.vnnlib1 import load_vnnlib
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.verify import Outcome, verify
from tests import flow

_SECONDS = 1000.0  # far more than a pool grants a job: no run may end by its clock


@dataclass(frozen=True)
class Trial:
    """A verification, as files and command-line words."""

    model: Path
    prop: Path
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """A mesh of `shards` x `domain` ranks."""

    mode: str
    shards: int
    domain: int

    def __str__(self) -> str:
        return f"{self.mode}-{self.shards}x{self.domain}"

    @property
    def size(self) -> int:
        return self.shards * self.domain

    @property
    def alone(self) -> Layout:
        """One process with the same mode, hence with the same chunks."""
        return Layout(self.mode, 1, 1)

    def words(self) -> tuple[str, ...]:
        degrees = "--parallel.shards", str(self.shards), "--parallel.domain", str(self.domain)
        return ("--parallel.mode", self.mode, *degrees)

    def holders(self, found: Sequence[Finished]) -> list[Finished]:
        """The first of every set of ranks that hold the same domains."""
        return list(found[:: self.shards if self.mode == "tp" else 1])


class Entry(NamedTuple):
    """One bounded domain.

    Attributes:
        step: rounds that all ranks had agreed on by then, over all searches of the run.
        dtype: of the weights that bounded it.
    """

    step: int
    dtype: str
    ident: int
    goal: int
    depth: int
    proven: bool
    margin: float


class Totals(NamedTuple):
    """What a round has in common on all ranks, whatever their number."""

    number: int
    open: int
    verified: int
    visited: int
    depth: int
    worst: float


@dataclass(frozen=True)
class Finished:
    """The end of a verification on one rank, and the domains that this rank bounded."""

    verdict: str
    reason: str
    domains: int
    refuted: frozenset[int]
    witness: Witness | None
    rounds: list[Totals]
    trace: list[Entry]


class _Recorder:
    """Notes every domain that any splitter bounds while `running`."""

    def __init__(self) -> None:
        self.step = 0
        self.trace: list[Entry] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        with ExitStack() as stack:
            for kind in (ReluSplitter, InputSplitter):
                stack.enter_context(mock.patch.object(kind, "bound", self._noting(kind.bound)))
            stack.enter_context(mock.patch.object(Crew, "agree", self._counting(Crew.agree)))
            yield

    def _noting(self, bound: Callable[..., Bounded]) -> Callable[..., Bounded]:
        def method(splitter: Any, domains: Domains) -> Bounded:
            found = bound(splitter, domains)
            columns = [found.domains.ident, found.domains.goal, found.domains.depth, found.proven]
            rows = zip(*(column.tolist() for column in [*columns, found.domains.margin]), strict=True)
            dtype = str(splitter.weights.dtype).removeprefix("torch.")
            self.trace += [Entry(self.step, dtype, *row) for row in rows]
            return found

        return method

    def _counting(self, agree: Callable[..., Any]) -> Callable[..., Any]:
        def method(*arguments: Any) -> Any:
            self.step += 1
            return agree(*arguments)

        return method


def search(group: Group, trial: Trial, layout: Layout) -> Finished:
    """Verify on all ranks of a group; each answer is checked by `flow.check_outcome`."""
    config = flow.configure(trial.model, trial.prop, *layout.words(), *trial.words)
    deadline = AgreedDeadline(_SECONDS, None, group) if group.size > 1 else Deadline(_SECONDS)
    recorder = _Recorder()
    with recorder.running():
        instance = Instance(trial.model, trial.prop, _SECONDS)
        outcome = verify(config, instance, deadline, Progress(mode="none"), group)
    flow.check_outcome(outcome, load_vnnlib(trial.prop))
    return _finished(outcome, recorder.trace)


def searches(group: Group, trials: Sequence[Trial], layout: Layout) -> list[Finished]:
    """One verification after the other."""
    return [search(group, trial, layout) for trial in trials]


def _finished(outcome: Outcome, trace: list[Entry]) -> Finished:
    refuted = frozenset(index for index, bound in outcome.bounds.items() if bound.refuted)
    rounds = [Totals(r.number, r.open, r.verified, r.visited, r.depth, r.worst) for r in outcome.rounds]
    return Finished(
        outcome.verdict.value, outcome.reason, outcome.domains, refuted, outcome.witness, rounds, trace
    )
