"""Tighter pre-activation bounds by linear or mixed-integer programmes over the layers before.

Layer by layer, so that what one layer gains serves the next; within a layer the neurons with the
loosest relaxation first (the triangle's area grows with -l u). Bounds come from certified multipliers or
from a mixed-integer bound less its margin (believed only where that is small beside what the neuron does at
sampled points, and where no such point contradicts it), are moved outward by the neuron's own error, and
never get looser.

Source: the refinement of "kPoly"-style verifiers, Singh et al., "Boosting Robustness Certification of
Neural Networks", ICLR 2019, with HiGHS in place of Gurobi.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from abcrown_dist.exact.encode import Bounds, Encoder
from abcrown_dist.exact.expression import Expression, widen
from abcrown_dist.exact.integer import MOST_LEAK, integer_minimum
from abcrown_dist.exact.program import Program, linear_minimum
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.weights.base import Weights
from abcrown_dist.weights.evaluate import evaluate, split_inputs

Array = np.ndarray

_SAMPLES = 128


@dataclass(frozen=True)
class Refinement:
    """Bounds after tightening.

    Attributes:
        bounds: by pre-activation node, in the given shapes: everything given, and the nodes of `neurons`.
        tried: neurons worked on.
        tightened: those of them with a better bound.
        stabilised: those of them that turned out stable.
    """

    bounds: dict[str, tuple[Array, Array]]
    tried: int
    tightened: int
    stabilised: int


def tighten(
    weights: Weights,
    lower: Array,
    upper: Array,
    bounds: Bounds,
    neurons: Sequence[tuple[str, int]],
    *,
    deadline: Deadline,
    integral: bool = True,
    neuron_timeout: float = 15.0,
    share: float = 0.8,
) -> Refinement:
    """Minimise and maximise chosen pre-activations over the network before them.

    Args:
        weights, lower, upper, bounds: as for `encode`.
        neurons: (pre-activation node, flat index), in any order. Stable ones are passed over.
        deadline: of the instance.
        integral: by mixed-integer programmes (after the linear one); else by the triangle relaxation.
        neuron_timeout: seconds for one neuron, both sides.
        share: part of the remaining time that may be used.

    Raises:
        NotPiecewiseLinear, ValueError: as for `encode`.
    """
    budget = Deadline(share * deadline.remaining())
    encoder = Encoder(weights, lower, upper, bounds, relaxed=not integral)
    chosen: dict[str, list[int]] = {}
    for name, index in neurons:
        chosen.setdefault(name, []).append(index)
    pending = set(chosen)
    seen = _seen(weights, np.asarray(lower, float), np.asarray(upper, float), tuple(chosen))
    improved = {name: (np.array(low), np.array(high)) for name, (low, high) in bounds.items()}
    tried = tightened = stabilised = 0
    for node in weights.graph:
        if not pending or budget.expired():
            break
        encoded = encoder.add(node)
        if node.name not in pending:
            continue
        pending.remove(node.name)
        low, high = encoder.interval(node.name)
        layer = _Layer(encoded, encoder.builder.build(), low, high, seen[node.name])
        for index in layer.loosest_first(chosen[node.name]):
            if budget.expired():
                break
            before = low[index], high[index]
            layer.improve(index, min(neuron_timeout, budget.remaining()))
            tried += 1
            tightened += bool(low[index] > before[0] or high[index] < before[1])
            stabilised += bool(low[index] >= 0 or high[index] <= 0)
        shape = np.shape(bounds[node.name][0]) if node.name in bounds else node.shape
        improved[node.name] = low.reshape(shape), high.reshape(shape)
        encoder.bounds[node.name] = low, high
    return Refinement(improved, tried, tightened, stabilised)


@dataclass(frozen=True)
class _Layer:
    """One pre-activation node over the programme of what comes before; changes `lower` and `upper`.

    `seen` are the least and greatest values at sampled points.
    """

    z: Expression
    program: Program
    lower: Array
    upper: Array
    seen: tuple[Array, Array]

    def loosest_first(self, neurons: Sequence[int]) -> list[int]:
        """The unstable ones among `neurons`, each once."""
        with np.errstate(over="ignore"):  # an infinite area comes first
            area = -self.lower * self.upper
        return sorted({i for i in neurons if self.lower[i] < 0 < self.upper[i]}, key=lambda i: (-area[i], i))

    def improve(self, index: int, time_limit: float) -> None:
        """Move the bounds of one neuron; the side nearer to zero first, which may make it stable."""
        begun = time.monotonic()
        sides = [-1, 1] if self.upper[index] < -self.lower[index] else [1, -1]
        for number, sign in enumerate(sides):
            left = time_limit - (time.monotonic() - begun)
            value = self._minimum(index, sign, left if number else left / 2)
            low, high = self.lower[index], self.upper[index]
            low, high = (max(low, value), high) if sign > 0 else (low, min(high, -value))
            if low > self.seen[0][index] or high < self.seen[1][index]:  # something is wrong
                return
            self.lower[index], self.upper[index] = low, high
            if low >= 0 or high <= 0:
                return

    def _minimum(self, index: int, sign: int, time_limit: float) -> float:
        """Lower bound of  sign z  over the programme; -inf where none is found."""
        begun = time.monotonic()
        z = self.z[np.array([index])]
        cost = sign * widen(z.E, self.program.columns).toarray().reshape(-1)
        relaxation = linear_minimum(self.program, cost, time_limit=time_limit)
        value = relaxation.value
        offset = sign * float(z.offset[0])
        if self.program.integral.any() and value + offset < 0:
            left = time_limit - (time.monotonic() - begun)
            found = integer_minimum(self.program, cost, time_limit=left)
            spread = float(self.seen[1][index] - self.seen[0][index])
            if found is not None and found.margin <= MOST_LEAK * spread:
                value = max(value, found.value)
        if not math.isfinite(value):
            return -math.inf
        return value + offset - float(z.error[0]) - 4 * 2.0**-53 * (abs(value) + abs(offset))


def _seen(
    weights: Weights, lower: Array, upper: Array, names: tuple[str, ...]
) -> dict[str, tuple[Array, Array]]:
    """Least and greatest values (neurons,) of nodes at corners and other points of the box, inward."""
    share = np.random.default_rng(0).random((_SAMPLES, len(lower)))
    share[::2] = share[::2] > 0.5
    points = torch.from_numpy(np.clip(lower + (upper - lower) * share, lower, upper)).to(weights.device)
    graph = replace(weights.graph, outputs=names)
    with torch.no_grad():
        values = evaluate(graph, weights, split_inputs(graph, points))
    found = {}
    for name, value in values.items():
        flat = value.flatten(1).double().cpu().numpy()
        inward = 1e-9 * np.abs(flat).max(axis=0)
        found[name] = flat.min(axis=0) + inward, flat.max(axis=0) - inward
    return found


def unstable_neurons(bounds: Mapping[str, tuple[Array, Array]]) -> list[tuple[str, int]]:
    """All neurons (node, flat index) whose bounds have both signs."""
    return [
        (name, int(index))
        for name, (lower, upper) in bounds.items()
        for index in np.flatnonzero((np.ravel(lower) < 0) & (np.ravel(upper) > 0))
    ]
