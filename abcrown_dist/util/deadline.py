"""One clock for an instance: what started when, and how long is left."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from abcrown_dist.util.errors import DeadlineExceeded


class Deadline:
    """A point in time after which work should stop.

    Args:
        seconds: time allowed from `start` on; `inf` for no limit.
        start: `time.monotonic()` value to count from (default: now). The command line passes the
            time at which the process began, so that loading counts too.
    """

    shared = False  # whether several ranks must agree before it counts as expired

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
            raise self.error()

    def spend(self, seconds: float) -> None:
        """Count time that an earlier run has used."""
        self.start -= seconds

    def among(self, group: Any) -> Deadline:
        """The same point in time for a part of the ranks (see `parallel.clock`); without ranks, itself."""
        return self

    def error(self) -> DeadlineExceeded:
        """What is raised when no time is left."""
        return DeadlineExceeded(f"time limit of {self.seconds:g} s reached")


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back the alarm until the block has ended: half of a file helps nobody."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def alarm(deadline: Deadline, grace: float = 0.5) -> Iterator[None]:
    """Raise `DeadlineExceeded` inside the block once `deadline` is `grace` seconds past.

    Work should check the deadline by itself; this catches what cannot (a conversion, a parser), at
    the next step of the interpreter, and again every `grace` seconds: what is raised inside a
    finalizer is lost. Does nothing off the main thread, where signals are missing, and for a shared
    deadline: ranks must stop at the same step.
    """
    usable = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if not usable or deadline.shared or math.isinf(deadline.seconds):
        yield
        return

    def ring(signum: int, frame: FrameType | None) -> None:
        deadline.check()

    begun = time.monotonic()
    before = signal.signal(signal.SIGALRM, ring)
    delay = max(deadline.remaining() + grace, 1e-3)
    pending, interval = signal.setitimer(signal.ITIMER_REAL, delay, max(grace, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if pending:  # somebody else's alarm, which has gone on meanwhile
            left = pending - (time.monotonic() - begun)
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3), interval)
