"""Progress lines and the batch table."""

from __future__ import annotations

import io
import re
import sys

import pytest

from abcrown_dist.report import progress as progress_module
from abcrown_dist.report.progress import Progress, choose_mode
from abcrown_dist.report.table import BatchRow, print_table, totals
from abcrown_dist.spec.property import Verdict


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Stands for the `time` module: moves only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress_module, "time", clock)
    return clock


def test_phases_are_timed_also_when_they_raise_or_repeat(clock: Clock) -> None:
    progress = Progress(io.StringIO(), "none")

    def fail() -> None:
        with progress.phase("load"):
            clock.now += 2
            raise ZeroDivisionError

    with progress, pytest.raises(ZeroDivisionError):
        fail()
    with progress.phase("bounds"):
        clock.now += 1
        with progress.phase("load"):
            clock.now += 3
    assert progress.seconds == {"load": 5.0, "bounds": 4.0}


def test_plain_lines(clock: Clock) -> None:
    stream = io.StringIO()
    with Progress(stream) as progress:
        with progress.phase("attack"), progress.phase("pgd"):
            for step in range(12):
                progress.update(f"restart {step}")
                clock.now += 1
        with progress.phase("bounds"):
            clock.now += 0.25
    assert stream.getvalue().splitlines() == [
        "    5.0 s  attack > pgd  restart 5",
        "   10.0 s  attack > pgd  restart 10",
        "pgd: 12.00 s",
        "attack: 12.00 s",
        "bounds: 0.25 s",
    ]


def test_silence() -> None:
    stream = io.StringIO()
    with Progress(stream, "none") as progress, progress.phase("load"):
        progress.update("x")
    assert stream.getvalue() == ""


def test_a_live_line_on_a_terminal_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with Progress(stream) as progress, progress.phase("attack"):
        progress.update("restart [3/10]")
        assert progress._live is not None
        progress._live.refresh()
        shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
        assert "attack  restart [3/10]" in shown
    assert stream.getvalue().rstrip().endswith("\x1b[2K")


def test_modes() -> None:
    assert choose_mode(Terminal()) == "live"
    assert choose_mode(io.StringIO()) == "plain"


ROWS = [
    BatchRow("a.onnx a.vnnlib", Verdict.UNSAT, 1.25, "crown"),
    BatchRow("b.onnx [b].vnnlib", Verdict.SAT, 0.5, "attack"),
    BatchRow("c.onnx c.vnnlib", Verdict.SAT, 2.0),
]


def test_table() -> None:
    stream = io.StringIO()
    print_table(ROWS, stream)
    lines = stream.getvalue().splitlines()
    (line,) = [line for line in lines if "[b].vnnlib" in line]
    assert re.search(r"b\.onnx \[b\]\.vnnlib\W+sat\W+0\.50\W+attack", line)
    assert lines[-1] == "3 instances: 2 sat, 1 unsat; 3.75 s"


def test_table_folds_what_is_long() -> None:
    stream = io.StringIO()
    print_table([BatchRow("x" * 300, Verdict.ERROR, 1.0, "y" * 300)], stream)
    text = stream.getvalue()
    assert (text.count("x"), text.count("y")) == (300, 300)
    assert max(map(len, text.splitlines())) <= 160


def test_an_empty_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert totals([]) == "0 instances: none; 0.00 s"
    print_table([], sys.stdout)
    assert "0 instances" in capsys.readouterr().out
