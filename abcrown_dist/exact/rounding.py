"""Worst-case rounding of float64 sums, outward steps, and minima over boxes that allow for both.

Leaves and programmes are small, so that the rigorous factor (Higham, "Accuracy and Stability of
Numerical Algorithms", 2002, section 3.1) costs nothing worth having; the statistical one of
`util/numerics` is for bounds of whole networks.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray

_UNIT = 2.0**-53
_TINY = float(np.finfo(np.float64).tiny)  # covers what underflows


def gamma(terms: int) -> float:
    """gamma_k = k u / (1 - k u): relative error of a sum of `terms` products, in any order.

    One product more is counted, so that the factor may itself be applied in rounded arithmetic.
    """
    product = (terms + 4) * _UNIT
    return product / (1 - product)


def box_minimum(
    coefficients: Array,
    constant: Array,
    lower: Array,
    upper: Array,
    *,
    coefficient_error: Array,
    constant_error: Array,
) -> Array:
    """Lower bounds of  min over the box of (w x + c)  that no rounding makes too large.

    Args:
        coefficients: w, (..., n).
        constant: c, (...).
        lower, upper: the box, each (n,), finite.
        coefficient_error, constant_error: how far either may be from the exact one, (..., n) and (...).

    Returns:
        (...); NaN or -inf where something is not finite.
    """
    reach = np.maximum(np.abs(lower), np.abs(upper))
    at_minimum = coefficients * np.where(coefficients >= 0, lower, upper)
    total = constant + at_minimum.sum(axis=-1)
    summed = np.abs(constant) + np.abs(at_minimum).sum(axis=-1)
    allowance = constant_error + (coefficient_error * reach).sum(axis=-1)
    terms = coefficients.shape[-1] + 2
    allowance = allowance * (1 + gamma(terms)) + gamma(terms) * summed + terms * _TINY
    return np.nextafter(total - allowance * (1 + 4 * _UNIT), -np.inf)
