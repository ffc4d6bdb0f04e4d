"""What bounds prove of a property's rows (design rules 7.1 and 7.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from abcrown_dist.bounds.concretize import Box, contract
from abcrown_dist.bounds.types import Relaxed, RowBounds
from abcrown_dist.spec.junctions import decisive, fold
from abcrown_dist.util.numerics import two_sum
from abcrown_dist.weights.base import Weights


@dataclass(frozen=True)
class Judge:
    """Weighs bounds of R rows over B domains.

    Attributes:
        rhs: (B, R) float64.
        lost: (B, R) float64, by how much rounded coefficients may have moved a row.
        sane: (B, 1), whether bounds over the domain prove anything.
        strict: (B, R) bool, rows that a counterexample makes less than `rhs`, not equal to it.
        groups: (depth, B, R), see `spec.junctions`; None where all rows stand by themselves.
    """

    rhs: Tensor
    lost: Tensor
    sane: Tensor
    strict: Tensor
    groups: Tensor | None = None

    def weigh(self, bounds: RowBounds, rows: Tensor | slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Margins lower - rhs of some rows and their errors, in float64; NaN where nothing is proven."""
        lower, rhs = bounds.lower.double(), self.rhs[:, rows]
        margin, subtraction = two_sum(lower, -rhs)
        error = bounds.error.double() + self.lost[:, rows] + subtraction
        return margin, torch.where(margin.isfinite() & self.sane, error, torch.nan)

    def select(self, domains: Tensor) -> Judge:
        """The judge of the domains `domains` (n,), which may repeat."""
        groups = None if self.groups is None else self.groups[:, domains]
        return Judge(self.rhs[domains], self.lost[domains], self.sane[domains], self.strict[domains], groups)

    def proves(self, margin: Tensor, error: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        """Bool (B, n): rows that a bound refutes, given its margin and error as `weigh` tells them.

        One that reaches a strict row's right-hand side will do if no rounding stands between.
        """
        return (margin > error) | (self.strict[:, rows] & (margin >= 0) & (error == 0))

    def verdicts(self, margin: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
        """Domains (B,) that one of their rows refutes, and those that only rounding leaves open."""
        proven = self.refuted(self.proves(margin, error))
        return proven, self.refuted(margin + error > 0) & ~proven

    def refuted(self, rows: Tensor) -> Tensor:
        """Bool (B,): domains that the refutation of some `rows` (mask, B x R) refutes."""
        return fold(rows, self.groups).any(1)

    def nearest(self, margin: Tensor) -> tuple[Tensor, Tensor]:
        """Margin (B,) of a domain, that of its best factor, and the row (B,) which decides it."""
        return decisive(margin.nan_to_num(nan=-torch.inf), self.groups).max(1)


def lost_by_rounding(
    weights: Weights, lost: Mapping[str, Tensor], relaxed: Relaxed, box: Box, like: Tensor
) -> Tensor:
    """By how much rounding the coefficients to the dtype may have moved rows, shaped as `like` (B, R)."""
    total = torch.zeros_like(like)
    for name, part in lost.items():
        interval = relaxed.intervals.get(name) or box.interval(name)
        total += contract(part.flatten(2), interval.magnitude).double()
    return weights.total(total)


def stays_finite(weights: Weights, relaxed: Relaxed, largest: float) -> Tensor:
    """Bool (B,): no value that the network computes in a domain can reach `largest`."""
    sane: Tensor | None = None
    for interval in relaxed.intervals.values():
        good = (interval.magnitude < largest).flatten(1).all(1)
        sane = good if sane is None else sane & good
    for peak in relaxed.peak.values():
        good = peak < largest
        sane = good if sane is None else sane & good
    assert sane is not None
    return weights.total((~sane).to(weights.dtype)) == 0
