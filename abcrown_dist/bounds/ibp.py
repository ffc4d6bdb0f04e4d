"""Interval bound propagation, one node at a time, rounded outward.

Sources: Gowal et al., "Scalable Verified Training for Provably Robust Image Classification", 2019;
affine maps by centre and radius as there, equation 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from abcrown_dist.bounds.concretize import centre_radius
from abcrown_dist.bounds.types import Interval
from abcrown_dist.graph.ir import Node
from abcrown_dist.relax import REGISTRY
from abcrown_dist.util.numerics import smallest, upward
from abcrown_dist.weights.base import Weights
from abcrown_dist.weights.maps import AffineMap

_OWN = 16  # roundings of constants, centre, radius, their difference, and its move outward


@dataclass(frozen=True)
class AffineInterval:
    """What intervals say of an affine node.

    Attributes:
        interval: its bounds.
        execution, own: (B, *shape) each, see `rounding.py`; None where nothing is ever rounded.
        peak: (B,) float64, the largest sum of magnitudes; None where nothing is summed.
    """

    interval: Interval
    execution: Tensor | None = None
    own: Tensor | None = None
    peak: Tensor | None = None


def affine_interval(weights: Weights, node: Node, operands: Sequence[Interval]) -> AffineInterval:
    """Bounds of an affine node from those of its operands."""
    with weights.visit(node) as affine:
        lowers, uppers = [x.lower for x in operands], [x.upper for x in operands]
        bias, sizes = affine.offset(), [x.magnitude for x in operands]
        if affine.nonnegative and affine.terms == 1 and bias is None:
            moved = Interval(affine.linear(*lowers), affine.linear(*uppers))
            if affine.readers == 1:
                return AffineInterval(moved)
            rate = weights.rounding.own(affine.readers + _OWN, weights.dtype)
            return AffineInterval(moved, own=rate * affine.linear(*sizes))
        halves = [centre_radius(lo, up) for lo, up in zip(lowers, uppers, strict=True)]
        stacked = [torch.cat([r, size]) for (_, r), size in zip(halves, sizes, strict=True)]
        radius, total = affine.absolute(*stacked).chunk(2)
        if affine.nonnegative:
            lower, upper = affine.apply(*lowers), affine.apply(*uppers)
        else:
            centre = affine.apply(*(c for c, _ in halves))
            lower, upper = centre - radius, centre + radius
        total = total if bias is None else total + bias.abs()
        total = (total + node.fused[1]) * upward(affine.terms, weights.dtype)
        return _outward(weights, affine, Interval(lower, upper), total, sizes)


def _outward(
    weights: Weights, affine: AffineMap, found: Interval, total: Tensor, sizes: Sequence[Tensor]
) -> AffineInterval:
    """Bounds moved outward by what computing them, and the network itself, may round.

    Args:
        total: (B, *shape), sums of magnitudes.
        sizes: largest magnitudes of the operands.
    """
    dtype, rounding = weights.dtype, weights.rounding
    counts = affine.roundings(*((size != 0).to(dtype) for size in sizes))
    rounds = counts > 0
    execution = torch.where(rounds, rounding.execution(counts) * total, 0)
    own = rounding.own(counts + _OWN, dtype) * total + (counts + _OWN) * smallest(dtype)
    slack = torch.where(rounds, own + execution, 0)
    # Constant parts are contracted in float64, over all neurons.
    terms = affine.readers + (counts[0].numel() if dtype == torch.float64 else 0)
    rate = rounding.own(terms + _OWN, dtype)
    return AffineInterval(
        Interval(found.lower - slack, found.upper + slack),
        execution if weights.rounding.model is not None else None,
        rate * total,
        peak(total),
    )


def peak(magnitude: Tensor) -> Tensor:
    """The largest entry (B,) in float64 of each domain (B, *shape); 0 on a rank without own neurons."""
    flat = magnitude.flatten(1).double()
    return flat.amax(1) if flat.shape[1] else flat.sum(1)


def nonlinear_interval(weights: Weights, node: Node, operand: Interval) -> Interval:
    """Bounds of an elementwise nonlinearity."""
    relaxation = REGISTRY[node.op]
    lower, upper = relaxation.interval(node.attrs, operand.lower, operand.upper)
    count = relaxation.roundings(node.attrs)
    if not count:
        return Interval(lower, upper)
    rate = weights.rounding.own(count + 2, weights.dtype) + weights.rounding.execution(count)
    slack = rate * torch.maximum(lower.abs(), upper.abs()) + smallest(weights.dtype)
    return Interval(lower - slack, upper + slack)
