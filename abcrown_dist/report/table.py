"""The table at the end of a batch of instances."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from abcrown_dist.spec.property import Verdict

_STYLES = {
    Verdict.SAT: "red",
    Verdict.UNSAT: "green",
    Verdict.UNKNOWN: "yellow",
    Verdict.TIMEOUT: "yellow",
    Verdict.ERROR: "bold red",
}
_WIDTH_OF_A_FILE = 160  # columns where the stream is no terminal


@dataclass(frozen=True)
class BatchRow:
    """One instance of a batch: its name, the answer, the wall time, and what decided it."""

    instance: str
    verdict: Verdict
    seconds: float
    reason: str = ""


def totals(rows: Sequence[BatchRow]) -> str:
    """One line: how many instances got which verdict, and the time of all of them."""
    counts = Counter(row.verdict for row in rows)
    parts = [f"{counts[verdict]} {verdict.value}" for verdict in Verdict if counts[verdict]]
    seconds = sum(row.seconds for row in rows)
    return f"{len(rows)} instances: {', '.join(parts) or 'none'}; {seconds:.2f} s"


def print_table(rows: Sequence[BatchRow], stream: TextIO | None = None) -> None:
    """Print the table and its totals (default: to standard output)."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    stream = stream if stream is not None else sys.stdout
    table = Table("instance", "verdict", "seconds", "reason")
    table.columns[0].overflow = table.columns[3].overflow = "fold"
    table.columns[2].justify = "right"
    for row in rows:
        verdict = Text(row.verdict.value, style=_STYLES[row.verdict])
        table.add_row(Text(row.instance), verdict, f"{row.seconds:.2f}", Text(row.reason))
    console = Console(file=stream, width=None if stream.isatty() else _WIDTH_OF_A_FILE)
    console.print(table)
    console.print(Text(totals(rows)))
