"""Mixed-integer programs in the main flow: whole disjuncts (`mip`), and tighter roots (`bab-refine`)."""

from __future__ import annotations

import math

import numpy as np
import torch

from abcrown_dist.bab.flat import flat
from abcrown_dist.bab.judge import stays_finite
from abcrown_dist.bab.root import OneBox, Root
from abcrown_dist.bounds.intervals import combine
from abcrown_dist.bounds.propagate import bound_intermediate
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.bounds.types import Interval, preactivations
from abcrown_dist.exact.encode import Encoding, encode
from abcrown_dist.exact.mip import Decision, decide
from abcrown_dist.exact.refine import Refinement, tighten, unstable_neurons
from abcrown_dist.spec.property import Disjunct
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.util.errors import ConfigError
from abcrown_dist.util.numerics import round_down, round_up
from abcrown_dist.weights.base import Weights
from abcrown_dist.weights.local import LocalWeights

Array = np.ndarray


def whole_in_float64(weights: Weights) -> Weights:
    """The weights as programs need them.

    Raises:
        ConfigError: ranks share them.
    """
    if weights.group.size > 1:
        raise ConfigError("general.complete_verifier: mip and bab-refine need whole weights in one process")
    return LocalWeights(weights.graph, torch.float64, rounding=weights.rounding)  # on the CPU, where scipy is


def corners(weights: Weights, box: OneBox) -> tuple[Array, Array]:
    """The box as flat inputs in float64."""
    inputs = box.root.clauses.box
    lower, upper = (flat(weights, side)[0].double().cpu().numpy() for side in (inputs.lower, inputs.upper))
    return lower, upper


def known_bounds(weights: Weights, box: OneBox) -> dict[str, tuple[Array, Array]]:
    """Bounds of all pre-activations in float64."""
    found = {}
    for name in preactivations(weights.graph):
        item = box.root.relaxed.intervals[name]
        found[name] = item.lower[0].double().cpu().numpy(), item.upper[0].double().cpu().numpy()
    return found


class WholeBox:
    """Decides the open disjuncts of one box.

    Args:
        largest: greatest finite number of the model's own dtype: programs know of none.

    Raises:
        ValueError: bounds that are not finite, or cross by more than rounding.
    """

    def __init__(self, weights: Weights, box: OneBox, largest: float) -> None:
        precise = whole_in_float64(weights)
        self._sane = bool(stays_finite(weights, box.root.relaxed, largest).all())
        self.encoding: Encoding = encode(precise, *corners(weights, box), known_bounds(weights, box))
        intervals = box.root.relaxed.intervals
        self._outputs = _magnitude([intervals[name] for name in weights.graph.outputs])
        lower, upper = corners(weights, box)
        self._inputs = np.maximum(np.abs(lower), np.abs(upper))

    def decide(self, disjunct: Disjunct, deadline: Deadline, seed: int) -> Decision:
        """Decide one disjunct, its rows measured in units of what they sum up.

        One with factors is decided case by case; cases that what they have in common refutes, all at once.
        """
        pending, weakest = [disjunct], Decision("refuted", bound=math.inf)
        while pending:
            deadline.check()
            item = pending.pop()
            part = self._decide(item.direct(), deadline, seed)
            if item.groups is not None and part.outcome != "refuted":
                pending += reversed(item.cases())
            elif part.outcome != "refuted":
                return part
            elif part.bound < weakest.bound:
                weakest = part
        return weakest

    def _decide(self, disjunct: Disjunct, deadline: Deadline, seed: int) -> Decision:
        scale = np.abs(disjunct.C) @ self._outputs + np.abs(disjunct.rhs)
        if disjunct.D is not None:
            scale = scale + np.abs(disjunct.D) @ self._inputs
        scale = np.where(scale > 0, scale, 1.0)
        found = decide(self.encoding, disjunct, scale, time_limit=deadline.remaining(), seed=seed)
        if found.outcome == "refuted" and not self._sane:
            return Decision("unknown", point=found.point, reason="the model may overflow")
        return found


def refined(
    weights: Weights,
    box: OneBox,
    settings: BoundSettings,
    deadline: Deadline,
    neuron_timeout: float,
    share: float,
) -> tuple[Root, Refinement]:
    """The root of one box with its unstable pre-activations tightened, and what that took.

    Raises:
        ValueError: as for `WholeBox`.
    """
    bounds = known_bounds(weights, box)
    found = tighten(
        whole_in_float64(weights),
        *corners(weights, box),
        bounds,
        unstable_neurons(bounds),
        deadline=deadline,
        neuron_timeout=neuron_timeout,
        share=share,
    )

    def refine(name: str, interval: Interval) -> Interval:
        lower, upper = (torch.from_numpy(np.asarray(side)).to(weights.device) for side in found.bounds[name])
        shape = interval.lower.shape
        known = Interval(
            round_down(lower.double(), weights.dtype).reshape(shape),
            round_up(upper.double(), weights.dtype).reshape(shape),
        )
        return combine(known, interval, True)

    clauses = box.root.clauses
    with torch.no_grad():
        return Root(clauses, bound_intermediate(weights, clauses.box, settings, deadline, refine)), found


def _magnitude(intervals: list[Interval]) -> Array:
    return np.concatenate([item.magnitude[0].flatten().double().cpu().numpy() for item in intervals])
