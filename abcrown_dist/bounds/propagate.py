"""The two halves of every method: bounds of all pre-activations, then of the property's rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from abcrown_dist.bounds import alpha, chunks
from abcrown_dist.bounds.backward import Start, identity_rows, lower_bound, row_count
from abcrown_dist.bounds.concretize import InputSet
from abcrown_dist.bounds.exactness import exact_by_intervals
from abcrown_dist.bounds.forward import forward_intervals, forward_rows
from abcrown_dist.bounds.grid import Grid
from abcrown_dist.bounds.ibp import affine_interval, nonlinear_interval, peak
from abcrown_dist.bounds.intervals import combine, insert, interval_rows, loose_neurons, lower_always_counts
from abcrown_dist.bounds.rounding import nonlinear_sensitivity
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.bounds.types import Interval, OneHot, Relaxed, RelaxedNode, RowBounds, preactivations
from abcrown_dist.graph.aten import classify
from abcrown_dist.graph.ir import Node
from abcrown_dist.relax import REGISTRY
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.weights.base import Weights

Stop = Callable[[RowBounds, Tensor], bool]
Refine = Callable[[str, Interval], Interval]


def bound_intermediate(
    weights: Weights,
    inputs: InputSet,
    settings: BoundSettings,
    deadline: Deadline | None = None,
    refine: Refine | None = None,
) -> Relaxed:
    """Bound every pre-activation over `inputs` and relax every nonlinearity accordingly.

    Args:
        refine: given the name and the bounds (B, *shape) of a pre-activation, returns what else is
            known of it put together with them (see `intervals.combine`); what comes later builds on that.

    Raises:
        DeadlineExceeded: between two chunks of rows.
    """
    run = _Run(weights, inputs, settings, deadline or Deadline())
    graph = weights.graph
    tightened = forward_intervals(weights, inputs) if settings.intermediate == "forward" else {}
    exact = exact_by_intervals(graph) if inputs.is_box else set()
    wanted = set(preactivations(graph))
    keep = wanted | set(graph.outputs)
    pending = {node.name: len(graph.readers(node.name)) for node in graph}
    relaxed = Relaxed()
    intervals = relaxed.intervals
    for node in graph:
        intervals[node.name] = run.interval(node, relaxed)
        if node.name in tightened:
            found = tightened[node.name]
            intervals[node.name] = combine(intervals[node.name], found, settings.compare_with_ibp)
        elif node.name in wanted and node.name not in exact and settings.intermediate != "ibp":
            found = run.tighten(node, relaxed)
            intervals[node.name] = combine(intervals[node.name], found, settings.compare_with_ibp)
        if refine is not None and node.name in wanted:
            intervals[node.name] = refine(node.name, intervals[node.name])
        for name in dict.fromkeys(node.inputs):
            pending[name] -= 1
            if pending[name] == 0 and name not in keep:
                del intervals[name]
    return relaxed


def bound_rows(
    weights: Weights,
    inputs: InputSet,
    relaxed: Relaxed,
    start: Start,
    settings: BoundSettings,
    deadline: Deadline | None = None,
    stop: Stop | None = None,
) -> RowBounds:
    """Lower bounds (B, R) of the rows `start` by the settings' final method.

    Args:
        start: rows (B or 1, R, *shape) over outputs (and inputs, where a property mentions them).
        stop: told the best bounds so far of some rows (B, n) and which rows they are (n,); True
            ends their optimisation.
    """
    if settings.final == "ibp":
        return interval_rows(weights, relaxed, start, inputs)
    if settings.final == "forward":
        return forward_rows(weights, inputs, relaxed, start)
    run = _Run(weights, inputs, settings, deadline or Deadline())
    one_hot = any(isinstance(rows, OneHot) for rows in start.values())
    return run.in_chunks(
        row_count(start),
        tuple(start),
        one_hot,
        lambda index: _take(start, index),
        relaxed,
        settings.final,
        stop,
    )


def bound_outputs(weights: Weights, inputs: InputSet, settings: BoundSettings) -> dict[str, Interval]:
    """Elementwise bounds of (the own neurons of) every output: both halves in one."""
    relaxed = bound_intermediate(weights, inputs, settings)
    if settings.final == "ibp":
        return {name: relaxed.intervals[name] for name in weights.graph.outputs}
    run = _Run(weights, inputs, settings, Deadline())
    result = {}
    for name in weights.graph.outputs:
        size = weights.graph[name].size
        index = torch.arange(size, device=weights.device).repeat(2)
        sign = torch.ones_like(index)
        sign[size:] = -1
        if settings.final == "forward":
            rows = forward_rows(weights, inputs, relaxed, identity_rows(weights, name, index, sign))
        else:
            rows = run.neurons(name, index, sign, relaxed, settings.final)
        result[name] = insert(weights, name, relaxed.intervals[name], index, sign, rows)
    return result


@dataclass(frozen=True)
class _Run:
    """What stays the same while a network is bounded."""

    weights: Weights
    inputs: InputSet
    settings: BoundSettings
    deadline: Deadline

    def interval(self, node: Node, relaxed: Relaxed) -> Interval:
        """Interval bounds of a node from those of its operands; enters its relaxation and sensitivity."""
        if node.op == "input":
            found = self.inputs.interval(node.name)
            relaxed.peak[node.name] = peak(found.magnitude)
            return found
        operands = [relaxed.intervals[name] for name in node.inputs]
        if classify(node) == "affine":
            affine = affine_interval(self.weights, node, operands)
            for known, part in (
                (relaxed.execution, affine.execution),
                (relaxed.own, affine.own),
                (relaxed.peak, affine.peak),
            ):
                if part is not None:
                    known[node.name] = part
            return affine.interval
        before = operands[0]
        lines = REGISTRY[node.op].lines(node.attrs, before.lower, before.upper)
        relaxed.nodes[node.name] = RelaxedNode(node, lines)
        found = nonlinear_interval(self.weights, node, before)
        relaxed.peak[node.name] = peak(found.magnitude)
        rate = nonlinear_sensitivity(self.weights, node, found)
        if rate is not None:
            relaxed.own[node.name] = rate
        return found

    def tighten(self, node: Node, relaxed: Relaxed) -> Interval:
        """Backward bounds of the loose neurons of a pre-activation; its interval bounds for the rest.

        Upper bounds go first: a ReLU that they show inactive needs no lower bound (other neurons need
        both all the same, for the interval bounds further on). Slopes are optimised only for neurons
        that are loose after plain CROWN.
        """
        weights, known = self.weights, relaxed.intervals[node.name]

        def bounded(mask: Tensor, signs: tuple[float, ...], method: str) -> Interval:
            chosen = mask.any(0)
            if self.settings.fixed_rows is not None:
                chosen = _whole_blocks(chosen, self.settings.fixed_rows)
            index = torch.nonzero(chosen).flatten()
            sign = torch.tensor(signs, dtype=weights.dtype, device=weights.device).repeat(len(index))
            index = index.repeat_interleave(len(signs))
            rows = self.neurons(node.name, index, sign, relaxed, method)
            return insert(weights, node.name, known, index, sign, rows, mask)

        tried = loose_neurons(weights, node.name, known)
        known = bounded(tried, (-1,), "crown")
        again = tried
        if not lower_always_counts(weights.graph, node.name):
            again = tried & loose_neurons(weights, node.name, known)
        known = bounded(again, (1,), "crown")
        if self.settings.intermediate == "alpha-crown":
            known = bounded(loose_neurons(weights, node.name, known), (1, -1), "alpha-crown")
        return known

    def neurons(self, name: str, index: Tensor, sign: Tensor, relaxed: Relaxed, method: str) -> RowBounds:
        """Lower bounds (B, len(index)) of  sign[i] z_index[i]  over the neurons z of a node."""

        def rows(piece: Tensor) -> Start:
            return identity_rows(self.weights, name, index[piece], sign[piece])

        return self.in_chunks(len(index), (name,), True, rows, relaxed, method, None)

    def in_chunks(
        self,
        count: int,
        names: tuple[str, ...],
        one_hot: bool,
        rows: Callable[[Tensor], Start],
        relaxed: Relaxed,
        method: str,
        stop: Stop | None,
    ) -> RowBounds:
        """Bounds of `count` rows, chunk by chunk; `rows` gives the start of the rows that it is told."""
        weights = self.weights
        size = Grid(
            self.settings, weights.graph, weights.dtype, self.inputs.domains, weights.device.type == "cpu",
            names, optimise=method == "alpha-crown", one_hot=one_hot,
        ).rows(count)  # fmt: skip
        grid = list(chunks.chunks(torch.arange(count, device=weights.device), size))
        result = torch.zeros(2, self.inputs.domains, count, dtype=weights.dtype, device=weights.device)
        for number, counts in weights.own_chunks(len(grid)):
            self.deadline.check()
            piece, real = grid[number]
            content = None if stop is None else partial(_content, stop, piece[:real])
            bounds = self._solve(rows(piece), relaxed, method, content)
            if counts:
                result[0, :, piece[:real]] = bounds.lower[:, :real]
                result[1, :, piece[:real]] = bounds.error[:, :real]
        lower, error = weights.merge_rows(result)
        return RowBounds(lower, error)

    def _solve(
        self, start: Start, relaxed: Relaxed, method: str, stop: Callable[[RowBounds], bool] | None
    ) -> RowBounds:
        if method == "alpha-crown":
            return alpha.maximise(
                self.weights,
                start,
                relaxed,
                self.inputs,
                self.settings.alpha,
                stop=stop,
                deadline=self.deadline,
            ).bounds
        return lower_bound(self.weights, start, relaxed, self.inputs)


def _whole_blocks(chosen: Tensor, size: int) -> Tensor:
    """All neurons of every block of `size` with a chosen one: a row then has one place in its chunk."""
    padded = torch.nn.functional.pad(chosen, (0, -len(chosen) % size)).view(-1, size)
    return padded.any(1).repeat_interleave(size)[: len(chosen)]


def _content(stop: Stop, rows: Tensor, best: RowBounds) -> bool:
    """Ask `stop` about the rows of a chunk, without those that only fill it up."""
    return stop(RowBounds(best.lower[:, : len(rows)], best.error[:, : len(rows)]), rows)


def _take(start: Start, index: Tensor) -> Start:
    return {
        name: OneHot(rows.index[index], rows.sign[index]) if isinstance(rows, OneHot) else rows[:, index]
        for name, rows in start.items()
    }
