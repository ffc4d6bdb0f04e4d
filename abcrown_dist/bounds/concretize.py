"""Input sets: where a linear function of the inputs takes its minimum, and what that is.

A further set (an Lp ball with its dual norm) is one more class with these methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from abcrown_dist.bounds.types import Interval
from abcrown_dist.util.numerics import Rounding, two_sum, unit_roundoff, upward

_PIECES = 16  # in which coefficients are converted to float64


class InputSet(Protocol):
    """B sets over the network's inputs, one per domain."""

    domains: int
    is_box: bool  # intervals of single inputs say all there is to say

    def minimum(self, A: Mapping[str, Tensor]) -> Tensor:
        """min A x over each set: A by input name (B or 1, R, *shape) -> (B, R)."""
        ...

    def minimiser(self, A: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A point where the minimum is taken, by input name (B, R, *shape)."""
        ...

    def interval(self, name: str) -> Interval:
        """The smallest box around the set, for one input."""
        ...

    def safe_minimum(self, A: Mapping[str, Tensor], rounding: Rounding) -> tuple[Tensor, Tensor]:
        """The minima in float64, and by how much they may be off: (B, R) each."""
        ...


class Box:
    """Axis-parallel boxes, by input name lower and upper bounds (B, *shape), lower <= upper.

    Kept as centre c and radius r with c - r <= lower and upper <= c + r in floating point, and
    min A x = A c - |A| r.
    """

    is_box = True

    def __init__(self, lower: Mapping[str, Tensor], upper: Mapping[str, Tensor]) -> None:
        self.lower, self.upper = dict(lower), dict(upper)
        self.domains = len(next(iter(self.lower.values())))
        self._centre: dict[str, Tensor] = {}
        self._radius: dict[str, Tensor] = {}
        self._terms = sum(low[0].numel() for low in self.lower.values())
        for name, low in self.lower.items():
            self._centre[name], self._radius[name] = centre_radius(low, self.upper[name])

    def minimum(self, A: Mapping[str, Tensor]) -> Tensor:
        total: Tensor | None = None
        for name, part in A.items():
            flat = part.flatten(2)
            value = contract(flat, self._centre[name]) - contract(flat.abs(), self._radius[name])
            total = value if total is None else total + value
        assert total is not None
        return total

    def minimiser(self, A: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: self._centre[name][:, None] - part.sign() * self._radius[name][:, None]
            for name, part in A.items()
        }

    def interval(self, name: str) -> Interval:
        lower, upper = self.lower[name], self.upper[name]
        return Interval(lower, upper)

    def safe_minimum(self, A: Mapping[str, Tensor], rounding: Rounding) -> tuple[Tensor, Tensor]:
        total: Tensor | None = None
        error: Tensor | None = None
        for name, part in A.items():
            flat, size = part.flatten(2), self.interval(name).magnitude
            value, lost = two_sum(
                contract_in_float64(flat.clamp(min=0), self.lower[name]),
                contract_in_float64(flat.clamp(max=0), self.upper[name]),
            )
            # A sum of one product is exact, and so is the product of two float32, or by 1.
            several = (flat != 0).sum(2) > 1
            if flat.dtype == torch.float64:
                several |= ((flat.abs() != 1) & (flat != 0)).any(2)
            rate = rounding.own(self._terms + 4, torch.float64) * upward(size[0].numel(), size.dtype)
            slack = rate * contract(flat.abs(), size).double()
            slack = lost + torch.where(several, slack, 0.0)
            if total is None or error is None:
                total, error = value, slack
            else:
                total, lost = two_sum(total, value)
                error = error + slack + lost
        assert total is not None and error is not None
        return total, error

    def select(self, index: Tensor) -> Box:
        """The domains `index`."""
        return Box({k: v[index] for k, v in self.lower.items()}, {k: v[index] for k, v in self.upper.items()})


def centre_radius(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Centre and radius whose interval contains [lower, upper] after rounding."""
    centre = lower / 2 + upper / 2
    centre = torch.where(lower == upper, lower, centre)
    radius = torch.maximum(upper - centre, centre - lower)
    short = (centre - radius > lower) | (centre + radius < upper)
    if bool(short.any()):
        wider = radius + 2 * unit_roundoff(lower.dtype) * torch.maximum(lower.abs(), upper.abs())
        radius = torch.where(short, wider, radius)
    return centre, radius


def contract_in_float64(A_BRN: Tensor, v_BN: Tensor) -> Tensor:
    """`contract` with its products and sums in float64, a sixteenth of the rows or domains at a time."""
    if A_BRN.dtype == torch.float64:
        return contract(A_BRN, v_BN)
    flat, (domains, rows) = v_BN.flatten(1).double(), A_BRN.shape[:2]
    if domains == 1 or len(flat) == 1:  # what domains share goes with each piece of the rows
        step = max(1, -(-rows // _PIECES))
        return torch.cat([contract(part.double(), flat) for part in A_BRN.split(step, 1)], dim=1)
    step = max(1, domains // _PIECES)
    convert = contract_in_float64 if step == 1 else _converted
    pairs = zip(A_BRN.split(step), flat.split(step), strict=True)
    return torch.cat([convert(part, values) for part, values in pairs])


def _converted(A_BRN: Tensor, v_BN: Tensor) -> Tensor:
    return contract(A_BRN.double(), v_BN)


def contract(A_BRN: Tensor, v_BN: Tensor) -> Tensor:
    """Sum over neurons of A (B or 1, R, N) times v (B or 1, *shape) -> (B, R)."""
    flat = v_BN.flatten(1)
    if flat.shape[0] == 1:
        return A_BRN @ flat[0]
    if A_BRN.shape[0] == 1:
        return flat @ A_BRN[0].T
    return torch.bmm(A_BRN, flat[:, :, None])[:, :, 0]
