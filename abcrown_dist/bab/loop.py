"""Branch and bound: one loop for every kind of split.

Bunel et al., "A Unified View of Piecewise Linear Neural Network Verification", NeurIPS 2018. A round
takes the most urgent domains, splits them, bounds the children, drops what is refuted, tries the
minimisers of the rest as counterexamples and puts the rest back. A disjunct is refuted when no domain
of it is left and none was given up.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from abcrown_dist.bab.crew import Agreement, Crew, Status
from abcrown_dist.bab.domains import Domains
from abcrown_dist.bab.search import (
    Candidate,
    Confirm,
    Course,
    Keeper,
    LoopSettings,
    Probe,
    Round,
    Search,
    Start,
    Tried,
)
from abcrown_dist.bab.splitter import Bounded, Branched, Splitter
from abcrown_dist.bab.store import Store
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.util.errors import DeadlineExceeded, is_out_of_memory
from abcrown_dist.weights.apart import finish

_log = logging.getLogger(__name__)
_EARLY, _SELDOM = 16, 4  # rounds that descend from points: the first ones, later each fourth
_MOST_LEVELS = 6  # splits of one domain in one round: up to 64 children


@dataclass
class _Own:
    """What this rank has done in this search."""

    visited: int = 0
    verified: int = 0
    depth: int = 0
    late: bool = False
    given_up: set[int] = field(default_factory=set)  # goals with a leaf that nothing could decide
    margins: dict[int, float] = field(default_factory=dict)  # least, by goal, of the domains refuted
    candidates: list[Candidate] = field(default_factory=list)


@dataclass(frozen=True)
class _Open:
    """Domains that bounds leave open, and their minimisers, tried as counterexamples."""

    domains: Domains
    points: Tried


@dataclass(frozen=True)
class _Stretch:
    """A batch's leaves and its children, where there are any: all of them, and those that stay open."""

    leaves: Domains
    bounded: Bounded | None = None
    tried: _Open | None = None


class Loop:
    """One search over the domains of a splitter, by all ranks of a crew.

    Args:
        splitter: what is split, and how it is bounded.
        crew: the ranks.
        probe: tries counterexamples.
        confirm: judges them.
        deadline: of the instance, as this rank's own clock tells.
        search: where results go; one may serve several loops, one after the other.
        on_round: told of every round.
        keeper: keeps checkpoints.
    """

    def __init__(
        self,
        splitter: Splitter,
        settings: LoopSettings,
        crew: Crew,
        probe: Probe,
        confirm: Confirm,
        deadline: Deadline,
        search: Search,
        on_round: Callable[[Round], None],
        keeper: Keeper | None = None,
    ) -> None:
        self.keeper = keeper
        self.splitter, self.settings, self.crew = splitter, settings, crew
        self.probe, self.confirm = probe, confirm
        self.deadline, self.search, self.on_round = deadline, search, on_round
        self.batch = settings.batch
        self.own = _Own()
        self.rounds = 0
        self.before = (search.visited, search.verified)
        self.store = Store(splitter.weights.device, settings.device_bytes)

    def run(self, start: Start | None = None) -> None:
        """Search until every goal is decided, a counterexample is found or a limit is reached.

        Args:
            start: where to go on from; None: at the roots.

        Raises:
            DeadlineExceeded: out of time; `search` then holds what is known, without this search's goals.
        """
        if start is None:
            mine = self.crew.deal(self.splitter.roots())
            self._work(mine, 1, lambda: Branched(mine, mine.select(slice(0, 0))))
        else:
            self._take_up(start)
        state = self._agree()
        while state.open and self.search.witness is None and not self._limit_reached(state):
            self.rounds += 1
            self._round(state)
            state = self._agree()
        self._conclude()

    def _take_up(self, start: Start) -> None:
        """Go on from a checkpoint; what all ranks did until then counts as done by the first."""
        names, course, own = self.splitter.disjuncts, start.course, self.own
        for domains in start.domains:
            self.store.insert(domains.to(self.store.device))
        self.rounds = course.rounds
        self.before = (self.before[0] - course.visited, self.before[1] - course.verified)
        if self.crew.group.rank == 0:
            goal = {old: names.index(disjunct) for old, disjunct in enumerate(course.goals)}
            own.visited, own.verified = course.visited, course.verified
            own.given_up = {goal[old] for old in course.given_up}
            own.margins = {goal[old]: margin for old, margin in course.margins}

    def _round(self, state: Agreement) -> None:
        """Split and bound this rank's part of the next domains."""
        levels = self._levels(min(state.open, self.batch))
        if self.settings.forced:
            batch = self.crew.take_in_order(self.store, self.batch)
        else:
            batch = self.crew.take(self.store, state.holders, self.batch)
        self._work(batch, levels, lambda: self.splitter.branch(batch, levels))  # type: ignore[arg-type]

    def _levels(self, count: int) -> int:
        """How often to split each of `count` domains so that their children are worth a batch."""
        wanted = self.settings.min_batch_ratio * self.batch / count
        return min(_MOST_LEVELS, max(1, 1 + math.floor(math.log2(wanted)))) if wanted > 1 else 1

    def _work(self, batch: Domains | None, levels: int, branch: Callable[[], Branched]) -> None:
        """What a rank does by itself in a round, in two stretches; whatever it leaves undone is stored again.

        Between the stretches, and after them, it serves ranks that share its weights until they are done.
        """
        self.own.depth = 0
        stretch = None
        if batch is not None and len(batch):
            stretch = self._attempt(batch, levels, lambda: self._bound(branch()))
        finish(self.splitter.weights)
        if stretch is not None:
            self._settle(stretch)
        self._descend(stretch)
        if stretch is not None and len(stretch.leaves):
            self._examine(stretch.leaves)
        finish(self.splitter.weights)

    def _attempt(self, batch: Domains, levels: int, work: Callable[[], _Stretch]) -> _Stretch | None:
        """The result of `work`; None when time or memory ran out: then `batch` is back in the store."""
        try:
            return work()
        except DeadlineExceeded:
            self.own.late = True
        except Exception as error:
            least = len(batch) == levels == 1
            if not is_out_of_memory(error) or least or self.splitter.weights.group.size > 1:
                raise
            # With half of the batch, fewer levels are wanted as well.
            here = len(batch) * self.crew.group.size if levels == 1 else self.batch
            self.batch = max(1, here // 2)
            _log.warning("out of memory: %d domains at a time from now on", self.batch)
        self.store.insert(batch)
        return None

    def _bound(self, branched: Branched) -> _Stretch:
        """Bound the children, and try the minimisers of those that stay open."""
        if not len(branched.children):
            return _Stretch(branched.leaves)
        bounded = self.splitter.bound(branched.children)
        left = torch.nonzero(~bounded.proven).flatten()
        if not len(left):
            return _Stretch(branched.leaves, bounded)
        domains = bounded.domains.select(left)
        points = self.probe.measure(self._disjuncts(domains), bounded.points[left])
        return _Stretch(branched.leaves, bounded, _Open(domains, points))

    def _settle(self, stretch: _Stretch) -> None:
        """Drop what is refuted, and keep the rest."""
        bounded = stretch.bounded
        if bounded is None:
            return
        self.own.visited += len(bounded.proven)
        self.own.verified += int(bounded.proven.sum())
        self.own.depth = int(bounded.domains.depth.max())
        self._note(bounded.domains.select(bounded.proven))
        if stretch.tried is not None:
            self.store.insert(stretch.tried.domains)
            self.own.candidates += stretch.tried.points.promising()

    def _descend(self, stretch: _Stretch | None) -> None:
        """Look for counterexamples near the likeliest points of this rank, or of all ranks if forced."""
        if self.rounds >= _EARLY and self.rounds % _SELDOM:
            return
        missing, ident = torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.int64)
        tried = None if stretch is None else stretch.tried
        if tried is not None:
            missing, ident = tried.points.missing, tried.domains.ident
        if self.settings.forced:
            best = self.crew.best(missing, ident, self.probe.most)
        else:
            best = missing.argsort(stable=True)[: self.probe.most]
        if tried is not None and len(best):
            self._look(lambda: self.probe.descend(tried.points.select(best)))

    def _examine(self, leaves: Domains) -> None:
        """Decide leaves; those that nothing can decide are given up."""
        if self.own.candidates and not self.settings.forced:
            self.store.insert(leaves)  # the search may be over
            return
        try:
            examined = self.splitter.examine(leaves)
        except DeadlineExceeded:
            self.own.late = True
            self.store.insert(leaves)
            return
        self.own.verified += int(examined.proven.sum())
        self._note(dataclasses.replace(leaves, margin=examined.margin).select(examined.proven))
        left = torch.nonzero(~examined.proven).flatten()
        if len(left):
            domains = leaves.select(left)
            self.own.given_up |= set(domains.goal.tolist())
            tried = self._look(lambda: self.probe.measure(self._disjuncts(domains), examined.points[left]))
            if tried is not None and not self.settings.forced:  # what is tried must not depend on ranks
                nearest = tried.select(tried.missing.argsort(stable=True)[: self.probe.most])
                self._look(lambda: self.probe.descend(nearest))

    def _look(self, work: Callable[[], Tried]) -> Tried | None:
        """Try points; where memory is short, the search does without."""
        try:
            tried = work()
        except Exception as error:
            if not is_out_of_memory(error) or self.splitter.weights.group.size > 1:
                raise
            _log.warning("out of memory: points are not tried as counterexamples")
            return None
        self.own.candidates += tried.promising()
        return tried

    def _note(self, refuted: Domains) -> None:
        margins = self.own.margins
        for goal, margin in zip(refuted.goal.tolist(), refuted.margin.tolist(), strict=True):
            margins[goal] = min(margin, margins.get(goal, math.inf))

    def _disjuncts(self, domains: Domains) -> list[int]:
        names = self.splitter.disjuncts
        return [names[goal] for goal in domains.goal.tolist()]

    def _agree(self) -> Agreement:
        """Learn what all ranks have found; a confirmed counterexample goes before a time limit."""
        own, store = self.own, self.store
        state = self.crew.agree(
            Status(
                open=len(store),
                worst=store.worst(),
                visited=own.visited,
                verified=own.verified,
                depth=own.depth,
                memory=store.bytes(),
                batch=self.batch,
                candidates=len(own.candidates),
                late=own.late or not self.deadline.remaining(),
                due=self.keeper is not None and self.keeper.due(),
            )
        )
        self.batch = state.batch
        if state.candidates:
            self.search.witness = self.confirm(self.crew.everyone(own.candidates))
            own.candidates = []
        self._report(state)
        if self.keeper is not None and self.search.witness is None and (state.due or state.late):
            self.keeper.keep(store.everything(), self.splitter, self._course(state))
        if state.late and self.search.witness is None:
            raise self.deadline.error()
        return state

    def _course(self, state: Agreement) -> Course:
        given_up, margins = self._told()[1:]
        return Course(
            goals=self.splitter.disjuncts,
            rounds=self.rounds,
            visited=state.visited,
            verified=state.verified,
            given_up=tuple(sorted(given_up)),
            margins=tuple(sorted(margins.items())),
        )

    def _told(self) -> tuple[set[int], set[int], dict[int, float]]:
        """Goals with open domains, goals given up, and least margins: of all ranks."""
        told = self.crew.everyone([(self.store.goals(), self.own.given_up, self.own.margins)])
        least: dict[int, float] = {}
        for _, _, margins in told:
            for goal, margin in margins.items():
                least[goal] = min(margin, least.get(goal, math.inf))
        return set().union(*(goals for goals, _, _ in told)), set().union(*(g for _, g, _ in told)), least

    def _limit_reached(self, state: Agreement) -> bool:
        if state.open > self.settings.max_domains:
            self.search.reason = f"more than {self.settings.max_domains:g} domains are open"
        elif self.rounds >= self.settings.max_rounds:
            self.search.reason = f"still open after {self.rounds} rounds of branching"
        elif state.visited >= self.settings.max_visited:
            self.search.reason = f"still open after {state.visited} domains"
        else:
            return False
        return True

    def _report(self, state: Agreement) -> None:
        search = self.search
        search.visited = self.before[0] + state.visited
        search.verified = self.before[1] + state.verified
        latest = Round(
            seconds=self.deadline.elapsed(),
            number=len(search.rounds) + 1,
            open=state.open,
            verified=search.verified,
            visited=search.visited,
            worst=state.worst,
            depth=state.depth,
            memory=state.memory,
        )
        search.rounds.append(latest)
        self.on_round(latest)

    def _conclude(self) -> None:
        """Enter what all ranks have found: a goal is refuted when none of them has a domain of it left."""
        search, names = self.search, self.splitter.disjuncts
        left, given_up, margins = self._told()
        for goal, margin in margins.items():
            search.margins[names[goal]] = min(margin, search.margins.get(names[goal], math.inf))
        search.refuted |= {names[goal] for goal in range(len(names)) if goal not in left | given_up}
        search.given_up |= {names[goal] for goal in given_up}
        if given_up and not search.reason:
            search.reason = (
                "domains with nothing left to split are undecided: "
                "bounds are within rounding of zero, or the model may overflow"
            )
