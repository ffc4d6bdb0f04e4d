"""Backward CROWN: rows of coefficients walk from a node to the inputs.

Zhang et al., "Efficient Neural Network Robustness Certification with General Activation
Functions", NeurIPS 2018; on general graphs Xu et al., "Automatic Perturbation Analysis for Scalable
Certified Robustness and Beyond", NeurIPS 2020, algorithm 1. Only lower bounds are ever computed: an
upper bound is minus the lower bound of the negated row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from abcrown_dist.bounds.concretize import InputSet, contract, contract_in_float64
from abcrown_dist.bounds.rules import affine_backward, relaxed_backward, relaxed_forward
from abcrown_dist.bounds.types import OneHot, Relaxed, RowBounds, ancestors
from abcrown_dist.graph.aten import classify
from abcrown_dist.graph.ir import Node
from abcrown_dist.util.numerics import round_down, round_up, smallest, two_sum, unit_roundoff, upward
from abcrown_dist.weights.base import Weights
from abcrown_dist.weights.maps import AffineMap

_U64 = unit_roundoff(torch.float64)

Start = Mapping[str, "Tensor | OneHot"]  # rows over one or several nodes: (B or 1, R, *shape) each


@dataclass(frozen=True)
class Push:
    """Coefficients that are added to rows at single neurons of a node.

    Attributes:
        index: (B, D) flat own neurons; one may occur more than once.
        amount: (B, R, D).
    """

    index: Tensor
    amount: Tensor

    def apply(self, rows: Tensor) -> Tensor:
        """`rows` (B or 1, R, *shape) with the amounts added."""
        flat = rows.flatten(2).expand(len(self.amount), -1, -1)
        if not flat.shape[2]:
            return rows
        return flat.scatter_add(2, self.index[:, None].expand_as(self.amount), self.amount).reshape(
            *flat.shape[:2], *rows.shape[2:]
        )


@dataclass(frozen=True)
class LinearBound:
    """A x + bias, below the rows on every domain.

    Attributes:
        A: by input name (B or 1, R, *shape).
        bias: (B or 1, R), in float64 where errors are tracked.
        error: (B or 1, R) float64, all rounding errors but that of the concretisation; zero when not
            tracked.
        underflow: (B or 1, 1) float64, what may be lost where numbers are too small for full precision,
            if anything is rounded at all; zero when not tracked.

    `bias`, `error` and `underflow` are what own neurons contribute: under tensor parallelism still to be
    added up.
    """

    A: Mapping[str, Tensor]
    bias: Tensor
    error: Tensor
    underflow: Tensor


def back_substitute(
    weights: Weights,
    start: Start,
    relaxed: Relaxed,
    *,
    alphas: Mapping[str, Tensor] | None = None,
    tape: dict[str, Tensor] | None = None,
    track_error: bool = True,
    pushes: Mapping[str, Push] | None = None,
) -> LinearBound:
    """Walk rows back to the inputs.

    Args:
        weights: of the network.
        start: rows by node name; all have the same R.
        relaxed: every nonlinearity that `start` depends on.
        alphas: lower slopes (B, R, *shape) by nonlinear node, instead of the default ones.
        tape: filled with the coefficients A of every nonlinear node that is passed.
        track_error: sum up the rounding error; costs one product with a vector per node.
        pushes: what is added to the coefficients of a node before they go on, by node.
    """
    graph = weights.graph
    walk = _Walk(weights, row_count(start), relaxed, alphas or {}, tape, track_error, pushes or {})
    for name, rows in start.items():
        walk.add(name, rows)
    needed = ancestors(graph, tuple(start))
    order = [node for node in reversed(graph.nodes) if node.name in needed]
    weights.expect([node.name for node in order if classify(node) == "affine"])
    for node in order:
        walk.pass_node(node)
    underflow = _underflow(weights, relaxed) if track_error else walk.error.new_zeros(1, 1)
    return LinearBound(walk.inputs, walk.bias, walk.error, underflow)


def lower_bound(weights: Weights, start: Start, relaxed: Relaxed, inputs: InputSet) -> RowBounds:
    """Lower bounds of rows with the default lines, and their rounding error."""
    return concretize(weights, back_substitute(weights, start, relaxed), inputs)


def concretize(
    weights: Weights, linear: LinearBound, inputs: InputSet, track_error: bool = True
) -> RowBounds:
    """Minimum of a linear bound over the input sets, and its rounding error (zero if not tracked)."""
    if not track_error:
        lower = weights.total(inputs.minimum(linear.A) + linear.bias)
        return RowBounds(lower, torch.zeros_like(lower))
    lower, error = inputs.safe_minimum(linear.A, weights.rounding)
    lower, lost = two_sum(*torch.broadcast_tensors(lower, linear.bias))
    error = error + linear.error + lost
    if weights.parts > 1:  # what ranks have of the bound is added up
        error = error + weights.parts * _U64 * lower.abs()
    parts = torch.broadcast_tensors(lower, error, linear.underflow)
    lower, error, underflow = weights.total(torch.stack(parts))
    error = torch.where(error > 0, error + underflow, error)
    return rounded_bounds(lower, error, weights.dtype)


def rounded_bounds(lower: Tensor, error: Tensor, dtype: torch.dtype) -> RowBounds:
    """Lower bounds and errors (B, R) float64 as what they are at least and at most in `dtype`."""
    return RowBounds(round_down(lower, dtype), round_up(error, dtype))


def _underflow(weights: Weights, relaxed: Relaxed) -> Tensor:
    """What a pass may lose to numbers that are too small for full precision, (B, 1) float64.

    Each product loses less than `smallest` before it meets a neuron, and neurons, inputs among them, are at
    most `peak`.
    """
    neurons = sum(node.size for node in weights.graph)
    most = torch.stack(torch.broadcast_tensors(*relaxed.peak.values())).amax(0)
    return neurons**2 * smallest(weights.dtype) * most[:, None]


def identity_rows(weights: Weights, name: str, index: Tensor, sign: Tensor) -> Start:
    """A start of signed identity rows: row i is  sign[i] z_index[i]  over the flat neurons z of a node."""
    mine, place = weights.locate(name, index)
    own_index, own_sign = torch.zeros_like(index), torch.zeros_like(sign)
    own_index[mine], own_sign[mine] = place, sign[mine]
    return {name: OneHot(own_index, own_sign)}


def sweep(
    weights: Weights,
    start: Start,
    relaxed: Relaxed,
    points: Mapping[str, Tensor],
    tape: Mapping[str, Tensor],
    alphas: Mapping[str, Tensor],
    ends: dict[str, Tensor] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Run points (B, R, *shape) through the lines that each row chose; yield each pre-activation.

    Yields (nonlinear node, z (B, R, *shape)) in topological order for all that `start` depends on.
    The bound is linear in every lower slope at its fixed minimiser, with derivative max(A, 0) z.

    Args:
        ends: filled with the values of the nodes that `start` is about.
    """
    graph = weights.graph
    wanted = () if ends is None else tuple(start)
    last = ancestors(graph, (*tape, *wanted))
    pending = {name: sum(reader in last for reader in graph.readers(name)) for name in last}
    values: dict[str, Tensor] = {}
    order = [node for node in graph if node.name in last]
    weights.expect([node.name for node in order if classify(node) == "affine"])
    for node in order:
        if node.op == "input":
            values[node.name] = points[node.name]
        elif classify(node) == "affine":
            values[node.name] = _affine_value(weights, node, [values[name] for name in node.inputs])
        else:
            yield node.name, values[node.inputs[0]]
            if pending[node.name] or node.name in wanted:
                z, alpha = values[node.inputs[0]], alphas.get(node.name)
                values[node.name] = relaxed_forward(relaxed.nodes[node.name], tape[node.name], z, alpha)
                del z  # a name left over would hold the tensor until the next nonlinearity
        if ends is not None and node.name in wanted:
            ends[node.name] = values[node.name]
        _release(node, pending, values)


def _affine_value(weights: Weights, node: Node, operands: list[Tensor]) -> Tensor:
    lead = operands[0].shape[:2]
    with weights.visit(node) as affine:
        return affine.apply(*(x.flatten(0, 1) for x in operands)).unflatten(0, lead)


def _release(node: Node, pending: dict[str, int], values: dict[str, Tensor]) -> None:
    for name in dict.fromkeys(node.inputs):
        pending[name] -= 1
        if pending[name] == 0:
            del values[name]


class _Walk:
    """Coefficients that have been gathered so far, by node, during one backward pass."""

    def __init__(
        self,
        weights: Weights,
        rows: int,
        relaxed: Relaxed,
        alphas: Mapping[str, Tensor],
        tape: dict[str, Tensor] | None,
        track_error: bool,
        pushes: Mapping[str, Push],
    ) -> None:
        self.weights, self.graph = weights, weights.graph
        self.relaxed, self.alphas, self.tape, self.track_error = relaxed, alphas, tape, track_error
        self.pushes = pushes
        self.pending: dict[str, Tensor | OneHot] = {}
        self.inputs: dict[str, Tensor] = {}
        kind = torch.float64 if track_error else weights.dtype
        self.bias = torch.zeros(1, rows, dtype=kind, device=weights.device)
        self.error = torch.zeros(1, rows, dtype=torch.float64, device=weights.device)
        self.contract = contract_in_float64 if track_error else contract

    def add(self, name: str, rows: Tensor | OneHot) -> None:
        """Add rows to what flows into node `name`."""
        if name in self.pending:
            rows = self._dense(name, self.pending.pop(name)) + self._dense(name, rows)
        self.pending[name] = rows

    def pass_node(self, node: Node) -> None:
        """Move what has gathered at `node` to its operands."""
        rows = self.pending.pop(node.name, None)
        if rows is None:
            return
        if node.name in self.pushes:
            rows = self.pushes[node.name].apply(self._dense(node.name, rows))
        if node.op == "input":
            self.inputs[node.name] = self._dense(node.name, rows)
        elif classify(node) == "affine":
            self._pass_affine(node, rows)
        else:
            self._pass_nonlinear(node, self._dense(node.name, rows))

    def _pass_affine(self, node: Node, rows: Tensor | OneHot) -> None:
        with self.weights.visit(node) as affine:
            self._add_offset(affine.offset(), rows)
            self._add_error(node, rows)
            parts: tuple[Tensor | OneHot, ...] | None = None
            if isinstance(rows, OneHot):
                parts = self._one_hot_parts(node, rows, affine)
            if parts is None:
                parts = affine_backward(affine, self._dense(node.name, rows))
        for name, part in zip(node.inputs, parts, strict=True):
            self.add(name, part)

    def _one_hot_parts(
        self, node: Node, rows: OneHot, affine: AffineMap
    ) -> tuple[Tensor | OneHot, ...] | None:
        """The first steps without multiplying by an identity, where that is possible."""
        if affine.identity_rows:
            return (rows,) * len(node.inputs)
        taken = affine.rows(rows.index)
        if taken is None:
            return None
        sign = rows.sign.reshape(-1, *[1] * (taken.dim() - 1))
        return ((taken * sign)[None],)

    def _pass_nonlinear(self, node: Node, A: Tensor) -> None:
        self._add_error(node, A)
        if self.tape is not None:
            self.tape[node.name] = A
        alpha = self.alphas.get(node.name)
        result, bias = relaxed_backward(self.relaxed.nodes[node.name], A, alpha, self.contract)
        if bias is not None:
            self._add_bias(bias)
        self.add(node.inputs[0], result)

    def _add_offset(self, offset: Tensor | None, rows: Tensor | OneHot) -> None:
        if offset is None:
            return
        if isinstance(rows, OneHot):
            self._add_bias((offset.flatten()[rows.index] * rows.sign)[None].to(self.bias.dtype))
        else:
            self._add_bias(self.contract(rows.flatten(2), offset[None]))

    def _add_bias(self, part: Tensor) -> None:
        if not self.track_error:
            self.bias = self.bias + part
            return
        self.bias, lost = two_sum(*torch.broadcast_tensors(self.bias, part))
        self.error = self.error + lost

    def _add_error(self, node: Node, rows: Tensor | OneHot) -> None:
        if not self.track_error:
            return
        execution, own = self.relaxed.execution.get(node.name), self.relaxed.own.get(node.name)
        if execution is not None:
            self.error = self.error + _charge(rows, execution)
        if own is not None and not (node.unit and isinstance(rows, OneHot)):
            charge = _charge(rows, own)
            if node.unit and isinstance(rows, Tensor):
                charge = charge.masked_fill(self.weights.total(_broken(rows)) == 0, 0.0)
            self.error = self.error + charge

    def _dense(self, name: str, rows: Tensor | OneHot) -> Tensor:
        if isinstance(rows, OneHot):
            return rows.dense(self.weights.shape(name), self.weights.dtype)
        return rows


def _broken(rows: Tensor) -> Tensor:
    """What of the rows (B or 1, R, *shape) is no whole number, or so large that sums of them may round."""
    flat = rows.flatten(2)
    size = flat.abs().sum(2)
    large = torch.where(size * max(1, flat.shape[2]) < 1 / torch.finfo(rows.dtype).eps, 0.0, size)
    return (flat - flat.round()).abs().sum(2) + large


def _charge(rows: Tensor | OneHot, rate: Tensor) -> Tensor:
    """|A| times error rates (B, *shape), (B or 1, R) float64, not less than it is."""
    if not rate.numel():
        return torch.zeros(1, 1, dtype=torch.float64, device=rate.device)
    if isinstance(rows, OneHot):
        return (rate.flatten(1)[:, rows.index] * rows.sign.abs()).double()
    return contract(rows.flatten(2).abs(), rate).double() * upward(rate[0].numel(), rate.dtype)


def row_count(start: Start) -> int:
    """Number of rows R of a start."""
    rows = next(iter(start.values()))
    return len(rows.index) if isinstance(rows, OneHot) else rows.shape[1]
