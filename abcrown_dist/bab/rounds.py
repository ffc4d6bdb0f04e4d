"""What branch and bound tells of every round."""

from __future__ import annotations

from dataclasses import dataclass


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
