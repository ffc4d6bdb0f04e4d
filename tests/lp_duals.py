"""Optimal slopes and split multipliers of beta-CROWN, read off the duals of the triangle relaxation.

With z_k = W_k a_{k-1} + b_k, a_0 = x in the box, unstable neurons a in the triangle

    a >= z  (multiplier p >= 0),   a >= 0  (q >= 0),   a <= m (z - l), m = u / (u - l)  (r >= 0),

and splits  sign z >= 0  (multiplier beta >= 0), the Lagrangian of  min c y  is

    c y + p (z - a) - q a + r (a - m (z - l)) - beta sign z.

Let A be the coefficient of a neuron's a that comes from the layers behind it. The Lagrangian is stationary
in a when  A = p + q - r,  and what goes on to z is  p - m r - beta sign.  Backward CROWN passes on  alpha A
where A >= 0 and  m A  where A < 0. So both agree with

    alpha = p / (p + q)  where r = 0,      r = -A  where p = q = 0,

and beta itself: the dual of the linear programme *is* beta-CROWN's bound, whose optimum over alpha and beta
is therefore the programme's (Salman et al., "A Convex Relaxation Barrier to Tight Robustness
Verification of Neural Networks", NeurIPS 2019; Wang et al., "Beta-CROWN", NeurIPS 2021, theorem 3.2).

p + q and r are both positive only where the triangle's corners z = l or z = u bind. If the bounds l and u
follow from the layers before, such multipliers can be traded for others of the same value, and
alpha = (p - m r) / A, clipped to [0, 1], does; `beta_crown_value` shows whether it did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from abcrown_dist.exact.encode import Encoding, encode
from abcrown_dist.exact.expression import widen
from abcrown_dist.exact.program import RowGroup, linear_minimum
from abcrown_dist.graph.load_torch import load_torch
from abcrown_dist.weights.local import LocalWeights

Array = np.ndarray
Layers = Sequence[tuple[Array, Array]]
Splits = Mapping[tuple[int, int], int]


@dataclass(frozen=True)
class TriangleDual:
    """Optimum of the triangle relaxation with split constraints.

    Attributes:
        value: minimum of c y, certified.
        alphas: per hidden layer (neurons,), the lower slope of every unstable neuron; elsewhere 0.
        betas: by split (hidden layer, neuron), the multiplier >= 0 of  sign z >= 0.
    """

    value: float
    alphas: list[Array]
    betas: dict[tuple[int, int], float]


def relu_network(layers: Layers) -> LocalWeights:
    """The weights of  Linear, ReLU, ..., Linear  in float64, from (W, b) per layer."""
    modules: list[nn.Module] = []
    for W, b in layers:
        linear = nn.Linear(W.shape[1], W.shape[0], dtype=torch.float64)
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(np.asarray(W, float)))
            linear.bias.copy_(torch.from_numpy(np.asarray(b, float)))
        modules += [linear, nn.ReLU()]
    example = torch.zeros(1, layers[0][0].shape[1], dtype=torch.float64)
    return LocalWeights(load_torch(nn.Sequential(*modules[:-1]), example).graph, torch.float64)


def solve_triangle(
    layers: Layers,
    lower: Array,
    upper: Array,
    bounds: Sequence[tuple[Array, Array]],
    c: Array,
    splits: Splits | None = None,
) -> TriangleDual:
    """Minimise c y over the triangle relaxation, the box and the splits.

    Args:
        layers: (W, b) of a ReLU network, one ReLU between any two.
        lower, upper: the box, (inputs,).
        bounds: pre-activation bounds of the hidden layers, each valid over the whole box. They should
            follow from the triangle relaxation of the layers before (any bounds by intervals or CROWN do).
        c: (outputs,).
        splits: (hidden layer, neuron) -> +1 or -1.
    """
    splits = dict(splits or {})
    weights = relu_network(layers)
    graph = weights.graph
    relus = [node for node in graph if node.op == "relu"]
    names = [node.inputs[0] for node in relus]
    encoding = encode(
        weights,
        lower,
        upper,
        dict(zip(names, bounds, strict=True)),
        relaxed=True,
        signs={(names[layer], neuron): sign for (layer, neuron), sign in splits.items()},
        as_given=True,
    )
    program = encoding.program
    y = encoding.expressions[graph.outputs[0]]
    found = linear_minimum(program, np.asarray(c @ widen(y.E, program.columns).toarray()))
    assert found.solution is not None and found.solution.optimal
    below, reduced = found.solution.below, found.solution.reduced
    alphas = [np.zeros(len(low)) for low, _ in bounds]
    betas = dict.fromkeys(splits, 0.0)
    for group in program.groups:
        multiplier = below[group.rows] / group.scale
        if group.kind == "split":
            layer = names.index(group.node)
            betas.update({(layer, int(j)): float(b) for j, b in zip(group.neurons, multiplier, strict=True)})
        elif group.kind == "lower":
            layer = [node.name for node in relus].index(group.node)
            chord = _chord_multipliers(program.groups, group, below)
            slopes = _slopes(group, multiplier, chord, bounds[layer], reduced, encoding)
            alphas[layer][group.neurons] = slopes
    return TriangleDual(found.value + float(c @ y.offset), alphas, betas)


def _chord_multipliers(groups: Sequence[RowGroup], lower: RowGroup, below: Array) -> Array:
    """Multipliers of the chords that belong to the lower lines of a group."""
    (group,) = [group for group in groups if group.kind == "upper" and group.node == lower.node]
    assert (group.neurons == lower.neurons).all()
    return below[group.rows] / group.scale


def _slopes(
    group: RowGroup, p: Array, r: Array, bounds: tuple[Array, Array], reduced: Array, encoding: Encoding
) -> Array:
    """alpha of a layer's unstable neurons; `reduced` are the reduced costs of all variables."""
    low, high = bounds[0][group.neurons], bounds[1][group.neurons]
    m = high / (high - low)
    own = encoding.expressions[group.node].E[group.neurons]
    assert (np.diff(own.indptr) == 1).all()
    at_bound = reduced[own.indices] / own.data
    q, cap = np.maximum(at_bound, 0), np.maximum(-at_bound, 0)
    # The variable's own bound a <= u is the chord plus m times a >= z, divided by 1 - m.
    p, r = p + cap * m / (1 - m), r + cap / (1 - m)
    A = p + q - r
    return np.clip(np.where(A > 0, p - m * r, 0.0) / np.where(A > 0, A, 1.0), 0.0, 1.0)


def beta_crown_value(
    layers: Layers,
    lower: Array,
    upper: Array,
    bounds: Sequence[tuple[Array, Array]],
    c: Array,
    splits: Splits,
    alphas: Sequence[Array],
    betas: Mapping[tuple[int, int], float],
) -> float:
    """beta-CROWN's bound of c y for given slopes and multipliers, in a dozen lines of numpy."""
    A, constant = np.asarray(c, float), 0.0
    for k in range(len(layers) - 1, -1, -1):
        W, b = layers[k]
        constant += float(A @ b)
        A = A @ W
        if k == 0:
            break
        low, high = bounds[k - 1]
        on, off = low >= 0, (high <= 0) & (low < 0)
        multiplier = np.zeros_like(A)
        for (layer, j), sign in splits.items():
            if layer == k - 1:
                on[j], off[j] = sign > 0, sign < 0
                multiplier[j] = betas[layer, j] * sign
        with np.errstate(divide="ignore", invalid="ignore"):
            m = high / (high - low)
        slope = np.where(on, 1.0, np.where(off, 0.0, np.where(A >= 0, alphas[k - 1], m)))
        constant += float(np.where(on | off | (A >= 0), 0.0, -A * m * low).sum())
        A = A * slope - multiplier
    return constant + float(np.where(A >= 0, A * lower, A * upper).sum())


def random_layers(random: np.random.Generator, sizes: Sequence[int]) -> list[tuple[Array, Array]]:
    """Weights of a ReLU network with the given widths."""
    return [
        (random.standard_normal((outputs, inputs)) / np.sqrt(inputs), 0.5 * random.standard_normal(outputs))
        for inputs, outputs in pairwise(sizes)
    ]


def interval_bounds(layers: Layers, lower: Array, upper: Array) -> list[tuple[Array, Array]]:
    """Pre-activation bounds of the hidden layers by interval arithmetic."""
    found = []
    for W, b in layers[:-1]:
        positive, negative = np.maximum(W, 0), np.minimum(W, 0)
        low, high = positive @ lower + negative @ upper + b, positive @ upper + negative @ lower + b
        found.append((low, high))
        lower, upper = np.maximum(low, 0), np.maximum(high, 0)
    return found
