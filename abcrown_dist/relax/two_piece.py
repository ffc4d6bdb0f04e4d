"""ReLU and LeakyReLU: f(z) = z for z >= 0 and s z below, with s = 0 for ReLU.

For s <= 1 f is convex: the chord bounds it from above, and every line through the origin with a
slope in [s, 1] from below (Zhang et al., "Efficient Neural Network Robustness Certification with
General Activation Functions", NeurIPS 2018; the free lower slope is the alpha of Xu et al., "Fast
and Complete", ICLR 2021). For s > 1 f is concave and the two exchange their roles. Plain CROWN
takes the lower slope 1 where u > -l and s elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from abcrown_dist.relax.base import Lines, Relaxation
from abcrown_dist.util.numerics import unit_roundoff


class TwoPiece(Relaxation):
    """f(z) = max(z, 0) + s min(z, 0), s the attribute `negative_slope` (0 when absent)."""

    linear_on_sides = True

    def value(self, attrs: Mapping[str, Any], z: Tensor) -> Tensor:
        slope = _negative_slope(attrs)
        return z.relu() if slope == 0 else torch.where(z >= 0, z, slope * z)

    def interval(self, attrs: Mapping[str, Any], lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
        at_lower, at_upper = self.value(attrs, lower), self.value(attrs, upper)
        if _negative_slope(attrs) >= 0:
            return at_lower, at_upper
        # A negative slope makes f decrease, then increase: its minimum is at the kink.
        crosses = (lower < 0) & (upper > 0)
        low = torch.minimum(at_lower, at_upper)
        return torch.where(crosses, torch.zeros_like(low), low), torch.maximum(at_lower, at_upper)

    def roundings(self, attrs: Mapping[str, Any]) -> int:
        return 0 if _negative_slope(attrs) in (0.0, 1.0, -1.0) else 1

    def ignores_lower(self, attrs: Mapping[str, Any]) -> bool:
        return _negative_slope(attrs) == 0

    def is_loose(self, attrs: Mapping[str, Any], lower: Tensor, upper: Tensor) -> Tensor:
        return ~((lower >= 0) | (upper <= 0))

    def lines(self, attrs: Mapping[str, Any], lower: Tensor, upper: Tensor) -> Lines:
        s = _negative_slope(attrs)
        loose = self.is_loose(attrs, lower, upper)
        one, below = torch.ones_like(lower), torch.full_like(lower, s)  # in full precision
        exact = torch.where(lower >= 0, one, below)
        # The chord's slope for s = 0; the halves keep the difference from overflowing.
        relative = (upper / 2) / (upper / 2 - lower / 2)
        chord = torch.where(loose, s + (1 - s) * relative, exact)
        intercept = torch.where(loose, -lower * ((1 - s) * relative), torch.zeros_like(lower))
        steep = torch.where(upper > -lower, one, below)
        free = torch.where(loose, steep, exact)
        slack = torch.where(loose, (1 + 2 * abs(s)) * _slack(lower, upper), torch.zeros_like(lower))
        if s > 1:
            return Lines(chord, free, intercept - slack, slack, None)
        alpha_range = torch.where(loose, below, exact), torch.where(loose, one, exact)
        # A slope of at least 0, rounded, is still at least 0; one of s may fall below it.
        return Lines(free, chord, None if s == 0 else -slack, intercept + slack, alpha_range)


def _slack(lower: Tensor, upper: Tensor) -> Tensor:
    """By how much an intercept moves outward: for the roundings of slope, intercept and their products.

    At most three for the slope, four for the intercept and three for coefficients times slopes, each relative
    to a product of a slope of at most 1 and an end; intercepts are summed in float64, where the number of
    neurons counts as well.
    """
    count = 16 + (lower[0].numel() if lower.dtype == torch.float64 else 0)
    size = torch.maximum(lower.abs(), upper.abs())
    return count * unit_roundoff(lower.dtype) * size + torch.finfo(lower.dtype).tiny


def _negative_slope(attrs: Mapping[str, Any]) -> float:
    return float(attrs.get("negative_slope", 0.0))
