"""What a relaxation of an elementwise nonlinearity must offer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Lines:
    """Sound lines  lower_slope z + lower_intercept <= f(z) <= upper_slope z + upper_intercept.

    Every tensor is (B, *shape): one line per domain and neuron. Sound means in floating point: also with
    the slope times a coefficient rounded, and the intercepts added up in float64. Where f is linear over
    the whole interval, lines are exact, and what its slope rounds is charged by
    `bounds.rounding.nonlinear_sensitivity`.

    Attributes:
        lower_intercept, upper_intercept: None where they are all zero.
        alpha_range: None where the lower line cannot be moved, else its least and greatest slope:
            every slope between them, with lower intercept zero, is sound too. Both are equal where
            the function is linear over the whole interval.
    """

    lower_slope: Tensor
    upper_slope: Tensor
    lower_intercept: Tensor | None
    upper_intercept: Tensor | None
    alpha_range: tuple[Tensor, Tensor] | None

    def map(self, change: Callable[[Tensor], Tensor]) -> Lines:
        """The lines with every tensor replaced by what `change` makes of it."""

        def optional(value: Tensor | None) -> Tensor | None:
            return None if value is None else change(value)

        span = self.alpha_range
        return Lines(
            change(self.lower_slope),
            change(self.upper_slope),
            optional(self.lower_intercept),
            optional(self.upper_intercept),
            None if span is None else (change(span[0]), change(span[1])),
        )


class Relaxation(ABC):
    """A family of elementwise nonlinearities f, with pre-activation bounds (B, *shape).

    Methods take the node's static `attrs` because one family may serve several ops.

    Attributes:
        linear_on_sides: whether f is linear on z >= 0 and on z <= 0, so that branching on the sign of z
            leaves nothing to relax.
    """

    linear_on_sides = False

    @abstractmethod
    def value(self, attrs: Mapping[str, Any], z: Tensor) -> Tensor:
        """f(z)."""

    @abstractmethod
    def interval(self, attrs: Mapping[str, Any], lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
        """Exact range of f over [lower, upper]."""

    @abstractmethod
    def roundings(self, attrs: Mapping[str, Any]) -> int:
        """How often evaluating f rounds its value, relative to it; 0 where it is exact."""

    def ignores_lower(self, attrs: Mapping[str, Any]) -> bool:
        """Whether f of an interval with upper bound <= 0 is a point, whatever the lower bound."""
        return False

    @abstractmethod
    def is_loose(self, attrs: Mapping[str, Any], lower: Tensor, upper: Tensor) -> Tensor:
        """Bool mask of the neurons on which tighter bounds would tighten the relaxation.

        NaN bounds count as loose, so that they are never taken for proof of stability.
        """

    @abstractmethod
    def lines(self, attrs: Mapping[str, Any], lower: Tensor, upper: Tensor) -> Lines:
        """The default lines, those of plain CROWN."""
