"""One rank of a run under stress: the program, made to show its stacks when asked, and to die when told.

Either forked from a server that has imported everything (`rank`), or a script for torchrun.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ASK = signal.SIGUSR1
"""Makes a rank write the stacks of all its threads to its standard error."""
_PR_SET_PDEATHSIG = 1  # of prctl(2)


def rank(folder: str, environment: Mapping[str, str], words: Sequence[str], fault: Mapping[str, Any]) -> None:
    """Be one rank, with its output in files of `folder`.

    Args:
        fault: the fields of a `Kill` that this rank or another one brings about itself; else empty.
    """
    os.chdir(folder)
    os.environ.update(environment)
    for number, name in ((1, "out"), (2, "err")):
        handle = os.open(f"{name}.{environment['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, number)
    # What the server's standard streams had gathered belongs to nobody here.
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    _run(words, fault)


def _run(words: Sequence[str], fault: Mapping[str, Any]) -> None:
    import torch

    from abcrown_dist.__main__ import console

    _end_with_parent()
    torch.set_num_threads(1)
    faulthandler.enable(file=2)
    faulthandler.register(ASK, file=2, all_threads=True)
    own, restart = int(os.environ.get("RANK", "0")), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    temporary = Path(f".pid.{own}")
    temporary.write_text(str(os.getpid()))
    temporary.rename(f"pid.{own}.{restart}")  # whoever sees it can read it
    if fault and fault["rank"] == own and not restart:
        _WATCHES[fault["moment"]](_Countdown(int(fault["number"]), fault["sent"]))
    sys.argv = ["abcrown_dist.py", *words]
    console()


def _end_with_parent() -> None:
    """Have this process killed when the one that started it ends, however that comes about."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class _Countdown:
    """Sends this process a signal at the `number`-th call."""

    def __init__(self, number: int, sent: int) -> None:
        self._left, self._sent = number, sent

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), self._sent)


def _count_rounds(countdown: Callable[[], None]) -> None:
    from abcrown_dist.bab.crew import Crew

    _before(Crew, "agree", countdown)


def _count_collectives(countdown: Callable[[], None]) -> None:
    from abcrown_dist.parallel.group import Group

    _before(Group, "together", countdown)


def _count_steps_on_files(countdown: Callable[[], None]) -> None:
    """Creating, renaming and removing what belongs to a checkpoint: before the system is told."""
    from tests.stress.trial import CHECKPOINT

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.rename", "os.remove") or CHECKPOINT not in str(arguments[0]):
            return
        if event != "open" or "x" in str(arguments[1]):
            countdown()

    sys.addaudithook(hook)


_WATCHES: dict[str, Callable[[Callable[[], None]], None]] = {
    "round": _count_rounds,
    "collective": _count_collectives,
    "file": _count_steps_on_files,
}


def _before(owner: type, name: str, step: Callable[[], None]) -> None:
    """Do `step` before every call of a method."""
    method = getattr(owner, name)

    def stepping(self: Any, *arguments: Any) -> Any:
        step()
        return method(self, *arguments)

    setattr(owner, name, stepping)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    _run(sys.argv[2:], json.loads(sys.argv[1]))
