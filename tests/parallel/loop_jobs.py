"""Searches over intervals of a line, by one process or by every rank of a pool."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from abcrown_dist.attack.probe import Candidate, Tried
from abcrown_dist.bab.crew import Crew
from abcrown_dist.bab.domains import Domains, child_ident, concatenate
from abcrown_dist.bab.loop import Loop
from abcrown_dist.bab.search import Course, LoopSettings, Round, Search, Start
from abcrown_dist.bab.splitter import Bounded, Branched, Examined, Splitter
from abcrown_dist.config.schema import Parallel
from abcrown_dist.parallel.group import ALONE, Group
from abcrown_dist.parallel.mesh import Mesh
from abcrown_dist.spec.property import Witness
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.util.errors import DeadlineExceeded
from abcrown_dist.weights.base import Weights

DEEP = 10**6
NO_NETWORK = cast(Weights, SimpleNamespace(device=torch.device("cpu"), group=ALONE))


class Halving:
    """Intervals of the line: margin  m - width  at the mid-point, refuted when positive.

    Args:
        need: by goal, the m: a search must split until the width is below it. NaN: bounds are no numbers.
        leaf_depth: from which depth on domains are leaves.
        leaves_proven: what the exact answer on leaves is.
        solved: intervals that end below this are refuted, whatever their width.
    """

    weights = NO_NETWORK

    def __init__(
        self,
        need: Sequence[float],
        leaf_depth: int = DEEP,
        leaves_proven: bool = False,
        solved: float = -1.0,
    ) -> None:
        self.need = torch.tensor(need, dtype=torch.float64)
        self.disjuncts = tuple(10 + goal for goal in range(len(need)))
        self.leaf_depth, self.leaves_proven, self.solved = leaf_depth, leaves_proven, solved
        self.batches: list[int] = []

    def roots(self) -> Domains:
        goal = torch.arange(len(self.need))
        ends = torch.zeros(len(goal), 1, dtype=torch.float64)
        start = torch.full((len(goal),), -torch.inf, dtype=torch.float64)
        return Domains(start, goal, child_ident(goal, goal), 0 * goal, {"low": ends, "high": ends + 1})

    def bound(self, domains: Domains) -> Bounded:
        self.batches.append(len(domains))
        low, high = domains.state["low"][:, 0], domains.state["high"][:, 0]
        margin = self.need[domains.goal] - (high - low)
        margin = torch.where(high <= self.solved, 1.0, margin)
        found = dataclasses.replace(domains, margin=margin)
        return Bounded(found, margin > 0, torch.zeros_like(margin > 0), ((low + high) / 2)[:, None])

    def branch(self, domains: Domains, levels: int) -> Branched:
        done = domains.depth >= self.leaf_depth
        leaves, domains = domains.select(done), domains.select(~done)
        for _ in range(levels):
            low, high = domains.state["low"], domains.state["high"]
            middle = (low + high) / 2
            parts = [
                dataclasses.replace(
                    domains,
                    ident=child_ident(domains.ident, torch.full_like(domains.ident, side)),
                    depth=domains.depth + 1,
                    state={"low": middle if side else low, "high": high if side else middle},
                )
                for side in (0, 1)
            ]
            domains = concatenate(parts)
        return Branched(domains, leaves)

    def examine(self, leaves: Domains) -> Examined:
        proven = torch.full((len(leaves),), self.leaves_proven) | (leaves.state["high"][:, 0] <= self.solved)
        return Examined(proven, torch.ones(len(leaves), dtype=torch.float64), leaves.state["low"])

    def columns(self) -> dict[str, Tensor]:
        return {}

    def root(self) -> dict[str, Tensor]:
        return {}


class Faulty:
    """A splitter that raises `error` whenever it is to bound more than `most` domains, from some call on."""

    def __init__(self, inner: Splitter, most: int, error: BaseException, start: int = 0) -> None:
        self.inner, self.most, self.error, self.start = inner, most, error, start
        self.disjuncts, self.weights = inner.disjuncts, inner.weights
        self.calls = self.failures = 0

    def roots(self) -> Domains:
        return self.inner.roots()

    def bound(self, domains: Domains) -> Bounded:
        self.calls += 1
        if len(domains) > self.most and self.calls > self.start:
            self.failures += 1
            raise self.error
        return self.inner.bound(domains)

    def branch(self, domains: Domains, levels: int) -> Branched:
        return self.inner.branch(domains, levels)

    def examine(self, leaves: Domains) -> Examined:
        return self.inner.examine(leaves)

    def columns(self) -> Any:
        return self.inner.columns()

    def root(self) -> Any:
        return self.inner.root()


class Mask:
    """A probe to which those points look like counterexamples that `hits(disjuncts, points)` is true of."""

    most = 16

    def __init__(self, hits: Callable[[Sequence[int], Tensor], Tensor | bool] = lambda *_: False) -> None:
        self.hits = hits

    def measure(self, disjuncts: Sequence[int], points: Tensor) -> Tried:
        assert len(disjuncts) == len(points) > 0
        hit = torch.as_tensor(self.hits(disjuncts, points)).expand(len(points))
        missing = torch.where(hit, -1.0, 1.0).double()
        return Tried(torch.tensor(disjuncts), points, missing)

    def descend(self, tried: Tried) -> Tried:
        assert 0 < len(tried.owners) <= self.most
        return tried


def believe(candidates: Sequence[Candidate]) -> Witness | None:
    """The first candidate is a counterexample."""
    disjunct, x = candidates[0]
    return Witness(x.tolist(), [], disjunct)


def doubt(candidates: Sequence[Candidate]) -> Witness | None:
    """No candidate is one."""
    assert candidates
    return None


@dataclass(frozen=True)
class Task:
    """One search by several ranks.

    Attributes:
        need, leaf_depth, leaves_proven, solved: see `Halving`.
        fault: rank, most, error, start: see `Faulty`.
        hit: the point that is a counterexample.
        parts: every rank starts with one interval of these, for goal 0, instead of the roots.
        options: of `LoopSettings`.
        parallel: of the mesh.
    """

    need: tuple[float, ...]
    leaf_depth: int = DEEP
    leaves_proven: bool = False
    solved: float = -1.0
    fault: tuple[int, int, BaseException, int] | None = None
    hit: float | None = None
    parts: tuple[tuple[float, float], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    parallel: Parallel = dataclasses.field(default_factory=Parallel)


@dataclass(frozen=True)
class Result:
    """What one rank knows at the end."""

    late: bool
    search: Search
    failures: int
    own: int  # domains that it bounded itself

    def common(self) -> tuple[Any, ...]:
        """What all ranks must know alike."""
        s = self.search
        rounds = [dataclasses.replace(r, seconds=0) for r in s.rounds]
        witness = None if s.witness is None else (s.witness.disjunct, s.witness.inputs)
        return self.late, s.refuted, s.given_up, s.reason, s.margins, s.visited, s.verified, witness, rounds


def search_by(group: Group, task: Task) -> Result:
    """A search by all ranks of a group."""
    crew = Crew(Mesh.of(group, task.parallel))
    halving = Halving(task.need, task.leaf_depth, task.leaves_proven, task.solved)
    splitter: Splitter = halving
    if task.fault is not None and task.fault[0] == group.rank:
        splitter = Faulty(halving, *task.fault[1:])
    probe = Mask(lambda _, points: points[:, 0] == task.hit)
    search, late = Search(), False
    settings = LoopSettings(**{"batch": 8, "min_batch_ratio": 0.01, **dict(task.options)})
    start = None
    if task.parts:
        roots = halving.roots().select(slice(0, 1))
        low, high = task.parts[crew.group.rank]
        state = {"low": torch.full((1, 1), low).double(), "high": torch.full((1, 1), high).double()}
        mine = dataclasses.replace(roots, ident=roots.ident + crew.group.rank, state=state)
        start = Start(Course(halving.disjuncts), [mine])
    with torch.no_grad():
        loop = Loop(splitter, settings, crew, probe, believe, Deadline(), search, lambda _: None)
        try:
            loop.run(start)
        except DeadlineExceeded:
            late = True
    return Result(late, search, getattr(splitter, "failures", 0), sum(halving.batches))


def run(
    splitter: Splitter,
    hits: Callable[[Sequence[int], Tensor], Tensor | bool] = lambda *_: False,
    deadline: Deadline | None = None,
    search: Search | None = None,
    confirm: Callable[[Sequence[Candidate]], Witness | None] = believe,
    start: Start | None = None,
    **options: Any,
) -> tuple[Search, list[Round]]:
    """A search by this process."""
    search, rounds = search or Search(), list[Round]()
    settings = LoopSettings(**{"batch": 4, **options})
    with torch.no_grad():
        Loop(
            splitter, settings, Crew(), Mask(hits), confirm, deadline or Deadline(), search, rounds.append
        ).run(start)
    return search, rounds
