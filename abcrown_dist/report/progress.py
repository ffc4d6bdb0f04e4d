"""What the program is doing: one live line on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, TextIO

if TYPE_CHECKING:
    from rich.live import Live

Mode = Literal["live", "plain", "none"]
_PLAIN_INTERVAL = 5.0  # seconds between two plain lines of one phase


def choose_mode(stream: TextIO) -> Mode:
    """`live` where the stream is a terminal, else `plain`."""
    return "live" if stream.isatty() else "plain"


class Progress:
    """Phases of a run with their times, shown as they go on. A context manager; phases may nest.

    Args:
        stream: where to show them (default: standard error).
        mode: `live`, `plain` or `none`; by default what fits the stream.

    Attributes:
        seconds: wall time of each phase finished so far, by name, summed where a name repeats.
            An outer phase contains its inner ones.
    """

    def __init__(self, stream: TextIO | None = None, mode: Mode | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._mode = mode if mode is not None else choose_mode(self._stream)
        self._start = time.monotonic()
        self._phases: list[str] = []
        self._message = ""
        self._last_line = self._start
        self._live: Live | None = None
        self.seconds: dict[str, float] = {}

    def __enter__(self) -> Progress:
        self._start = time.monotonic()
        if self._mode == "live":
            from rich.console import Console
            from rich.live import Live
            from rich.text import Text

            self._live = Live(
                console=Console(file=self._stream),
                get_renderable=lambda: Text(self._line(), no_wrap=True, overflow="ellipsis"),
                transient=True,
                refresh_per_second=8,
            )
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what runs inside under `name`, also when it raises."""
        begun = time.monotonic()
        self._phases.append(name)
        self._message, self._last_line = "", begun
        try:
            yield
        finally:
            took = time.monotonic() - begun
            self._phases.pop()
            self._message = ""
            self.seconds[name] = self.seconds.get(name, 0.0) + took
            self._print_plain(f"{name}: {took:.2f} s")

    def update(self, message: str) -> None:
        """Show a detail of the current phase; plain lines come at most every few seconds."""
        self._message = message
        now = time.monotonic()
        if now - self._last_line >= _PLAIN_INTERVAL:
            self._last_line = now
            self._print_plain(self._line())

    def _line(self) -> str:
        elapsed = time.monotonic() - self._start
        parts = [f"{elapsed:7.1f} s", " > ".join(self._phases), self._message]
        return "  ".join(part for part in parts if part)

    def _print_plain(self, line: str) -> None:
        if self._mode == "plain":
            print(line, file=self._stream, flush=True)
