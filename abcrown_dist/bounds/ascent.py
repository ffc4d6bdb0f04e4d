"""Projected gradient ascent on bounds: every row by itself, its best bound kept.

Adam (Kingma and Ba, 2015, algorithm 1), written out because `torch.optim` imports half of the
compiler, which takes longer than most runs, and because projections belong outside of any graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from abcrown_dist.bounds.types import RowBounds

_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8


@dataclass(frozen=True)
class Variable:
    """Parameters (B, R, ...) of a bound, one set per row, that an ascent moves in place.

    Attributes:
        value: where they are now.
        rate: step size.
        lower, upper: least and greatest values, broadcast against `value`; None for no limit.
        total: what the last axis adds up to, (B, 1, 1), where it is not all zero; None: anything.
    """

    value: Tensor
    rate: float
    lower: Tensor | float | None = None
    upper: Tensor | float | None = None
    total: Tensor | None = None

    def project(self) -> None:
        """Move what has left the limits back, in place."""
        if isinstance(self.lower, Tensor) and isinstance(self.upper, Tensor):
            torch.clamp(self.value, self.lower, self.upper, out=self.value)
            return
        if self.lower is not None:
            torch.clamp(self.value, min=self.lower, out=self.value)
        if self.upper is not None:
            torch.clamp(self.value, max=self.upper, out=self.value)
        if self.total is not None:
            found = self.value.sum(-1, keepdim=True)
            self.value.mul_(torch.where(found > 0, self.total / found, 1.0))

    def select(self, domains: Tensor) -> Variable:
        """The variables of some domains (n,): a copy."""

        def limit(side: Tensor | float | None) -> Tensor | float | None:
            return side[domains] if isinstance(side, Tensor) and len(side) == len(self.value) else side

        total = None if self.total is None else self.total[domains]
        return Variable(self.value[domains], self.rate, limit(self.lower), limit(self.upper), total)


class Ascent:
    """The state of an optimisation of R rows over B domains.

    Attributes:
        best: the best bounds so far; a NaN stays NaN.
        best_values: the variables that gave them, if they are kept.
    """

    best: RowBounds

    def __init__(
        self, variables: Mapping[str, Variable], *, decay: float, patience: int, keep: bool
    ) -> None:
        self.variables = dict(variables)
        self.decay, self.patience, self.keep = decay, patience, keep
        self.first = {name: torch.zeros_like(item.value) for name, item in self.variables.items()}
        self.second = {name: torch.zeros_like(item.value) for name, item in self.variables.items()}
        self.steps = 0
        self.best_values: dict[str, Tensor] = {}
        self.stalled: Tensor
        self.gained: Tensor

    def record(self, bounds: RowBounds, over: Tensor | None = None) -> None:
        """Keep what is better than before, row by row, except in domains `over` (mask (B,))."""
        if not hasattr(self, "best"):
            self.best = bounds
            self.stalled = torch.zeros_like(bounds.lower, dtype=torch.long)
            self.gained = torch.zeros_like(bounds.lower)
            if self.keep:
                self.best_values = {name: item.value.clone() for name, item in self.variables.items()}
            return
        # A row that has stalled is settled, and a domain that is over stays as it is, whatever others come
        # with it: bounds must not depend on that.
        still = self.settled() if over is None else self.settled() | over[:, None]
        gain = (bounds.lower - self.best.lower).clamp(min=0).masked_fill(still, 0)
        better = gain > 0
        self.gained += gain
        # Less than a hundredth of all that a row has gained so far is no progress.
        self.stalled = torch.where(gain > 1e-2 * self.gained, 0, self.stalled + 1)
        error = torch.maximum(self.best.error, bounds.error)
        self.best = RowBounds(torch.where(better, bounds.lower, self.best.lower), error)
        if self.keep:
            for name, item in self.variables.items():
                mask = better.reshape(*better.shape, *[1] * (item.value.dim() - 2))
                self.best_values[name] = torch.where(mask, item.value, self.best_values[name])

    def settled(self) -> Tensor:
        """Mask (B, R) of rows that made no progress for `patience` steps."""
        return self.stalled >= self.patience

    def move(self, slopes: Mapping[str, Tensor]) -> None:
        """One projected step uphill. Uses up the slopes' memory."""
        decayed = self.decay**self.steps
        self.steps += 1
        correction = math.sqrt(1 - _BETA2**self.steps)
        for name, item in self.variables.items():
            slope, first, second = slopes[name], self.first[name], self.second[name]
            first.lerp_(slope, 1 - _BETA1)
            second.mul_(_BETA2).addcmul_(slope, slope, value=1 - _BETA2)
            size = torch.sqrt(second, out=slope).add_(_EPSILON * correction)
            rate = item.rate * decayed * correction / (1 - _BETA1**self.steps)
            item.value.addcdiv_(first, size, value=rate)
            item.project()

    def select(self, domains: Tensor) -> Ascent:
        """The same optimisation for some domains (n,) only: a copy."""
        variables = {name: item.select(domains) for name, item in self.variables.items()}
        part = Ascent(variables, decay=self.decay, patience=self.patience, keep=self.keep)
        part.first = {name: moment[domains] for name, moment in self.first.items()}
        part.second = {name: moment[domains] for name, moment in self.second.items()}
        part.steps = self.steps
        part.best = RowBounds(self.best.lower[domains], self.best.error[domains])
        part.stalled, part.gained = self.stalled[domains], self.gained[domains]
        part.best_values = {name: value[domains] for name, value in self.best_values.items()}
        return part
