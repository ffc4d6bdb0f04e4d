"""One clock for an instance: what started when, and how long is left."""

from __future__ import annotations

import math
import time

from abcrown_dist.util.errors import DeadlineExceeded


class Deadline:
    """A point in time after which work should stop.

    Args:
        seconds: time allowed from `start` on; `inf` for no limit.
        start: `time.monotonic()` value to count from (default: now). The command line passes the
            time at which the process began, so that loading counts too.
    """

    def __init__(self, seconds: float = math.inf, start: float | None = None) -> None:
        self.start = time.monotonic() if start is None else start
        self.seconds = seconds

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start

    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.seconds - self.elapsed())

    def expired(self) -> bool:
        """Whether no time is left."""
        return self.elapsed() >= self.seconds

    def check(self) -> None:
        """Raise `DeadlineExceeded` when no time is left."""
        if self.expired():
            raise DeadlineExceeded(f"time limit of {self.seconds:g} s reached")
