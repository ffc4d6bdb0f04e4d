"""Interval bound propagation, one node at a time, with a running estimate of its rounding.

Sources: Gowal et al., "Scalable Verified Training for Provably Robust Image Classification", 2019;
affine maps by centre and radius as there, equation 6.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from abcrown_dist.bounds.concretize import centre_radius
from abcrown_dist.bounds.types import Interval
from abcrown_dist.graph.ir import Node
from abcrown_dist.relax import REGISTRY
from abcrown_dist.util.numerics import sum_error, unit_roundoff
from abcrown_dist.weights.base import Weights


def affine_interval(
    weights: Weights, node: Node, operands: Sequence[Interval]
) -> tuple[Interval, Tensor | None]:
    """Bounds of an affine node from those of its operands, and its sensitivity (`rounding.py`).

    The sensitivity (B, *shape) is None where the node rounds nothing (views, permutations).
    """
    with weights.visit(node) as affine:
        lowers, uppers = [x.lower for x in operands], [x.upper for x in operands]
        bias = affine.offset()
        if affine.nonnegative and affine.terms == 1 and bias is None:
            square = affine.squared(*(x.error.square() for x in operands))
            return Interval(affine.linear(*lowers), affine.linear(*uppers), square.sqrt()), None
        halves = [centre_radius(lo, up) for lo, up in zip(lowers, uppers, strict=True)]
        stacked = [torch.cat([r, x.magnitude]) for (_, r), x in zip(halves, operands, strict=True)]
        radius, magnitude = affine.absolute(*stacked).chunk(2)
        if affine.nonnegative:
            lower, upper = affine.apply(*lowers), affine.apply(*uppers)
        else:
            centre = affine.apply(*(c for c, _ in halves))
            lower, upper = centre - radius, centre + radius
        rate = sum_error(affine.terms + 2, weights.dtype)
        sensitivity = rate * (magnitude if bias is None else magnitude + bias.abs())
        # Errors of different neurons add up like independent ones; those of interval bounds are
        # not quite independent, which a factor of 2 per layer makes up for.
        inherited = 4 * affine.squared(*(x.error.square() for x in operands))
        return Interval(lower, upper, torch.hypot(inherited.sqrt(), sensitivity)), sensitivity


def nonlinear_interval(node: Node, operand: Interval) -> Interval:
    """Bounds of an elementwise nonlinearity."""
    relaxation = REGISTRY[node.op]
    lower, upper = relaxation.interval(node.attrs, operand.lower, operand.upper)
    error = relaxation.lipschitz(node.attrs) * operand.error
    rounding = unit_roundoff(lower.dtype) * torch.maximum(lower.abs(), upper.abs())
    return Interval(lower, upper, error + rounding)
