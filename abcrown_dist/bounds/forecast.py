"""What a whole bounding run will need on a rank, foretold from sizes without running it.

Which neurons will be loose is not known before intervals are: all are taken to be, the worst case.
The parts are those of `propagate.py`: an interval pass, then backward passes from every
pre-activation and from the final rows, chunk by chunk, or forward forms of every node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from abcrown_dist.bounds import chunks
from abcrown_dist.bounds.exactness import exact_by_intervals
from abcrown_dist.bounds.grid import Grid
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.bounds.types import ancestors, preactivations
from abcrown_dist.bounds.workspace import Workspace, workspace
from abcrown_dist.graph.aten import classify
from abcrown_dist.graph.ir import Graph
from abcrown_dist.weights.footprint import Footprint
from abcrown_dist.weights.maps import changed_entries


@dataclass(frozen=True)
class Forecast:
    """Bytes on the rank that needs most, each kind at its own worst moment.

    Attributes:
        weights: at rest.
        gather: weights that are whole for a visit, with what is fetched ahead.
        coefficients: coefficient matrices (or forward forms) and their temporaries.
        alpha: slopes with their moments and gradients.
        state: intervals, lines and sensitivities of all nodes.
        peak: all together at the worst moment.
        rows: most rows of coefficients at once.
    """

    weights: int
    gather: int
    coefficients: int
    alpha: int
    state: int
    peak: int
    rows: int

    def worst(self, other: Forecast) -> Forecast:
        """The larger figure of each kind: one run after another."""
        pairs = zip(_figures(self), _figures(other), strict=True)
        return Forecast(*(max(pair) for pair in pairs))


@dataclass(frozen=True)
class Task:
    """What is bounded.

    Attributes:
        domains: boxes at once.
        rows: rows of the property.
        varying: inputs that vary, which forward forms are functions of.
        dtype: of all bounds.
        on_cpu: as for `grid.Grid`.
    """

    domains: int
    rows: int
    varying: int
    dtype: torch.dtype = torch.float32
    on_cpu: bool = True


@dataclass(frozen=True)
class _Start:
    """Rows that are bounded together: from which nodes, how many, how."""

    nodes: tuple[str, ...]
    count: int
    optimise: bool
    one_hot: bool


def forecast(placed: Footprint, settings: BoundSettings, task: Task) -> Forecast:
    """Foretell a run with `settings` on one of the ranks of `placed`."""
    width = task.dtype.itemsize
    state = chunks.state_bytes(placed.graph, task.dtype, task.domains, placed.own)
    by_intervals = _interval_pass(placed) * width
    found = [Workspace(by_intervals, max(placed.fetched.values(), default=0) * width, 0, 0)]
    most_rows = 0
    for start in _starts(placed.graph, settings, task):
        rows = Grid(
            settings, placed.graph, task.dtype, task.domains, task.on_cpu,
            start.nodes, optimise=start.optimise, one_hot=start.one_hot,
        ).most_rows(start.count)  # fmt: skip
        most_rows = max(most_rows, rows)
        part = workspace(
            placed, start.nodes, task.dtype, task.domains, rows,
            optimise=start.optimise, one_hot=start.one_hot,
        )  # fmt: skip
        found.append(part)
    if "forward" in (settings.intermediate, settings.final):
        found.append(_forward_pass(placed, task))
    return Forecast(
        weights=placed.rest,
        gather=max(part.gathers for part in found),
        coefficients=max(part.coefficients for part in found),
        alpha=max(part.alpha for part in found),
        state=state,
        peak=placed.rest + state + max(part.peak for part in found),
        rows=most_rows,
    )


def _starts(graph: Graph, settings: BoundSettings, task: Task) -> Iterator[_Start]:
    """Every backward pass of a run, all neurons of a pre-activation taken to be loose."""
    exact = exact_by_intervals(graph)
    inner = [name for name in preactivations(graph) if name not in exact]
    if settings.intermediate in ("crown", "alpha-crown"):
        yield from (_Start((name,), graph[name].size, False, True) for name in inner)
    if settings.intermediate == "alpha-crown":
        yield from (_Start((name,), 2 * graph[name].size, True, True) for name in inner)
    if settings.final in ("crown", "alpha-crown"):
        yield _Start(graph.outputs, task.rows, settings.final == "alpha-crown", False)


def _interval_pass(placed: Footprint) -> int:
    """Numbers beside the state at the worst moment of an interval pass: a weight and its magnitudes."""
    graph = placed.graph
    return max(
        (
            placed.fetched.get(node.name, 0) + changed_entries(graph, node, _computed(placed, node.name))
            for node in graph
            if classify(node) == "affine" and node.constants()
        ),
        default=0,
    )


def _computed(placed: Footprint, name: str) -> int:
    return placed.graph[name].size if name in placed.replicated else placed.own[name]


def _forward_pass(placed: Footprint, task: Task) -> Workspace:
    """Two forms of every operand and of the node itself, and as many temporaries."""
    graph, width = placed.graph, task.dtype.itemsize
    forms = 2 * (task.varying + 1) * task.domains
    needed = ancestors(graph, graph.outputs)
    most = max(
        2 * (placed.own[node.name] + sum(placed.own[name] for name in dict.fromkeys(node.inputs))) * forms
        + placed.fetched.get(node.name, 0)
        for node in graph
        if node.name in needed
    )
    gathers = max(placed.fetched.values(), default=0)
    return Workspace(most * width, gathers * width, (most - gathers) * width, 0)


def _figures(found: Forecast) -> Sequence[int]:
    return (
        found.weights, found.gather, found.coefficients, found.alpha, found.state, found.peak, found.rows,
    )  # fmt: skip
