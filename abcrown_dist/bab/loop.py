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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from abcrown_dist.bab.domains import Domains
from abcrown_dist.bab.rounds import Round
from abcrown_dist.bab.splitter import Bounded, Splitter
from abcrown_dist.bab.store import Store
from abcrown_dist.spec.property import Witness
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.util.errors import is_out_of_memory

_log = logging.getLogger(__name__)
_MOST_LEVELS = 6  # splits of one domain in one round: up to 64 children

# Tries points (N, inputs), the k-th of which might fulfil the k-th disjunct of the list; answers with a
# confirmed counterexample.
Probe = Callable[[Sequence[int], Tensor], "Witness | None"]


@dataclass(frozen=True)
class LoopSettings:
    """How domains go through the loop.

    Attributes:
        batch: domains split in one round.
        min_batch_ratio: while fewer than this share of a batch is open, each is split several times at once.
        max_domains: open domains above which the search gives up.
        max_rounds, max_visited: rounds, or domains bounded, after which it does.
        device_bytes: memory that waiting domains may take on the device.
    """

    batch: int = 64
    min_batch_ratio: float = 0.1
    max_domains: float = math.inf
    max_rounds: float = math.inf
    max_visited: float = math.inf
    device_bytes: int = 1 << 30


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


class Loop:
    """One search over the domains of a splitter.

    Args:
        splitter: what is split, and how it is bounded.
        probe: tries counterexamples.
        deadline: of the instance.
        search: where results go; one may serve several loops, one after the other.
        on_round: told of every round.
    """

    def __init__(
        self,
        splitter: Splitter,
        settings: LoopSettings,
        probe: Probe,
        deadline: Deadline,
        search: Search,
        on_round: Callable[[Round], None],
    ) -> None:
        self.splitter, self.settings, self.probe = splitter, settings, probe
        self.deadline, self.search, self.on_round = deadline, search, on_round
        self.batch = settings.batch
        self.given_up: set[int] = set()  # goals with a leaf that nothing could decide
        self.depth = self.visited = 0

    def run(self) -> None:
        """Search until every goal is decided, a counterexample is found or a limit is reached.

        Raises:
            DeadlineExceeded: out of time; `search` then holds what is known, without this search's goals.
        """
        roots = self.splitter.roots()
        self.store = Store(roots.margin.device, self.settings.device_bytes)
        self._settle(self.splitter.bound(roots))
        self._report()
        rounds = 0
        while len(self.store) and self.search.witness is None:
            if self._limit_reached(rounds):
                break
            self.deadline.check()
            if self._round():
                rounds += 1
                self._report()
        undecided = self.store.goals() | self.given_up
        names = self.splitter.disjuncts
        self.search.refuted |= {names[goal] for goal in range(len(names)) if goal not in undecided}
        self.search.given_up |= {names[goal] for goal in self.given_up}
        if self.given_up and not self.search.reason:
            self.search.reason = (
                "domains with nothing left to split are undecided: "
                "bounds are within rounding of zero, or the model may overflow"
            )

    def _round(self) -> bool:
        """Split and bound one batch. False when memory ran out: it is back in the store, the batch halved."""
        batch = self.store.take(self.batch)
        levels = self._levels(len(batch))
        try:
            branched = self.splitter.branch(batch, levels)
            bounded = self.splitter.bound(branched.children) if len(branched.children) else None
        except Exception as error:
            least = len(batch) == levels == 1
            if not is_out_of_memory(error) or least or self.deadline.shared:
                raise
            # With half of the batch, fewer levels are wanted as well.
            self.batch = max(1, (len(batch) if levels == 1 else self.batch) // 2)
            _log.warning("out of memory: %d domains at a time from now on", self.batch)
            self.store.insert(batch)
            return False
        if bounded is not None:
            self._settle(bounded)
        if self.search.witness is not None:
            self.given_up |= set(branched.leaves.goal.tolist())  # nobody looks at them any more
        elif len(branched.leaves):
            self._examine(branched.leaves)
        return True

    def _levels(self, count: int) -> int:
        """How often to split each of `count` domains so that their children are worth a batch."""
        wanted = self.settings.min_batch_ratio * self.batch / count
        return min(_MOST_LEVELS, max(1, 1 + math.floor(math.log2(wanted)))) if wanted > 1 else 1

    def _settle(self, bounded: Bounded) -> None:
        """Drop what is refuted, try the rest's minimisers, and keep the rest."""
        count, proven = len(bounded.domains), int(bounded.proven.sum())
        self.visited += count
        self.search.visited += count
        self.search.verified += proven
        self.depth = int(bounded.domains.depth.max())
        self._note(bounded.domains.select(bounded.proven))
        left = torch.nonzero(~bounded.proven).flatten()
        if not len(left):
            return
        domains = bounded.domains.select(left)
        self.search.witness = self.probe(self._disjuncts(domains), bounded.points[left])
        self.store.insert(domains)

    def _examine(self, leaves: Domains) -> None:
        examined = self.splitter.examine(leaves)
        self.search.verified += int(examined.proven.sum())
        self._note(dataclasses.replace(leaves, margin=examined.margin).select(examined.proven))
        left = torch.nonzero(~examined.proven).flatten()
        if len(left):
            domains = leaves.select(left)
            self.given_up |= set(domains.goal.tolist())
            self.search.witness = self.probe(self._disjuncts(domains), examined.points[left])

    def _note(self, refuted: Domains) -> None:
        margins = self.search.margins
        for disjunct, margin in zip(self._disjuncts(refuted), refuted.margin.tolist(), strict=True):
            margins[disjunct] = min(margin, margins.get(disjunct, math.inf))

    def _disjuncts(self, domains: Domains) -> list[int]:
        names = self.splitter.disjuncts
        return [names[goal] for goal in domains.goal.tolist()]

    def _limit_reached(self, rounds: int) -> bool:
        if len(self.store) > self.settings.max_domains:
            self.search.reason = f"more than {self.settings.max_domains:g} domains are open"
        elif rounds >= self.settings.max_rounds:
            self.search.reason = f"still open after {rounds} rounds of branching"
        elif self.visited >= self.settings.max_visited:
            self.search.reason = f"still open after {self.visited} domains"
        else:
            return False
        return True

    def _report(self) -> None:
        search, store = self.search, self.store
        latest = Round(
            seconds=self.deadline.elapsed(),
            number=len(search.rounds) + 1,
            open=len(store),
            verified=search.verified,
            visited=search.visited,
            worst=store.worst(),
            depth=self.depth,
            memory=store.bytes(),
        )
        search.rounds.append(latest)
        self.on_round(latest)
