"""Runs of the program on ranks of its own, with an end in any case.

Ranks are forked from a server that has torch imported; those that are to be restarted are started by
torchrun. All of them end with the process that started them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.stress.judge import Wrong, judge
from tests.stress.trial import CHECKPOINT, Kill, Trial
from tests.stress.worker import ASK, rank

LIMIT = 150.0
"""Seconds after which a run is taken to hang: far above its time limit and parallel.timeout."""
_PRELOAD = ["abcrown_dist.session", "abcrown_dist.parallel.launch", "onnxruntime", "tests.stress.worker"]
_FILES = ("--onnx_path", "net.onnx", "--vnnlib_path", "p.vnnlib", "--device", "cpu", "--progress", "none")


@dataclass(frozen=True)
class Finished:
    """What came of a run.

    Attributes:
        verdict: empty if it was killed before it had one.
        died: a rank was killed while it ran.
        resumed: what was left of it was taken up by hand.
    """

    verdict: str
    died: bool = False
    resumed: bool = False


def run(one: Trial, folder: Path, limit: float = LIMIT) -> Finished:
    """Do a run in an empty folder, and judge it; one that died and left a checkpoint is resumed by hand.

    Args:
        limit: seconds after which it is taken to hang.

    Raises:
        Wrong: see `judge`, or it hung.
    """
    one.write(folder)
    codes = _start(one, folder, limit)
    died = -signal.SIGKILL in codes or any(folder.glob("pid.*.1"))
    verdict = judge(one, folder, codes, died=died)
    if verdict or not (folder / CHECKPOINT).exists():
        return Finished(verdict, died)
    (folder / "out.txt").unlink(missing_ok=True)
    second = one.resumed()
    return Finished(judge(second, folder, _start(second, folder, limit), died=False), died, resumed=True)


def said(folder: Path) -> str:
    """What the ranks wrote to their standard errors, stacks included."""
    return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(folder.glob("err.*")))


def _start(one: Trial, folder: Path, limit: float) -> list[int]:
    """Exit codes of all ranks, or torchrun's alone."""
    words = [*_FILES, *one.words]
    restarted = one.kill is not None and one.kill.restarted
    return (_torchrun if restarted else _forked)(one, folder, words, limit)


def _forked(one: Trial, folder: Path, words: Sequence[str], limit: float) -> list[int]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(one.ranks)}
    processes = [
        context.Process(
            target=rank,
            args=(str(folder), common | {"RANK": str(r), "LOCAL_RANK": str(r)}, words, _fault(one.kill)),
        )
        for r in range(one.ranks)
    ]
    try:
        for process in processes:
            process.start()
        _watch(one.kill, folder, lambda: all(process.exitcode is not None for process in processes), limit)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    return [process.exitcode or 0 for process in processes]


def _torchrun(one: Trial, folder: Path, words: Sequence[str], limit: float) -> list[int]:
    script = Path(__file__).with_name("worker.py")
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={one.ranks}", "--standalone",
        "--max-restarts=3", "--monitor-interval=0.1", str(script), json.dumps(_fault(one.kill)), *words,
    ]  # fmt: skip
    with (folder / "err.all").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        try:
            _watch(one.kill, folder, lambda: process.poll() is not None, limit)
        finally:
            process.kill()
            process.wait()
    return [process.returncode]


def _fault(kill: Kill | None) -> dict[str, Any]:
    """What a worker is told of its death, if it is to bring it about itself."""
    return {} if kill is None or kill.moment == "seconds" else asdict(kill)


def _watch(kill: Kill | None, folder: Path, ended: Callable[[], bool], limit: float) -> None:
    """Wait for the end of a run, and kill the rank that is to be killed from outside.

    Raises:
        Wrong: it hung; the stacks are in what its ranks have `said`.
    """
    begun, outside = time.monotonic(), kill is not None and kill.moment == "seconds"
    while not ended():
        passed = time.monotonic() - begun
        if outside and kill is not None and passed >= kill.number:
            outside = not _send(folder, f"pid.{kill.rank}.0", kill.sent)
        if passed > limit:
            for sent in (ASK, signal.SIGCONT):  # who was stopped answers once it goes on
                _send(folder, "pid.*", sent)
            time.sleep(1)
            raise Wrong(f"hung for {limit:g} s")
        time.sleep(0.02)


def _send(folder: Path, pattern: str, sent: signal.Signals) -> bool:
    """Signal the ranks of this run that are still there; whether any was ever there."""
    paths = list(folder.glob(pattern))
    for path in paths:
        with suppress(ProcessLookupError):
            os.kill(int(path.read_text()), sent)
    return bool(paths)
