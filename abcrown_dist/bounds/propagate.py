"""The two halves of every method: bounds of all pre-activations, then of the property's rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from abcrown_dist.bounds import alpha, chunks
from abcrown_dist.bounds.backward import Start, lower_bound, row_count
from abcrown_dist.bounds.concretize import Box, InputSet, contract
from abcrown_dist.bounds.exactness import exact_by_intervals
from abcrown_dist.bounds.forward import forward_intervals, forward_rows
from abcrown_dist.bounds.ibp import affine_interval, nonlinear_interval
from abcrown_dist.bounds.rounding import nonlinear_sensitivity
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.bounds.types import Interval, OneHot, Relaxed, RelaxedNode, RowBounds, preactivations
from abcrown_dist.graph.aten import classify
from abcrown_dist.graph.ir import Graph, Node
from abcrown_dist.relax import REGISTRY
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.weights.local import Weights

_WORKSPACE = 512 << 20  # bytes beside the weights, when no budget is given


def bound_intermediate(
    weights: Weights, inputs: InputSet, settings: BoundSettings, deadline: Deadline | None = None
) -> Relaxed:
    """Bound every pre-activation over `inputs` and relax every nonlinearity accordingly.

    Raises:
        DeadlineExceeded: between two chunks of rows.
    """
    graph = weights.graph
    tightened = forward_intervals(weights, inputs) if settings.intermediate == "forward" else {}
    exact = exact_by_intervals(graph)
    wanted = set(preactivations(graph))
    keep = wanted | set(graph.outputs)
    pending = {node.name: len(graph.readers(node.name)) for node in graph}
    intervals: dict[str, Interval] = {}
    nodes: dict[str, RelaxedNode] = {}
    sensitivity: dict[str, Tensor] = {}
    for node in graph:
        operands = [intervals[name] for name in node.inputs]
        if node.op == "input":
            intervals[node.name] = inputs.interval(node.name)
        elif classify(node) == "affine":
            intervals[node.name], rate = affine_interval(weights, node, operands)
            if rate is not None:
                sensitivity[node.name] = rate
        else:
            before = operands[0]
            lines = REGISTRY[node.op].lines(node.attrs, before.lower, before.upper)
            nodes[node.name] = RelaxedNode(node, lines)
            intervals[node.name] = nonlinear_interval(node, before)
            sensitivity[node.name] = nonlinear_sensitivity(node, before, intervals[node.name])
        if node.name in tightened:
            intervals[node.name] = _combine(intervals[node.name], tightened[node.name], settings)
        elif node.name in wanted and node.name not in exact and settings.intermediate != "ibp":
            relaxed = Relaxed(intervals, nodes, sensitivity)
            tighter = _tighten(weights, node, relaxed, inputs, settings, deadline)
            intervals[node.name] = _combine(intervals[node.name], tighter, settings)
        for name in dict.fromkeys(node.inputs):
            pending[name] -= 1
            if pending[name] == 0 and name not in keep:
                del intervals[name]
    return Relaxed(intervals, nodes, sensitivity)


def bound_rows(
    weights: Weights,
    inputs: InputSet,
    relaxed: Relaxed,
    start: Start,
    settings: BoundSettings,
    deadline: Deadline | None = None,
    stop: Callable[[RowBounds, Tensor], bool] | None = None,
) -> RowBounds:
    """Lower bounds (B, R) of the dense rows `start` by the settings' final method.

    Args:
        start: rows (B or 1, R, *shape) over outputs (and inputs, where a property mentions them).
        stop: told the best bounds so far of some rows (B, n) and which rows they are (n,); True
            ends their optimisation.
    """
    if settings.final == "ibp":
        return _interval_rows(relaxed, start, inputs)
    if settings.final == "forward":
        return forward_rows(weights, inputs, relaxed, start)
    total = row_count(start)
    name = max(start, key=lambda key: weights.graph[key].size)
    size = _chunk_size(weights, name, total, inputs.domains, settings, settings.final == "alpha-crown")
    parts = []
    for piece, count in chunks.chunks(torch.arange(total, device=weights.device), size):
        if deadline is not None:
            deadline.check()
        rows = {key: _take(value, piece) for key, value in start.items()}
        content = None if stop is None else partial(_content, stop, piece[:count])
        bounds = _solve(weights, rows, relaxed, inputs, settings, settings.final, content)
        parts.append(RowBounds(bounds.lower[:, :count], bounds.error[:, :count]))
    return _concatenate(parts, inputs.domains, weights)


def bound_outputs(weights: Weights, inputs: InputSet, settings: BoundSettings) -> dict[str, Interval]:
    """Elementwise bounds of every output: both halves in one, for those who want plain bounds."""
    relaxed = bound_intermediate(weights, inputs, settings)
    if settings.final == "ibp":
        return {name: relaxed.intervals[name] for name in weights.graph.outputs}
    result = {}
    for name in weights.graph.outputs:
        node, known = weights.graph[name], relaxed.intervals[name]
        index = torch.arange(node.size, device=weights.device).repeat(2)
        sign = torch.ones_like(index)
        sign[node.size :] = -1
        if settings.final == "forward":
            rows = forward_rows(weights, inputs, relaxed, {name: OneHot(index, sign)})
        else:
            rows = _identity_rows(weights, node, index, sign, relaxed, inputs, settings, settings.final, None)
        result[name] = _insert(known, index, sign, rows)
    return result


def _tighten(
    weights: Weights,
    node: Node,
    relaxed: Relaxed,
    inputs: InputSet,
    settings: BoundSettings,
    deadline: Deadline | None,
) -> Interval:
    """Backward bounds of the loose neurons of a pre-activation; its interval bounds for the rest.

    Upper bounds go first: a ReLU that they show inactive needs no lower bound (an active one needs
    its upper bound all the same, for the interval bounds further on). Slopes are optimised only for
    neurons that are loose after plain CROWN.
    """
    graph, known = weights.graph, relaxed.intervals[node.name]

    def bounded(mask: Tensor, signs: tuple[float, ...], method: str) -> Interval:
        index = torch.nonzero(mask.any(0)).flatten()
        sign = torch.tensor(signs, dtype=weights.dtype, device=weights.device).repeat(len(index))
        index = index.repeat_interleave(len(signs))
        rows = _identity_rows(weights, node, index, sign, relaxed, inputs, settings, method, deadline)
        return _insert(known, index, sign, rows, mask)

    tried = _loose(graph, node.name, known)
    known = bounded(tried, (-1,), "crown")
    known = bounded(tried & _loose(graph, node.name, known), (1,), "crown")
    if settings.intermediate == "alpha-crown":
        known = bounded(_loose(graph, node.name, known), (1, -1), "alpha-crown")
    return known


def _insert(
    known: Interval, index: Tensor, sign: Tensor, rows: RowBounds, wanted: Tensor | None = None
) -> Interval:
    """`known` with lower bounds of  sign[i] z_index[i]  put in their places.

    Only where the mask `wanted` (B, neurons) holds: what other domains need must not change a
    domain's bounds. A lower bound joins the upper bound that was found before it, and so do their
    errors; the error of the interval bounds goes with them.
    """
    lower, upper, error = (t.flatten(1).clone() for t in (known.lower, known.upper, known.error))
    for side, target, factor in ((sign < 0, upper, -1), (sign > 0, lower, 1)):
        at = index[side]
        new, new_error = factor * rows.lower[:, side], rows.error[:, side]
        if target is lower:
            new_error = torch.maximum(new_error, error[:, at])
        if wanted is not None:
            new = torch.where(wanted[:, at], new, target[:, at])
            new_error = torch.where(wanted[:, at], new_error, error[:, at])
        target[:, at], error[:, at] = new, new_error
    return Interval(*(t.reshape(known.lower.shape) for t in (lower, upper, error)))


def _identity_rows(
    weights: Weights,
    node: Node,
    index: Tensor,
    sign: Tensor,
    relaxed: Relaxed,
    inputs: InputSet,
    settings: BoundSettings,
    method: str,
    deadline: Deadline | None,
) -> RowBounds:
    """Lower bounds (B, len(index)) of  sign[i] z_index[i]  over the neurons z of a node, in chunks."""
    size = _chunk_size(weights, node.name, len(index), inputs.domains, settings, method == "alpha-crown")
    parts = []
    for piece, count in chunks.chunks(torch.arange(len(index), device=weights.device), size):
        if deadline is not None:
            deadline.check()
        start = {node.name: OneHot(index[piece], sign[piece])}
        bounds = _solve(weights, start, relaxed, inputs, settings, method, None)
        parts.append(RowBounds(bounds.lower[:, :count], bounds.error[:, :count]))
    return _concatenate(parts, inputs.domains, weights)


def _concatenate(parts: list[RowBounds], domains: int, weights: Weights) -> RowBounds:
    if not parts:
        nothing = torch.zeros(domains, 0, dtype=weights.dtype, device=weights.device)
        return RowBounds(nothing, nothing)
    return RowBounds(torch.cat([p.lower for p in parts], 1), torch.cat([p.error for p in parts], 1))


def _content(stop: Callable[[RowBounds, Tensor], bool], rows: Tensor, best: RowBounds) -> bool:
    """Ask `stop` about the rows of a chunk, without those that only fill it up."""
    return stop(RowBounds(best.lower[:, : len(rows)], best.error[:, : len(rows)]), rows)


def _solve(
    weights: Weights,
    start: Start,
    relaxed: Relaxed,
    inputs: InputSet,
    settings: BoundSettings,
    method: str,
    stop: Callable[[RowBounds], bool] | None,
) -> RowBounds:
    if method == "alpha-crown":
        return alpha.maximise(weights, start, relaxed, inputs, settings.alpha, stop=stop).bounds
    return lower_bound(weights, start, relaxed, inputs)


def _combine(by_intervals: Interval, by_lines: Interval, settings: BoundSettings) -> Interval:
    """Intersect, or take the second; bounds that cross by more than rounding become NaN."""
    lower, upper, error = by_lines.lower, by_lines.upper, by_lines.error
    if settings.compare_with_ibp:
        error = torch.maximum(
            torch.where(by_intervals.lower > lower, by_intervals.error, error),
            torch.where(by_intervals.upper < upper, by_intervals.error, error),
        )
        lower = torch.maximum(lower, by_intervals.lower)
        upper = torch.minimum(upper, by_intervals.upper)
    gap = lower - upper
    crossed = gap > 0
    if bool(crossed.any()):
        # Two valid bounds cross only by rounding: then the value lies between them, give or take.
        wrong = gap > 4 * error + 1e-4 * lower.abs()
        lower, upper = torch.minimum(lower, upper), torch.maximum(lower, upper)
        nan = torch.full_like(lower, torch.nan)
        lower, upper = torch.where(wrong, nan, lower), torch.where(wrong, nan, upper)
    return dataclasses.replace(by_lines, lower=lower, upper=upper, error=error)


def _loose(graph: Graph, name: str, interval: Interval) -> Tensor:
    """Mask (B, neurons) of those whose bounds matter to a nonlinearity that reads them."""
    mask = torch.zeros_like(interval.lower, dtype=torch.bool)
    for reader in graph.readers(name):
        node = graph[reader]
        if node.op in REGISTRY:
            mask |= REGISTRY[node.op].is_loose(node.attrs, interval.lower, interval.upper)
    return mask.flatten(1)


def _interval_rows(relaxed: Relaxed, start: Start, inputs: InputSet) -> RowBounds:
    """Rows over interval bounds of the outputs: C c - |C| r, with the error of both."""
    known = {name: relaxed.intervals.get(name) or inputs.interval(name) for name in start}
    box = Box({k: v.lower for k, v in known.items()}, {k: v.upper for k, v in known.items()})
    rows = {name: value for name, value in start.items() if isinstance(value, Tensor)}
    lower = box.minimum(rows)
    error = torch.zeros_like(lower)
    for name, value in rows.items():
        error = error + contract(value.flatten(2).abs(), known[name].error + box.rounding(name))
    return RowBounds(lower, error)


def _chunk_size(
    weights: Weights, start: str, rows: int, domains: int, settings: BoundSettings, optimise: bool
) -> int:
    graph = weights.graph
    per_row = chunks.row_bytes(graph, start, weights.dtype, domains, optimise)
    limit = settings.batch_rows
    if settings.budget is not None:
        workspace = settings.budget - chunks.affine_weight_bytes(graph, weights.dtype)
    else:
        workspace = _WORKSPACE
        if weights.device.type == "cpu":
            limit = min(limit, chunks.rows_in_cache(graph, start, weights.dtype, domains))
    return chunks.chunk_size(rows, per_row, workspace, limit)


def _take(rows: Tensor | OneHot, index: Tensor) -> Tensor | OneHot:
    if isinstance(rows, OneHot):
        return OneHot(rows.index[index], rows.sign[index])
    return rows[:, index]
