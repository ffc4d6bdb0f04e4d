"""The command line: words -> configuration -> verify -> exit code.

Exit codes: 0 a verdict was produced (unknown and timeout are verdicts), 2 bad usage or
configuration, 3 a file cannot be loaded, 4 internal error, 130 interrupted from the keyboard, 143 terminated.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from abcrown_dist.config import Config, load_config
from abcrown_dist.config.plan_request import COMMAND, parse_plan
from abcrown_dist.util.errors import ConfigError, LoadError, VerifierError, describe, exit_code

INTERRUPTED, TERMINATED = 130, 143
PREPARE = "prepare"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program.

    Args:
        argv: command-line words without the program's name; by default those of the process.

    Returns:
        The exit code.
    """
    start = time.monotonic()
    words = sys.argv[1:] if argv is None else argv
    config: Config | None = None
    try:
        alone = {COMMAND: _plan, PREPARE: _prepare}
        if words and words[0] in alone:
            first = int(os.environ.get("RANK") or 0) == 0  # under torchrun one process will do
            return alone[words[0]](words[1:]) if first else 0
        if int(os.environ.get("WORLD_SIZE") or 1) > 1:
            return _run_as_rank(words, start)
        config = load_config(words)
        _log_to_stderr(quiet=config.general.progress == "none")
        with _no_collection():
            from abcrown_dist.session import run  # heavy: after the configuration has proved right
        with _terminable():
            return run(config, start)
    except SystemExit as finished:  # --help and --version
        return finished.code if isinstance(finished.code, int) else 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except Terminated:
        return TERMINATED
    except Exception as error:
        # The configuration itself may be what failed: then the words alone tell.
        asked = any("traceback" in word for word in words) if config is None else config.debug.traceback
        return _report(error, show_traceback=asked)


def _plan(words: Sequence[str]) -> int:
    """Foretell memory instead of verifying."""
    request, rest = parse_plan(words)
    config = load_config(rest)
    _log_to_stderr(quiet=config.general.progress == "none")
    from abcrown_dist.session import show_plan

    return show_plan(config, request)


def _prepare(words: Sequence[str]) -> int:
    """Convert networks ahead of their verification, which then finds them in the graph cache."""
    config = load_config(words)
    _log_to_stderr(quiet=True)
    from abcrown_dist.session import convert

    return convert(config)


def _run_as_rank(words: Sequence[str], start: float) -> int:
    """One of several processes of torchrun: rank 0 alone reads the configuration, prints and writes."""
    with _no_collection():
        from abcrown_dist.parallel.group import FirstRankFailed
        from abcrown_dist.parallel.launch import World, check_world, from_first_rank, open_store

    world = World.from_environment()
    store = open_store(world)

    def read() -> Config:
        config = load_config(words)
        check_world(config, world)
        return config

    try:
        config = from_first_rank(world, store, read)
        _log_to_stderr(quiet=world.rank > 0 or config.general.progress == "none")
        with _no_collection():
            from abcrown_dist.session import run
        return run(config, start, world, store)
    except FirstRankFailed as failed:
        return failed.exit_code  # rank 0 says why
    except (ConfigError, LoadError) as error:
        if world.rank > 0:  # so it does here: all ranks have found the same
            return error.exit_code
        raise


class Terminated(BaseException):
    """The process was asked to end (SIGTERM): like an interrupt, it leaves whole files behind."""


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM raises `Terminated` inside the block. Ranks of torchrun die at once instead: others wait."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Let the garbage collector sleep while modules are imported, and never look at them afterwards.

    Imports leave no garbage, yet make it walk the growing heap again and again, for a sixth of the time
    that importing torch takes; a collection after them costs as much as a small proof.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.freeze()
            gc.enable()


def _report(error: Exception, show_traceback: bool) -> int:
    """Say on one line what went wrong; the exit code for it."""
    if show_traceback:
        traceback.print_exception(error)
    if isinstance(error, VerifierError):
        print(f"error: {describe(error)}", file=sys.stderr)
    elif isinstance(error, MemoryError):
        print("error: out of memory before anything could be verified", file=sys.stderr)
    else:
        hint = "" if show_traceback else "; run with --debug.traceback true"
        print(f"internal error: {describe(error)}{hint}", file=sys.stderr)
    return exit_code(error)


def _log_to_stderr(quiet: bool) -> None:
    """Show the program's own log lines, and no other library's."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log = logging.getLogger("abcrown_dist")
    log.handlers = [handler]
    log.setLevel(logging.WARNING if quiet else logging.INFO)
