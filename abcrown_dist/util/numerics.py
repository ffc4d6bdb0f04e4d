"""Rounding: what a float sum may have lost, and how to stay on the safe side of it."""

from __future__ import annotations

import math

import torch


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of one rounded operation in `dtype` (half of machine epsilon)."""
    return torch.finfo(dtype).eps / 2


def sum_error(terms: int, dtype: torch.dtype) -> float:
    """Relative error of a sum of `terms` products, as a factor of the sum of magnitudes.

    The worst case is terms * u; rounding errors behave like independent ones, so that
    lambda * sqrt(terms) * u holds with overwhelming probability (Higham and Mary, "A New Approach
    to Probabilistic Rounding Error Analysis", SISC 2019, theorem 2.4). We take lambda = 4.
    """
    return 4 * math.sqrt(max(terms, 1)) * unit_roundoff(dtype)


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
