"""A plan in words."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import TextIO

from abcrown_dist.plan.predict import Option, Plan

_COLUMNS = ("mode", "weights", "gather", "coefficients", "alpha", "intervals", "peak", "rows", "fits")
_WIDTH_OF_A_FILE = 120  # columns where the stream is no terminal


def size_text(count: int) -> str:
    """Bytes with a unit, three digits: 12.3 MiB."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.{max(0, 3 - len(str(int(value))))}f} {units[0]}"


def print_plan(plan: Plan, stream: TextIO | None = None) -> None:
    """Print the table, what it rests on, and the recommendation (default: to standard output)."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    stream = stream if stream is not None else sys.stdout
    console = Console(file=stream, width=None if stream.isatty() else _WIDTH_OF_A_FILE)
    for line in heading(plan):
        console.print(Text(line))
    table = Table(*_COLUMNS)
    for column in table.columns[1:]:
        column.justify = "right"
    for option in plan.options:
        table.add_row(*map(Text, cells(plan, option)))
    console.print(table)
    for line in (*notes(plan), recommendation(plan)):
        console.print(Text(line))


def cells(plan: Plan, option: Option) -> tuple[str, ...]:
    """One line of the table, a word for each of its columns."""
    needs = option.needs
    figures = (needs.weights, needs.gather, needs.coefficients, needs.alpha, needs.state, needs.peak)
    enough = "yes" if plan.fits(option) else "no"
    return str(option.choice), *map(size_text, figures), str(needs.rows), enough


def heading(plan: Plan) -> Iterator[str]:
    """What is planned."""
    graph, task = plan.graph, plan.work.task
    weights = sum(value.numel() for value in graph.constants.values())
    neurons = sum(node.size for node in graph)
    yield f"network: {weights:,} weights, {neurons:,} neurons in {len(graph)} nodes"
    if plan.work.steps:
        yield (
            f"bounds: {', '.join(plan.work.methods)}; at once: {task.domains} box(es), "
            f"{task.rows} row(s) of the property"
        )
    else:
        yield "bounds: none are computed, so that only weights count"
    memory = size_text(plan.room.of(plan.size == 1))
    yield f"on each of {plan.size} rank(s), with {memory} ({plan.room.source}):"


def notes(plan: Plan) -> Iterator[str]:
    """What the figures mean, and what they leave out."""
    if plan.work.steps:
        yield (
            "Each figure is that kind's own worst moment, peak that of all together, every neuron taken to "
            "be loose (unknown before the run). rows: coefficients at once, as solver.crown.batch_size and "
            "solver.crown.memory_budget limit them."
        )
    yield "Not counted: attacks, and what is not a tensor; a tenth of the memory is kept free for these."
    for option in plan.options:
        if option.placed.replicated:
            yield f"{option.choice} gathers for, and computes on every rank: {_replicated(plan, option)}."


def recommendation(plan: Plan) -> str:
    """What to set, in one sentence."""
    found = plan.recommended()
    if found is not None:
        return f"recommended: {found.choice.setting}: {found.choice.why}"
    smaller = plan.with_fewer_rows()
    if smaller is None:
        return "recommended: more ranks, or devices with more memory: no mode fits, not even row by row"
    limit, option = smaller
    return (
        f"recommended: {option.choice.setting} and solver.crown.batch_size {limit}: as it is no mode fits; "
        f"then {size_text(option.needs.peak)} are needed"
    )


def _replicated(plan: Plan, option: Option) -> str:
    counts = Counter(plan.graph[name].op for name in option.placed.replicated)
    return ", ".join(f"{count} x {op}" for op, count in sorted(counts.items()))
