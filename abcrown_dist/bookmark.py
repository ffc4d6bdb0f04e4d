"""Checkpoints of the main flow: where a run stands inside of a search, and how it goes on from there.

`bab.checkpoint` holds files, `bab.snapshot` domains and root bounds; here is the rest: the step of the
plan, the disjuncts, what is known so far, and of which network and property.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from abcrown_dist.bab.checkpoint import Checkpoint, Saved, read
from abcrown_dist.bab.crew import Crew
from abcrown_dist.bab.domains import Domains
from abcrown_dist.bab.search import Course, Round, Search, Start
from abcrown_dist.bab.snapshot import domain_tensors, own_domains, root_bounds
from abcrown_dist.bab.splitter import Splitter
from abcrown_dist.bounds.types import Relaxed
from abcrown_dist.config import Config
from abcrown_dist.config.keys import to_dict
from abcrown_dist.options import InputBranching, NeuronBranching, Step
from abcrown_dist.outcome import Outcome
from abcrown_dist.parallel.group import Group
from abcrown_dist.parallel.launch import World
from abcrown_dist.parallel.mesh import Mesh
from abcrown_dist.problem import Problem
from abcrown_dist.report.summary import ClauseBound
from abcrown_dist.util.deadline import Deadline, uninterrupted
from abcrown_dist.util.errors import ConfigError, LoadError, describe
from abcrown_dist.weights.base import Weights

T = TypeVar("T")
_log = logging.getLogger(__name__)
_ROUNDS, _RNG = "rounds", "rng"
INPUTS, NEURONS = "inputs", "neurons"


@dataclass
class Place:
    """Where a run stands; kept up to date while it searches.

    Attributes:
        step: number of the step in the plan.
        kind: of the search: neurons or inputs.
        precise: whether it is the second pass, in float64.
        dtype: in which the present search computes.
        open: disjuncts that nothing has refuted yet.
        wanted: those that the present pass is about.
        done: those of them whose search has ended.
        search: what the pass has found.
        bounds: of all disjuncts that were bounded or refuted.
    """

    step: int = 0
    kind: str = ""
    precise: bool = False
    dtype: str = ""
    open: set[int] = field(default_factory=set)
    wanted: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    search: Search = field(default_factory=Search)
    bounds: dict[int, ClauseBound] = field(default_factory=dict)

    def notes(self) -> dict[str, Any]:
        """As JSON values."""
        search = self.search
        return {
            "step": self.step,
            "kind": self.kind,
            "precise": self.precise,
            "dtype": self.dtype,
            **{name: sorted(getattr(self, name)) for name in ("open", "wanted", "done")},
            "search": {
                "refuted": sorted(search.refuted),
                "given_up": sorted(search.given_up),
                "reason": search.reason,
                "margins": sorted(search.margins.items()),
                "visited": search.visited,
                "verified": search.verified,
            },
            "bounds": [dataclasses.asdict(bound) for bound in self.bounds.values()],
        }

    @classmethod
    def of_notes(cls, notes: Mapping[str, Any], rounds: list[Round]) -> Place:
        """What `notes` gave."""
        found = notes["search"]
        search = Search(
            refuted=set(found["refuted"]),
            given_up=set(found["given_up"]),
            reason=found["reason"],
            margins={int(disjunct): float(margin) for disjunct, margin in found["margins"]},
            visited=found["visited"],
            verified=found["verified"],
            rounds=rounds,
        )
        bounds = [ClauseBound(**item) for item in notes["bounds"]]
        values: dict[str, Any] = {name: notes[name] for name in ("step", "kind", "precise", "dtype")}
        values |= {name: set(notes[name]) for name in ("open", "wanted", "done")}
        return cls(**values, search=search, bounds={bound.disjunct: bound for bound in bounds})


class CheckpointKeeper:
    """Writes checkpoints of the search at `place`; see `bab.search.Keeper`.

    Args:
        fingerprint: of network and property.
        written: whether the file there is a checkpoint that this run goes on from.
    """

    def __init__(
        self,
        config: Config,
        path: Path,
        mesh: Mesh,
        fingerprint: Mapping[str, str],
        deadline: Deadline,
        written: bool,
    ) -> None:
        self.place = Place()
        self.written = written
        self._files = Checkpoint(path, mesh.world)
        self._config, self._mesh, self._deadline = config, mesh, deadline
        self._fingerprint = dict(fingerprint)
        self._last = time.monotonic()

    def due(self) -> bool:
        """The first rank's clock decides for all."""
        waited = time.monotonic() - self._last
        return self._mesh.world.rank == 0 and waited >= self._config.bab.checkpoint_interval

    def keep(self, domains: Sequence[Domains], splitter: Splitter, course: Course) -> None:
        """Write one; if that fails, the previous one stands."""
        with uninterrupted():  # the last one is written when time is up
            self._keep(domains, splitter, course)
        self._last = time.monotonic()

    def _keep(self, domains: Sequence[Domains], splitter: Splitter, course: Course) -> None:
        tensors = {**domain_tensors(domains, splitter), _RNG: torch.get_rng_state()}
        root = splitter.root()  # on all ranks: they may have to put it together
        if self._mesh.world.rank == 0:
            tensors |= {**root, _ROUNDS: _round_rows(self.place.search.rounds)}
        notes = {
            "fingerprint": self._fingerprint,
            "config": to_dict(self._config),
            "seconds": self._deadline.elapsed(),
            "run": _run_id(),
            "holders": _holders(self._mesh),
            "course": dataclasses.asdict(course),
            "place": self.place.notes(),
        }
        self.written = self._files.save(tensors, notes) or self.written

    def remove(self) -> None:
        """Remove what this run, or the one that it goes on from, has written: nothing is left to do."""
        if self.written and self._mesh.world.rank == 0:
            self._files.remove()


class Resumed:
    """A checkpoint to go on from, read on every rank.

    Attributes:
        place: where the run stood.
        seconds: time that it had used.
        run: torchrun's name for the run that wrote it.
        path: of its manifest.

    Raises:
        LoadError: it is of another network or property, or damaged.
    """

    def __init__(self, saved: Saved, fingerprint: Mapping[str, str]) -> None:
        self._saved, self.path = saved, saved.path
        notes = saved.notes
        try:
            for what, digest in fingerprint.items():
                if notes["fingerprint"].get(what) != digest:
                    raise LoadError(f"the checkpoint is of another {what}")
            first = saved.part(0)
            self._root = {key: value for key, value in first.items() if key.startswith("root/")}
            self.place = Place.of_notes(notes["place"], _rounds(first[_ROUNDS]))
            course = notes["course"]
            self.course = Course(
                tuple(course["goals"]),
                course["rounds"],
                course["visited"],
                course["verified"],
                tuple(course["given_up"]),
                tuple((int(goal), float(margin)) for goal, margin in course["margins"]),
            )
            self.seconds, self.run = float(notes["seconds"]), str(notes["run"])
            self._holders = [[int(rank) for rank in ranks] for ranks in notes["holders"]]
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise LoadError(f"the checkpoint is damaged: {describe(error)}") from None

    def restore_random_numbers(self, rank: int, size: int) -> None:
        """Go on with this rank's random numbers, if there are as many ranks as there were."""
        if size == self._saved.size:
            torch.set_rng_state(self._saved.part(rank)[_RNG])

    def root(self, weights: Weights) -> Relaxed:
        """Root bounds of the search, for these weights."""
        return root_bounds(weights, self._root)

    def start(self, splitter: Splitter, crew: Crew) -> Start:
        """The search itself: this rank's domains, and its course."""
        place, goals, part = (crew.group.rank, crew.group.size), self.course.goals, self._saved.part
        domains = on_all(
            crew.mesh.world, lambda: own_domains(self._holders, part, goals, splitter, place)
        )
        return Start(self.course, domains)


def find_checkpoint(
    config: Config, mesh: Mesh, fingerprint: Mapping[str, str] | None, restarts: int
) -> Resumed | None:
    """The checkpoint that the user names, or that of a run which torchrun has started again.

    Raises:
        LoadError: the named one cannot be read, or does not fit.
        ConfigError: there are no files that a checkpoint could be told by.
    """
    named, kept = config.bab.resume, config.bab.checkpoint
    if named is None and kept is None:
        return None
    if fingerprint is None:
        raise ConfigError("bab.checkpoint and bab.resume need a network and a property in files")
    found = mesh.world.first(lambda: _named(named, None if not restarts else kept, fingerprint))
    if found is None:
        return None
    _log.info("resumed from a checkpoint after %.0f s", found.notes["seconds"])


    def work() -> Resumed:
        resumed = Resumed(found, fingerprint)
        resumed.restore_random_numbers(mesh.world.rank, mesh.world.size)
        return resumed

    return on_all(mesh.world, work)


def on_all(group: Group, work: Callable[[], T]) -> T:
    """`work` on every rank; when a file cannot be read on one of them, all know of it.

    Raises:
        LoadError: on all ranks alike.
    """
    value: T | None = None
    text = ""
    try:
        value = work()
    except LoadError as error:
        text = describe(error)
    for told in group.share_all(text):
        if told:
            raise LoadError(told)
    return value  # type: ignore[return-value]


def _run_id() -> str:
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


@dataclass
class Keeping:
    """Checkpoints of one run.

    Attributes:
        keeper: writes them; None: nobody asked.
        resumed: what to go on from; taken once.
        restarts: how often torchrun has started this run again. A rank that ran out of memory may just have
            been killed: each time, rounds get half as large.
    """

    keeper: CheckpointKeeper | None = None
    resumed: Resumed | None = None
    restarts: int = 0

    @classmethod
    def of(cls, config: Config, problem: Problem, deadline: Deadline) -> Keeping:
        """As configured, on all ranks together.

        Raises:
            LoadError, ConfigError: see `find_checkpoint`.
        """
        restarts, mesh = World.from_environment().restarts, problem.mesh
        resumed = find_checkpoint(config, mesh, problem.fingerprint, restarts)
        if resumed is not None:
            if resumed.seconds >= deadline.seconds and not restarts:
                raise ConfigError(
                    f"bab.resume: {resumed.seconds:.0f} s are used up; a larger bab.timeout lets it go on"
                )
            deadline.spend(resumed.seconds)
        keeper = None
        if config.bab.checkpoint is not None and problem.fingerprint is not None:
            path = mesh.world.first(lambda: Path(config.bab.checkpoint or "").absolute())
            own = resumed is not None and os.path.realpath(resumed.path) == os.path.realpath(path)
            keeper = CheckpointKeeper(config, path, mesh, problem.fingerprint, deadline, own)
        return cls(keeper, resumed, restarts)

    def go_to(self, steps: Sequence[Step], outcome: Outcome) -> int:
        """Where in a plan to begin; what a checkpoint knows is entered in `outcome`.

        Raises:
            ConfigError: the plan has no search of its kind.
        """
        if self.resumed is None:
            return 0
        place = self.resumed.place
        kinds = {NEURONS: NeuronBranching, INPUTS: InputBranching}
        numbers = [number for number, step in enumerate(steps) if isinstance(step, kinds[place.kind])]
        if not numbers:
            raise ConfigError(f"bab.resume: a search on {place.kind} was under way, which is not planned now")
        # Of several searches of a kind the later ones are the more patient.
        place.step = place.step if place.step in numbers else numbers[-1]
        outcome.open, outcome.bounds = set(place.open), dict(place.bounds)
        outcome.rounds = list(place.search.rounds)
        outcome.domains = place.search.visited
        return place.step

    def take(self, step: int) -> Resumed | None:
        """What the search in this step of the plan goes on from."""
        if self.resumed is None or self.resumed.place.step != step:
            return None
        found, self.resumed = self.resumed, None
        return found

    def end(self) -> None:
        """The run has its answer."""
        if self.keeper is not None:
            self.keeper.remove()


def _named(named: str | None, kept: str | None, fingerprint: Mapping[str, str]) -> Saved | None:
    """Read and check a checkpoint; the one that a run has kept itself need not be there."""
    if kept is not None and Path(kept).exists():
        try:
            saved = read(Path(kept).absolute())
            if Resumed(saved, fingerprint).run == _run_id():
                return saved
            _log.warning("not resumed: %s is of an earlier run; bab.resume goes on with it", kept)
        except LoadError as error:
            _log.warning("not resumed: %s", error)
    if named is None:
        return None
    saved = read(Path(named).absolute())
    Resumed(saved, fingerprint)
    return saved


def _holders(mesh: Mesh) -> list[list[int]]:
    """Ranks that hold the same domains, in the order of holders."""
    each = mesh.alike
    return [list(range(first, first + each)) for first in range(0, mesh.world.size, each)]


def _round_rows(rounds: Sequence[Round]) -> Tensor:
    """(rounds, numbers of a round) float64."""
    rows = [dataclasses.astuple(item) for item in rounds]
    return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), len(dataclasses.fields(Round)))


def _rounds(rows: Tensor) -> list[Round]:
    kinds = [{"float": float, "int": int}[str(item.type)] for item in dataclasses.fields(Round)]
    return [Round(*(kind(v) for kind, v in zip(kinds, row, strict=True))) for row in rows.tolist()]
