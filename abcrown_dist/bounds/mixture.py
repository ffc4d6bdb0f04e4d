"""Combinations of rows: what all constraints of a disjunct say together.

A counterexample fulfils every row,  row_r(x) <= rhs_r, and with them  sum_r f_r (row_r(x) - rhs_r) <= 0  for
all f >= 0 (weak duality; Boyd and Vandenberghe, "Convex Optimization", 2004, section 5.8.3). A positive
lower bound of that sum refutes the disjunct where no single row does. The sum is formed before the backward
pass, so that what cancels between rows is gone before anything is relaxed.

Multipliers are kept as `lam` (B, R), which add up to the number of rows that may enter, and are multiplied by
powers of two that make rows of different size alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from abcrown_dist.bounds.concretize import contract
from abcrown_dist.util.numerics import round_up, two_sum
from abcrown_dist.weights.base import Weights


@dataclass(frozen=True)
class Combined:
    """The combination of each of B domains.

    Attributes:
        rows: coefficients (B, *shape) by node, in the weights' dtype.
        gap: by how much rounding may have moved these, likewise; zero where nothing was rounded.
        rhs: (B,) float64, not less than the combined right-hand side.
        factor: (B, R) float64, what every row was multiplied by.
    """

    rows: dict[str, Tensor]
    gap: dict[str, Tensor]
    rhs: Tensor
    factor: Tensor


@dataclass(frozen=True)
class Mixture:
    """Rows over B domains, each of which gets their combination as one row more.

    Attributes:
        rows: (B or 1, R, *shape) by node, in the weights' dtype.
        rhs: (B, R) float64; not used where `unit` is zero.
        unit: (B, R) float64, powers of two; zero for rows that must not enter.
        alone: only the combination is bounded, not the rows by themselves.
    """

    rows: Mapping[str, Tensor]
    rhs: Tensor
    unit: Tensor
    alone: bool = False

    def select(self, domains: Tensor) -> Mixture:
        """The same for some domains (n,)."""
        rows = {name: part if len(part) == 1 else part[domains] for name, part in self.rows.items()}
        return Mixture(rows, self.rhs[domains], self.unit[domains], self.alone)

    def uniform(self, dtype: torch.dtype) -> Tensor:
        """Multipliers (B, R) to begin with: one for every row."""
        return (self.unit > 0).to(dtype)

    def start(self, lam: Tensor) -> dict[str, Tensor]:
        """Coefficients (B, R + 1, *shape), or (B, 1, *shape), at multipliers (B, R)."""
        return self.with_last(self.combined(lam).rows)

    def with_last(self, last: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The rows with the combination (B, *shape) after them, where they are wanted."""
        found = {}
        for name, part in last.items():
            own = part[:, None]
            if not self.alone:
                own = torch.cat([self.rows[name].expand(len(part), *self.rows[name].shape[1:]), own], dim=1)
            found[name] = own
        return found

    def combined(self, lam: Tensor) -> Combined:
        """The combination, and what rounding may have done to it."""
        factor = lam.float().double() * self.unit
        rows, gap = {}, {}
        for name, part in self.rows.items():
            total, off = _weighted_sum(factor, part)
            rows[name] = total.to(part.dtype)
            gap[name] = round_up(off + (total - rows[name].double()).abs(), part.dtype)
        rhs, off = _weighted_sum(factor, self.rhs.masked_fill(self.unit == 0, 0.0))
        above = torch.nextafter(rhs + off, torch.full_like(rhs, torch.inf))
        return Combined(rows, gap, torch.where(off > 0, above, rhs), factor)

    def slope(self, weights: Weights, lam: Tensor, ends: Mapping[str, Tensor]) -> Tensor:
        """Derivative (B, R) of the combination's bound, given the rows' nodes (B, *shape) at its minimiser.

        Without the part that changes all multipliers alike, which proves neither more nor less.
        """
        parts = [contract(self.rows[name].flatten(2), value) for name, value in ends.items()]
        value = weights.total(torch.stack(parts).sum(0)).double()
        value = (value - self.rhs.masked_fill(self.unit == 0, 0.0)) * self.unit
        share = lam.double() / lam.double().sum(1, keepdim=True).clamp(min=1e-30)
        mean = (share * value).sum(1, keepdim=True)
        return torch.where(self.unit > 0, value - mean, 0.0).to(lam.dtype)


def units(weights: Weights, rows: Mapping[str, Tensor], real: Tensor) -> Tensor:
    """Powers of two (B, R) that bring the largest coefficient of each row to about 1; 0 where not `real`."""
    largest = torch.zeros(real.shape, dtype=torch.float64, device=real.device)
    for name, part in rows.items():
        whole = weights.whole(name, part).flatten(2).double().abs()
        largest = torch.maximum(largest, whole.amax(2) if whole.shape[2] else largest)
    power = torch.exp2(-torch.where(largest > 0, largest, 1.0).log2().round())
    return torch.where(real, power, 0.0)


def normalised(lam: Tensor, count: Tensor) -> Tensor:
    """Multipliers (..., R), no longer negative, that add up to `count` (..., 1)."""
    lam = lam.clamp(min=0)
    total = lam.sum(-1, keepdim=True)
    return torch.where(total > 0, lam * (count / total.clamp(min=1e-30)), lam)


def _weighted_sum(factor: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over rows of factor (B, R) times values (B or 1, R, ...) in float64, and by how much it may be off.

    Factors have 24 digits. With values cut into two halves every product is exact, and what the sums lose is
    exact too, so that nothing is lost where nothing rounds.
    """
    values = values.double()
    high = values.float().double()
    shape = (*factor.shape, *[1] * (values.dim() - 2))
    total: Tensor | None = None
    off: Tensor | None = None
    for half in (high, values - high):
        for row in (half * factor.reshape(shape)).unbind(1):
            if total is None or off is None:
                total, off = row, torch.zeros_like(row)
                continue
            total, lost = two_sum(total, row)
            off = off + lost
    assert total is not None and off is not None
    return total, off * (1 + 1e-12)
