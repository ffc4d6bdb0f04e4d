"""The clock of an instance, and the alarm for work that does not look at it."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from abcrown_dist.util import deadline as module
from abcrown_dist.util.deadline import Deadline, alarm
from abcrown_dist.util.errors import DeadlineExceeded


class Clock:
    """Stands for the `time` module of `deadline`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(module, "time", fake)
    return fake


@pytest.fixture
def handler() -> Iterator[object]:
    """A handler of SIGALRM that was there before, and no running timer."""

    def mine(signum: int, frame: object) -> None:
        raise AssertionError("the alarm outlived its block")

    timer = signal.setitimer(signal.ITIMER_REAL, 0)
    before = signal.signal(signal.SIGALRM, mine)
    yield mine
    signal.signal(signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, *timer)


def busy(seconds: float) -> None:
    """Compute without ever looking at a deadline."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_time_goes_by(clock: Clock) -> None:
    deadline = Deadline(10)
    assert (deadline.elapsed(), deadline.remaining(), deadline.expired()) == (0, 10, False)
    clock.now += 4
    assert (deadline.elapsed(), deadline.remaining(), deadline.expired()) == (4, 6, False)
    deadline.check()
    clock.now += 6
    assert (deadline.elapsed(), deadline.remaining(), deadline.expired()) == (10, 0, True)
    clock.now += 1
    assert deadline.remaining() == 0
    with pytest.raises(DeadlineExceeded, match="time limit of 10 s reached"):
        deadline.check()


def test_time_before_the_start_counts(clock: Clock) -> None:
    deadline = Deadline(10, start=93.0)
    assert deadline.elapsed() == 7
    clock.now += 3
    assert deadline.expired()


def test_no_limit(clock: Clock) -> None:
    deadline = Deadline()
    clock.now += 1e9
    deadline.check()
    assert deadline.remaining() == math.inf


def test_running_out_of_time_is_no_ordinary_error() -> None:
    """Libraries that catch every exception must not take it for a failure of their own."""
    assert not issubclass(DeadlineExceeded, Exception)


def test_the_alarm_interrupts_a_busy_loop_and_goes(handler: object) -> None:
    with pytest.raises(DeadlineExceeded), alarm(Deadline(0.02), grace=0.02):
        busy(20)
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_an_alarm_in_good_time_leaves_no_trace(handler: object) -> None:
    with alarm(Deadline(0.02), grace=0.01):
        pass
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    busy(0.05)  # nothing rings any more


def test_the_alarm_of_somebody_else_goes_on(handler: object) -> None:
    signal.setitimer(signal.ITIMER_REAL, 100, 30)
    with alarm(Deadline(50)):
        assert signal.getitimer(signal.ITIMER_REAL)[0] <= 50.5
        busy(0.01)
    left, interval = signal.setitimer(signal.ITIMER_REAL, 0)
    assert 50.5 < left < 100
    assert interval == 30


def test_an_error_passes_through(handler: object) -> None:
    with pytest.raises(KeyError), alarm(Deadline(5)):
        raise KeyError("mine")
    assert signal.getsignal(signal.SIGALRM) is handler


def test_a_deadline_already_past_rings_at_once(handler: object) -> None:
    with pytest.raises(DeadlineExceeded), alarm(Deadline(1, start=time.monotonic() - 9), grace=0.01):
        busy(20)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_alarm_that_was_lost_in_a_finalizer_rings_again(handler: object) -> None:
    """Python reports what is raised there and drops it."""

    class Slow:
        def __del__(self) -> None:
            busy(0.2)

    def work() -> None:
        Slow()
        busy(20)

    with pytest.raises(DeadlineExceeded), alarm(Deadline(0.02), grace=0.05):
        work()


def test_it_does_nothing_without_a_limit(handler: object) -> None:
    with alarm(Deadline()):
        assert signal.getsignal(signal.SIGALRM) is handler
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_it_does_nothing_in_a_thread(handler: object) -> None:
    seen: list[object] = []

    def work() -> None:
        with alarm(Deadline(0.01), grace=0.01):
            seen.append(signal.getsignal(signal.SIGALRM))
            seen.append(signal.getitimer(signal.ITIMER_REAL))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [handler, (0.0, 0.0)]
