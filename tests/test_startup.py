"""The program as a process: nothing heavy that is not needed, and an end that loses no output."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import abcrown_dist.__main__ as program
from abcrown_dist import cli

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ["--config", "digits_mlp.yaml", "--results_file"]
# Parts of torch's compiler, and what they pull in: more than a second together.
HEAVY = (
    *("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "torchvision", "PIL", "scipy"),
)


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("method", ["auto", "alpha-crown"])
def test_a_whole_run_imports_nothing_heavy(tmp_path: Path, method: str) -> None:
    code = (
        "import sys; from abcrown_dist.cli import main; "
        f"code = main({[*EXAMPLE, str(tmp_path / 'out.txt'), '--bound_prop_method', method]!r}); "
        f"print(code, [name for name in {HEAVY!r} if name in sys.modules])"
    )
    result = run([sys.executable, "-c", code])
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "0 []"


def test_output_arrives_whole_although_the_interpreter_is_not_torn_down(tmp_path: Path) -> None:
    """Into a pipe, where Python buffers."""
    results = tmp_path / "out.txt"
    result = run([sys.executable, "-m", "abcrown_dist", *EXAMPLE, str(results)])
    assert result.returncode == 0
    assert result.stdout.startswith("verdict: unsat") and result.stdout.endswith("\n")
    assert results.read_text() == "unsat\n"
    assert "load: " in result.stderr


def test_the_exit_code_is_kept() -> None:
    result = run([sys.executable, "abcrown_dist.py", "--no_such_option"])
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")


@pytest.mark.parametrize("collects", [True, False])
def test_the_garbage_collector_is_left_as_it_was(collects: bool) -> None:
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with cli._no_collection():
            assert not gc.isenabled()
        assert gc.isenabled() is collects
    finally:
        gc.unfreeze()
        (gc.enable if before else gc.disable)()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes that `os._exit` was called with, instead of ending the tests."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    return codes


class Stream:
    """Standard output that may fail to take what it is given."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure, self.flushed = failure, False

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        self.flushed = True
        if self.failure is not None:
            raise self.failure


@pytest.mark.parametrize(
    ("code", "failure", "expected"),
    [
        (0, None, 0),
        (3, None, 3),
        (0, OSError(28, "No space left on device"), 4),
        (0, ValueError("I/O operation on closed file"), 4),
        (2, BrokenPipeError(), 2),
    ],
)
def test_lost_output_shows_in_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, ended: list[int], code: int, failure: Exception | None, expected: int
) -> None:
    out, err = Stream(failure), Stream()
    monkeypatch.setattr(program, "main", lambda: code)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    _console()
    assert ended == [expected]
    assert out.flushed and err.flushed


def test_streams_may_be_missing(monkeypatch: pytest.MonkeyPatch, ended: list[int]) -> None:
    monkeypatch.setattr(program, "main", lambda: 0)
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    _console()
    assert ended == [0]


def _console() -> None:
    """`console` as it is for a type checker that knows nothing of the patched `os._exit`."""
    end: Callable[[], None] = program.console
    end()
