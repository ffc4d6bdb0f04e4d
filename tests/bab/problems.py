"""Properties by hand, and small networks to have them about."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

import numpy as np
import torch
from torch import nn

from abcrown_dist.bab.root import Refutation, refute
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.graph.load_torch import load_torch
from abcrown_dist.spec.property import Box, Disjunct, Property
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.weights.local import LocalWeights

FLOAT_MAX = float(np.finfo(np.float32).max)


def box(lower: Sequence[float | str], upper: Sequence[float | str]) -> Box:
    """A box; strings are decimals as written, floats are taken exactly."""
    return Box(tuple(Decimal(x) for x in lower), tuple(Decimal(x) for x in upper))


def disjunct(where: Box, C: object, rhs: object, D: object | None = None) -> Disjunct:
    """C y + D x <= rhs over a box."""
    matrix = np.atleast_2d(np.asarray(C, float))
    inputs = None if D is None else np.atleast_2d(np.asarray(D, float))
    return Disjunct(where, matrix, np.atleast_1d(np.asarray(rhs, float)), inputs)


def problem(*disjuncts: Disjunct) -> Property:
    first = disjuncts[0]
    return Property(len(first.box.lower), first.C.shape[1], tuple(disjuncts))


def network(module: nn.Module, inputs: int, dtype: torch.dtype = torch.float32) -> LocalWeights:
    """The weights of a module on (1, inputs), in `dtype`."""
    return LocalWeights(load_torch(module, torch.zeros(1, inputs)).graph, dtype)


class Identity(nn.Module):
    """y = x."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Constant(nn.Module):
    """y = value."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        with torch.no_grad():
            self.layer.weight.zero_()
            self.layer.bias.fill_(value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def run(
    weights: LocalWeights,
    prop: Property,
    method: str = "crown",
    wanted: Sequence[int] | None = None,
    batch_size: int = 64,
    largest: float = FLOAT_MAX,
    deadline: Deadline | None = None,
) -> Refutation:
    """Bound all disjuncts, or those `wanted`."""
    return refute(
        weights, prop, range(len(prop.disjuncts)) if wanted is None else wanted, BoundSettings(method=method),
        batch_size=batch_size, largest=largest, deadline=deadline or Deadline(),
    )  # fmt: skip
