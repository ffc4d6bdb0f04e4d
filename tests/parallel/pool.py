"""Ranks for tests: one pool of spawned processes per number of ranks runs jobs, one after the other.

A job is a module-level function that gets its rank's `Group` and picklable arguments. Starting
processes costs seconds (each imports torch), a job milliseconds. Nothing can hang: a pool whose ranks
do not all answer in time, or of which one fails, is ended by force and starts anew for the next job.
"""

from __future__ import annotations

import faulthandler
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from abcrown_dist.parallel.group import ALONE, Group

_START_SECONDS = 120
Job = Callable[..., Any]


class RankError(Exception):
    """A job failed on some rank; the text holds that rank's traceback."""


class Pool:
    """`size` ranks joined by gloo, one thread each; a single rank is this process itself.

    Args:
        size: number of ranks.
        seconds: time for a job on all ranks.
    """

    def __init__(self, size: int, seconds: float = 120) -> None:
        self.size, self.seconds = size, seconds
        self._ranks: list[tuple[Any, Connection]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, job: Job, *arguments: Any, seconds: float | None = None) -> list[Any]:
        """What `job(group, *arguments)` returns on every rank.

        Raises:
            RankError: it raised on a rank, a rank ended, or not all answered in time.
        """
        if self.size == 1:
            return [job(ALONE, *arguments)]
        if not self._ranks:
            self._start()
        message = pickle.dumps((job, arguments))
        for _, connection in self._ranks:
            connection.send_bytes(message)
        return self._collect(time.monotonic() + (seconds or self.seconds))

    def close(self) -> None:
        """End all ranks, at once."""
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        meeting = str(Path(self._folder.name) / "meeting")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.size, meeting, theirs, self.seconds), daemon=True
            )
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        self._collect(time.monotonic() + _START_SECONDS)

    def _collect(self, end: float) -> list[Any]:
        """One answer of every rank, or the end of the pool and an error."""
        answers: dict[int, Any] = {}
        places = {connection: rank for rank, (_, connection) in enumerate(self._ranks)}
        while len(answers) < self.size:
            missing = [connection for connection, rank in places.items() if rank not in answers]
            ready = wait(missing, max(0, end - time.monotonic()))
            if not ready:
                late = [rank for rank in range(self.size) if rank not in answers]
                self.close()
                raise RankError(f"ranks {late} of {self.size} did not answer in time")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = places[connection]
                try:
                    failed, answers[rank] = pickle.loads(connection.recv_bytes())
                except EOFError:
                    self.close()
                    raise RankError(f"rank {rank} of {self.size} ended") from None
                if failed:
                    self.close()
                    raise RankError(f"rank {rank} of {self.size}:\n{answers[rank]}")
        return [answers[rank] for rank in range(self.size)]


def _serve(rank: int, size: int, meeting: str, connection: Connection, seconds: float) -> None:
    """A rank: do jobs until the pool goes away."""
    faulthandler.enable()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size,
        timeout=timedelta(seconds=seconds),
    )  # fmt: skip
    group = Group(rank, size, dist.group.WORLD)
    connection.send_bytes(pickle.dumps((False, None)))
    while True:
        try:
            job, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer = (False, job(group, *arguments))
        except BaseException:
            answer = (True, traceback.format_exc())
        connection.send_bytes(pickle.dumps(answer))


@pytest.fixture(scope="session")
def pools() -> Any:
    """Pools by number of ranks, started when first asked for and ended with the session."""
    found: dict[int, Pool] = {}

    def pool(size: int) -> Pool:
        return found.setdefault(size, Pool(size))

    yield pool
    for each in found.values():
        each.close()
