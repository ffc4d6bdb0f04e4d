"""How much a backward pass may lose to rounding.

Walking back through node k with coefficients A computes A' = A W in floating point, and rounds
each sum. Charged to the neurons i of node k, that moves the bound by about A_i s_i with

    s = rate (|W| |z| + |b|)     affine node; `rate` bounds the relative error of one sum
    s = (error of the pre-activation bounds) * Lipschitz constant + 4 u |f(z)|     nonlinearity

where |z| is the largest magnitude that z takes. Roundings of different neurons are independent of
each other, so that the squares (A_i s_i)^2 add up over neurons and nodes and the root of their sum is
the error. (Adding magnitudes instead gave estimates up to 1e9 times the true error on nets of nine
layers. This one is at least 16 times the largest true error of every real network that was tried with
backward intermediate bounds, at least 3.7 times with interval ones, and typically a few hundred times:
below 1e-3 of the width of the bounds. tests/bounds/test_rounding.py holds it to that.)

It costs one product with a vector per node. A bound proves only what exceeds its error. The affine
half falls off the interval pass (`ibp.affine_interval`); the other half is here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from abcrown_dist.bounds.types import Interval
from abcrown_dist.graph.ir import Node
from abcrown_dist.relax import REGISTRY
from abcrown_dist.util.numerics import unit_roundoff


def nonlinear_sensitivity(node: Node, before: Interval, after: Interval) -> Tensor:
    """s_k of a relaxed nonlinearity, (B, *shape)."""
    relaxation = REGISTRY[node.op]
    # A neuron that stays clear of every kink by more than its error is not relaxed at all.
    touches = relaxation.is_loose(node.attrs, before.lower - before.error, before.upper + before.error)
    shifted = torch.where(touches, relaxation.lipschitz(node.attrs) * before.error, 0.0)
    return shifted + 4 * unit_roundoff(before.lower.dtype) * (before.magnitude + after.magnitude)
