"""Forward linear bounds: every node between two linear functions of the varying inputs.

Xu et al., "Automatic Perturbation Analysis for Scalable Certified Robustness and Beyond", NeurIPS
2020, section 3.2 (forward mode LiRPA). With K inputs that vary, a neuron costs K + 1 coefficients per
side whatever the width of the network, so that this wins where inputs are few and neurons many.

Inputs are scaled to x = c + r t with t in [-1, 1]^K; a pair of forms is
    low0 + low t <= z <= up0 + up t,   low, up (B, K, *shape), low0, up0 (B, *shape).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from abcrown_dist.bounds.backward import Start
from abcrown_dist.bounds.concretize import InputSet, centre_radius, contract
from abcrown_dist.bounds.types import Interval, OneHot, Relaxed, RelaxedNode, RowBounds, preactivations
from abcrown_dist.graph.aten import classify
from abcrown_dist.graph.ir import Node
from abcrown_dist.relax import REGISTRY
from abcrown_dist.util.numerics import Rounding, smallest, two_sum, upward
from abcrown_dist.weights.base import Weights
from abcrown_dist.weights.maps import AffineMap


@dataclass(frozen=True)
class Forms:
    """Two linear forms of one node, and their rounding error (B, *shape).

    `up` is `low` (the same object) as long as the node is an affine function of the inputs.
    """

    low: Tensor
    low0: Tensor
    up: Tensor
    up0: Tensor
    error: Tensor

    def interval(self, rounding: Rounding) -> Interval:
        """Concrete bounds over t in [-1, 1]^K."""
        lower, lost_below = two_sum(self.low0, -self.low.abs().sum(1))
        upper, lost_above = two_sum(self.up0, self.up.abs().sum(1))
        slack = rounding.own(self.low.shape[1] + 4, self.low.dtype) * self.magnitude()
        several = ((self.low != 0).sum(1) > 1) | ((self.up != 0).sum(1) > 1)  # else their sum is exact
        slack = self.error + torch.where(several, slack, 0.0)
        return Interval(lower - (slack + lost_below), upper + (slack + lost_above))

    def magnitude(self) -> Tensor:
        """Largest absolute value that the forms' own terms can sum up to."""
        low = self.low0.abs() + self.low.abs().sum(1)
        if self.up is self.low:
            return low
        return torch.maximum(low, self.up0.abs() + self.up.abs().sum(1))


Relax = Callable[[Node, Interval], RelaxedNode]


def forward_intervals(weights: Weights, inputs: InputSet) -> dict[str, Interval]:
    """Bounds of every pre-activation and output by forward mode alone."""
    found: dict[str, Interval] = {}
    names = set(preactivations(weights.graph)) | set(weights.graph.outputs)

    def relax(node: Node, interval: Interval) -> RelaxedNode:
        return RelaxedNode(node, REGISTRY[node.op].lines(node.attrs, interval.lower, interval.upper))

    def visit(name: str, forms: Forms) -> None:
        if name in names:
            found[name] = forms.interval(weights.rounding)

    _run(weights, inputs, relax, visit)
    return found


def forward_rows(weights: Weights, inputs: InputSet, relaxed: Relaxed, start: Start) -> RowBounds:
    """Lower bounds (B, R) of rows over forward forms of the nodes in `start`."""
    forms: dict[str, Forms] = {}

    def visit(name: str, value: Forms) -> None:
        if name in start:
            forms[name] = value

    _run(weights, inputs, lambda node, _: relaxed.nodes[node.name], visit)
    total: Tensor | None = None
    constant: Tensor | None = None
    error: Tensor | None = None
    for name, rows in start.items():
        one_hot = isinstance(rows, OneHot)  # picks a form as it is
        if isinstance(rows, OneHot):
            rows = rows.dense(weights.shape(name), weights.dtype)
        form, A = forms[name], rows.flatten(2)
        positive, negative = A.clamp(min=0), A.clamp(max=0)
        slopes = positive @ form.low.flatten(2).mT + negative @ form.up.flatten(2).mT
        offset = contract(positive, form.low0) + contract(negative, form.up0)
        rate = weights.rounding.own(A.shape[2] + slopes.shape[2] + 8, slopes.dtype)
        charge = form.error if one_hot else form.error + rate * form.magnitude()
        slack = contract(A.abs(), charge) * upward(A.shape[2], A.dtype)
        if not one_hot:
            slack = slack + A.shape[2] * (slopes.shape[2] + 1) * smallest(A.dtype)
        total = slopes if total is None else total + slopes
        constant = offset if constant is None else constant + offset
        error = slack if error is None else error + slack
    assert total is not None and constant is not None and error is not None
    constant, error = weights.total(torch.stack([constant, error]))
    slopes = weights.total(total).abs()
    size, several = slopes.sum(2), (slopes != 0).sum(2) > 1
    lower, lost = two_sum(constant, -size)
    rate = weights.rounding.own(slopes.shape[2] + 4, slopes.dtype)
    return RowBounds(lower, error + lost + torch.where(several, rate * size, 0.0))


def varying_inputs(weights: Weights, inputs: InputSet) -> int:
    """Number K of input variables that vary in some domain."""
    return sum(int(_varies(weights, inputs, name).sum()) for name in weights.graph.inputs)


def _varies(weights: Weights, inputs: InputSet, name: str) -> Tensor:
    """Mask (*shape) over all variables of an input: which vary in some domain."""
    box = inputs.interval(name)
    return weights.whole(name, (box.lower < box.upper).any(0))


def _run(weights: Weights, inputs: InputSet, relax: Relax, visit: Callable[[str, Forms], None]) -> None:
    graph = weights.graph
    forms = _input_forms(weights, inputs)
    pending = {node.name: len(graph.readers(node.name)) for node in graph}
    for node in graph:
        operands = [forms[name] for name in node.inputs]
        if node.op == "input":
            pass
        elif classify(node) == "affine":
            with weights.visit(node) as affine:
                forms[node.name] = _affine(weights, affine, operands, node.fused[1])
        else:
            relaxed = relax(node, operands[0].interval(weights.rounding))
            forms[node.name] = _relaxed(weights, relaxed, operands[0])
        visit(node.name, forms[node.name])
        for name in dict.fromkeys(node.inputs):
            pending[name] -= 1
            if pending[name] == 0:
                del forms[name]


def _input_forms(weights: Weights, inputs: InputSet) -> dict[str, Forms]:
    # At least one column, of zeros where nothing varies: not every call takes an empty batch.
    graph, count, offset = weights.graph, max(1, varying_inputs(weights, inputs)), 0
    forms = {}
    for name in graph.inputs:
        box = inputs.interval(name)
        centre, radius = centre_radius(box.lower, box.upper)
        varies = _varies(weights, inputs, name)
        place = (varies.flatten().cumsum(0) - 1).reshape(varies.shape) + offset
        own, place = weights.own(name, varies).flatten(), weights.own(name, place).flatten()
        shape = weights.shape(name)
        slopes = torch.zeros(inputs.domains, count, len(own), dtype=weights.dtype, device=weights.device)
        slopes[:, place[own], own.nonzero().flatten()] = radius.flatten(1)[:, own]
        slopes = slopes.reshape(inputs.domains, count, *shape)
        forms[name] = Forms(slopes, centre, slopes, centre, torch.zeros_like(centre))
        offset += int(varies.sum())
    return forms


def _affine(weights: Weights, affine: AffineMap, operands: list[Forms], constant: float) -> Forms:
    """Forms of an affine node; `constant` is what fused calls add up beside them."""
    lead, dtype, rounding = operands[0].low.shape[:2], weights.dtype, weights.rounding
    bias, sizes = affine.offset(), [x.magnitude() for x in operands]
    counts = affine.roundings(*((size != 0).to(dtype) for size in sizes))
    total = affine.absolute(*sizes) + constant
    total = total if bias is None else total + bias.abs()
    # Sums of low + up and low - up, for the slopes and the constant, with the sum of both kinds.
    rate = rounding.own(counts + 8, dtype) + rounding.execution(counts)
    here = rate * total + (counts + 8) * (lead[1] + 1) * smallest(dtype)
    error = affine.absolute(*(x.error for x in operands)) + torch.where(counts > 0, here, 0.0)
    error = error * upward(2 * affine.terms + 8, dtype)

    def linear(*parts: Tensor) -> Tensor:
        return affine.linear(*(part.flatten(0, 1) for part in parts)).unflatten(0, lead)

    def absolute(*parts: Tensor) -> Tensor:
        return affine.absolute(*(part.flatten(0, 1) for part in parts)).unflatten(0, lead)

    if all(x.up is x.low for x in operands):
        low = linear(*(x.low for x in operands))
        low0 = affine.apply(*(x.low0 for x in operands))
        return Forms(low, low0, low, low0, error)
    if affine.nonnegative:
        return Forms(
            linear(*(x.low for x in operands)),
            affine.apply(*(x.low0 for x in operands)),
            linear(*(x.up for x in operands)),
            affine.apply(*(x.up0 for x in operands)),
            error,
        )
    # W+ low + W- up = W (low + up) / 2 - |W| (up - low) / 2, likewise for the upper form.
    middle = linear(*((x.low + x.up) / 2 for x in operands))
    spread = absolute(*((x.up - x.low) / 2 for x in operands))
    middle0 = affine.apply(*((x.low0 + x.up0) / 2 for x in operands))
    spread0 = affine.absolute(*((x.up0 - x.low0) / 2 for x in operands))
    return Forms(middle - spread, middle0 - spread0, middle + spread, middle0 + spread0, error)


def _relaxed(weights: Weights, relaxed: RelaxedNode, z: Forms) -> Forms:
    lines, node = relaxed.lines, relaxed.node
    low, low0 = _follow(lines.lower_slope, lines.lower_intercept, z.low, z.low0, z.up, z.up0)
    up, up0 = _follow(lines.upper_slope, lines.upper_intercept, z.up, z.up0, z.low, z.low0)
    steepest = torch.maximum(lines.lower_slope.abs(), lines.upper_slope.abs())
    count = relaxed.relaxation.roundings(node.attrs)
    rate = weights.rounding.own(8, z.low.dtype) + weights.rounding.execution(count)
    size = steepest * z.magnitude()
    for intercept in (lines.lower_intercept, lines.upper_intercept):
        size = size if intercept is None else size + intercept.abs()
    error = steepest * z.error + rate * size + 8 * (z.low.shape[1] + 1) * smallest(z.low.dtype)
    return Forms(low, low0, up, up0, error)


def _follow(
    slope: Tensor, intercept: Tensor | None, same: Tensor, same0: Tensor, other: Tensor, other0: Tensor
) -> tuple[Tensor, Tensor]:
    """A line applied to a form: a positive slope takes the same side's form, a negative the other's."""
    if bool((slope >= 0).all()):
        form, form0 = slope[:, None] * same, slope * same0
    else:
        up, down = slope.clamp(min=0), slope.clamp(max=0)
        form, form0 = up[:, None] * same + down[:, None] * other, up * same0 + down * other0
    return form, form0 if intercept is None else form0 + intercept
