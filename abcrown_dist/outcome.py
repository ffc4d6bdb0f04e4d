"""What is known of an instance."""

from __future__ import annotations

from dataclasses import dataclass, field

from abcrown_dist.bab.search import Round
from abcrown_dist.report.summary import ClauseBound
from abcrown_dist.spec.property import Verdict, Witness


@dataclass
class Outcome:
    """Grows while the flow goes on, and is its result.

    Attributes:
        open: disjuncts that nothing has refuted yet.
        bounds: what is known of each disjunct.
        rounds: of branch and bound.
        domains: that it bounded, on all ranks.
        waited: seconds that each rank spent in collectives, waiting; empty for one process.
        given_up: why the last search ended without an answer; empty if it did not.
    """

    verdict: Verdict = Verdict.UNKNOWN
    reason: str = ""
    witness: Witness | None = None
    open: set[int] = field(default_factory=set)
    bounds: dict[int, ClauseBound] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    domains: int = 0
    waited: tuple[float, ...] = ()
    given_up: str = ""
