"""What `vnncomp.py` prints: a line per instance, and the comparison with other verifiers at the end."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from vnncomp_data import DECIDED, Answer, Peers, Run

# Most that the geometric mean of our seconds to a peer's may be, by how the cache was.
TARGETS: Mapping[str, Mapping[str, float]] = {
    "prepare": {"abcrown": 0.6, "vibecheck": 0.9},
    "cold": {"abcrown": 0.8, "vibecheck": 1.2},
}
_COLUMNS = ("family", "network", "property", "expected", "verdict", "seconds", "domains", "reason")
_RIGHT = ("seconds", "domains")
_NAME = 26  # letters of a name; real ones have up to a hundred
_REASON = 40
_GRACE = 1.0  # seconds that a verdict may come after the time limit


def columns(peers: Peers) -> list[str]:
    """Heads of the table."""
    return [*_COLUMNS, *(part for name in peers.names for part in (name, "seconds")), "note"]


def is_right(column: str) -> bool:
    """Whether a column is of numbers."""
    return column in _RIGHT


def cells(run: Run, peers: Peers, timeout: float) -> list[str]:
    """One line of the table."""
    model, prop = (_short(PurePosixPath(name).stem, _NAME) for name in run.instance.key)
    theirs = peers.of(run.instance)
    others = [
        part
        for name in peers.names
        for part in ((theirs[name].verdict, f"{theirs[name].seconds:.1f}") if name in theirs else ("", ""))
    ]
    return [
        run.instance.family, model, prop, run.instance.expected, run.answer.verdict,
        f"{run.answer.seconds:.2f}", "" if run.domains is None else f"{run.domains}",
        _short(run.reason, _REASON), *others, ", ".join(notes(run, theirs, timeout)),
    ]  # fmt: skip


def _short(text: str, most: int) -> str:
    """`text` with its middle left out where it is long: names differ at their ends."""
    if len(text) <= most:
        return text
    head = (most - 2) // 2
    return f"{text[:head]}..{text[head + 2 - most :]}"


def notes(run: Run, theirs: Mapping[str, Answer], timeout: float) -> Iterator[str]:
    """What is remarkable about a line."""
    if run.wrong:
        yield "WRONG"
    contradicted = [name for name, answer in theirs.items() if run.answer.contradicts(answer.verdict)]
    if contradicted and not run.instance.expected:
        yield f"DISPUTED by {' and '.join(contradicted)}"
    solvers = _solvers(run, theirs)
    if solvers and not run.solved:
        yield f"lost to {' and '.join(solvers)}"
    if theirs and run.solved and not solvers:
        yield "won"
    if run.answer.seconds > timeout + _GRACE:
        yield "late"


def _solvers(run: Run, theirs: Mapping[str, Answer]) -> list[str]:
    return [name for name, answer in theirs.items() if answer.solves(run.instance.expected)]


def geometric_mean(ratios: Sequence[float]) -> float:
    """NaN where there are none."""
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan


def ratios(runs: Sequence[Run], peers: Peers, name: str) -> list[float]:
    """Our whole-process seconds to a peer's, on what both solved."""
    both = [(run, peers.of(run.instance).get(name)) for run in runs if run.solved]
    return [
        run.answer.seconds / answer.seconds
        for run, answer in both
        if answer is not None and answer.solves(run.instance.expected)
    ]


def totals(runs: Sequence[Run], peers: Peers, cache: str) -> Iterator[str]:
    """The comparison, a line each: wrong ones first."""
    for run in runs:
        if run.wrong:
            yield f"WRONG: {_name(run)}: {run.answer.verdict}, expected {run.instance.expected}"
    known = [run for run in runs if run.answer.verdict in DECIDED and not run.instance.expected]
    if known:
        yield f"{len(known)} verdicts of ours are of instances whose answer nobody knows"
    yield f"solved: ours {sum(run.solved for run in runs)} of {len(runs)}"
    for name in peers.names:
        yield from _beside(runs, peers, name, cache)
    lost = [run for run in runs if not run.solved and _solvers(run, peers.of(run.instance))]
    for run in lost:
        solvers = " and ".join(_solvers(run, peers.of(run.instance)))
        yield f"solved by {solvers}, not by us: {_name(run)} ({run.answer.verdict}: {run.reason})"


def _beside(runs: Sequence[Run], peers: Peers, name: str, cache: str) -> Iterator[str]:
    tried = [run for run in runs if name in peers.of(run.instance)]
    solved = sum(peers.of(run.instance)[name].solves(run.instance.expected) for run in tried)
    yield f"solved: {name} {solved} of {len(tried)} that it has tried"
    found = ratios(runs, peers, name)
    if not found:
        return
    mean = geometric_mean(found)
    line = f"seconds, ours / {name}'s: geometric mean {mean:.3f} over {len(found)} that both solved"
    target = TARGETS.get(cache, {}).get(name)
    if target is not None:
        line += f"; target {target:g} {'met' if mean <= target else 'MISSED'}"
    yield line


def _name(run: Run) -> str:
    return f"{run.instance.family} {' '.join(PurePosixPath(name).stem for name in run.instance.key)}"


def show_line(values: Sequence[str], markdown: bool) -> None:
    """One instance as soon as it is known: a row of the Markdown table, or a plain line."""
    if markdown:
        print("| " + " | ".join(value.replace("|", "\\|") for value in values) + " |", flush=True)
        return
    family, model, prop, _, verdict, seconds, domains, reason, *_ = values
    what = f"{verdict:8}{seconds:>8} s{domains:>9}  {family} {model} {prop} ({reason})"
    print(f"{what}  {values[-1]}".rstrip(), flush=True)


def show_head(names: Sequence[str]) -> None:
    """Head of the Markdown table."""
    show_line(names, True)
    print("|" + "|".join("---:" if is_right(name) else "---" for name in names) + "|", flush=True)


def show_table(names: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """The whole table, in colours on a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for name in names:
        table.add_column(name, justify="right" if is_right(name) else "left", overflow="fold")
    for line in lines:
        style = "bold white on red" if "WRONG" in line[-1] else "yellow" if line[-1] else ""
        table.add_row(*map(Text, line), style=style)
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 200).print(table)
