"""The program as several processes, as torchrun starts them, but with every worker's exit code in sight."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LAUNCHER = ROOT / "abcrown_dist.py"
QUIET = ("--device", "cpu", "--progress", "none")

# Before the program starts, rank $WHO gets a method that does $WHAT at its $WHEN-th call.
FAULTY = """
import os, signal, sys
sys.path.insert(0, {root!r})
from abcrown_dist.parallel.group import Group

def broken(original, calls=[]):
    def method(self, *arguments):
        calls.append(1)
        if self.rank == {who} and len(calls) == {when}:
            {what}
        return original(self, *arguments)
    return method

Group.{method} = broken(Group.{method})
from abcrown_dist.__main__ import console
console()
"""
DIES = "os.kill(os.getpid(), signal.SIGKILL)"
STOPS = "os.kill(os.getpid(), signal.SIGSTOP)"
RAISES = "raise ValueError('broken on purpose')"


@dataclass(frozen=True)
class Ended:
    """What a process left."""

    code: int
    out: str
    err: str


def faulty(folder: Path, method: str, what: str, who: int = 1, when: int = 20) -> Path:
    """A launcher whose rank `who` fails in the middle of a pass."""
    path = folder / "faulty.py"
    path.write_text(FAULTY.format(root=str(ROOT), method=method, what=what, who=who, when=when))
    return path


def launch(
    folders: Sequence[Path], words: Sequence[str], *, launcher: Path = LAUNCHER, gone: Sequence[int] = ()
) -> list[Ended]:
    """Run one rank per folder, each in its own; ends what has not ended after a minute and a half.

    Args:
        gone: ranks that will not end by themselves; they are killed when all others have ended.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(folders))}
    processes = [
        subprocess.Popen(
            [sys.executable, str(launcher), *QUIET, *words], cwd=folder, text=True,
            env=os.environ | meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank, folder in enumerate(folders)
    ]  # fmt: skip
    try:
        ended = {}
        for rank in sorted(range(len(folders)), key=lambda rank: rank in gone):
            if rank in gone:
                processes[rank].kill()
            out, err = processes[rank].communicate(timeout=90)
            ended[rank] = Ended(processes[rank].returncode, out, err)
        return [ended[rank] for rank in range(len(folders))]
    finally:
        for process in processes:
            process.kill()


def torchrun(folder: Path, words: Sequence[str], *, launcher: Path = LAUNCHER) -> Ended:
    """The same under torchrun, two ranks in one folder."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    process = subprocess.run(
        [*command, str(launcher), *QUIET, *words], cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return Ended(process.returncode, process.stdout, process.stderr)
