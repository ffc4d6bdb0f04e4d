"""How much a backward pass may lose to rounding.

Walking back through node k with coefficients A computes A' = A W in floating point, and the network
itself computes z = W x + b in floating point. Both move the bound by at most A_i s_i at neuron i, with

    s = execution + own,    each a rate times (|W| |z| + |b|):
        execution   of the network's own sums
        own         of the products A W; none where W holds but 0, 1 and -1, and the row small whole numbers

where |z| is the largest magnitude that the operands take and the rates are worst-case ones
(`util.numerics.Rounding`). These magnitudes add up over all neurons and nodes: that is the error of a
bound, which proves only what exceeds it. What a relaxed nonlinearity rounds is in its lines already, which
are moved outward (of linear pieces, it is charged to the node), and bounds of pre-activations are moved
outward by their own error before lines are drawn between them. So an error never grows from layer to layer
by more than the relaxation itself does. (Carrying errors along as magnitudes instead gives up to 1e9 times
as much on networks of nine layers.)

The network's own rounding is part of the error because the network is run in floating point: z is what a run
of it computes, each sum in any order, not what real arithmetic makes of the same weights.

All of it costs one product with a vector per node. The affine half falls off the interval pass
(`ibp.affine_interval`); the other half is here.
"""

from __future__ import annotations

from torch import Tensor

from abcrown_dist.bounds.types import Interval
from abcrown_dist.graph.ir import Node
from abcrown_dist.relax import REGISTRY
from abcrown_dist.weights.base import Weights

_SLOPE = 3  # roundings of a coefficient times a slope


def nonlinear_sensitivity(weights: Weights, node: Node, after: Interval) -> Tensor | None:
    """What a nonlinearity rounds, (B, *shape): in the network, and in bounds over its linear pieces."""
    count = REGISTRY[node.op].roundings(node.attrs)
    if not count:
        return None
    rate = weights.rounding.execution(count) + weights.rounding.own(count + _SLOPE, weights.dtype)
    return rate * after.magnitude
