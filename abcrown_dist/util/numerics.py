"""Rounding: what a float sum may have lost, and how to stay on the safe side of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of one rounded operation in `dtype` (half of machine epsilon)."""
    return torch.finfo(dtype).eps / 2


def gamma(roundings: Tensor | float, dtype: torch.dtype) -> Tensor | float:
    """n u / (1 - n u), the largest relative error of n roundings; infinite from n u = 1/2 on.

    A sum of products is off by at most gamma_n times the sum of the products' magnitudes, whatever the
    order of summation and with or without fused multiply-adds, where n counts the roundings on the
    longest way of a term (Higham, "Accuracy and Stability of Numerical Algorithms", 2002, section 3.1).
    """
    share = roundings * unit_roundoff(dtype)
    if isinstance(share, Tensor):
        return torch.where(share < 0.5, share / (1 - share), torch.inf)
    return share / (1 - share) if share < 0.5 else math.inf


def sum_error(terms: Tensor | float, dtype: torch.dtype) -> Tensor | float:
    """An estimate of the relative error of a sum of `terms` products, far below `gamma` for long sums.

    Rounding errors that behave like independent ones stay below lambda * sqrt(terms) * u with
    overwhelming probability (Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis",
    SISC 2019, theorem 2.4); lambda is 4 here. Equal terms round alike, so that this proves nothing.
    """
    return 4 * terms**0.5 * unit_roundoff(dtype)


@dataclass(frozen=True)
class Rounding:
    """How the errors of bounds are counted.

    Attributes:
        rigorous: by worst-case bounds (`gamma`), else by estimates (`sum_error`).
        model: type in which the network itself is computed. Bounds then hold for every such computation
            of it, one rounding after each operation, in any order of summation; None: for real arithmetic.
    """

    rigorous: bool = True
    model: torch.dtype | None = None

    def own(self, roundings: Tensor | float, dtype: torch.dtype) -> Tensor | float:
        """Relative error of `roundings` roundings in a computation of bounds in `dtype`."""
        return gamma(roundings, dtype) if self.rigorous else sum_error(roundings, dtype)

    def execution(self, roundings: Tensor | float) -> Tensor | float:
        """Relative error of `roundings` roundings in the network's own computation."""
        if self.model is None or not self.rigorous:
            return 0.0 * roundings
        return gamma(roundings, self.model)


REAL_ARITHMETIC = Rounding()
"""Bounds hold for the network in real arithmetic, on its stored numbers."""


def upward(terms: int, dtype: torch.dtype) -> float:
    """A factor that makes a computed sum of `terms` nonnegative terms no less than the exact one."""
    return 1 + 2 * float(gamma(terms + 4, dtype))


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a + b, and the magnitude of what rounding it lost, exactly (Knuth's TwoSum)."""
    total = a + b
    part = total - a
    return total, ((a - (total - part)) + (b - part)).abs()


def smallest(dtype: torch.dtype) -> float:
    """What an operation may lose where its result is too small for full precision."""
    return torch.finfo(dtype).tiny * torch.finfo(dtype).eps


def round_down(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Largest value of `dtype` not above `exact` (a float64 tensor)."""
    cast = exact.to(dtype)
    below = torch.nextafter(cast, torch.full_like(cast, -math.inf))
    return torch.where(cast.double() > exact, below, cast)


def round_up(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Smallest value of `dtype` not below `exact` (a float64 tensor)."""
    return -round_down(-exact, dtype)


def use_full_precision() -> None:
    """Switch off TF32 and reduced-precision sums, for the whole process (design rule 7.7)."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
