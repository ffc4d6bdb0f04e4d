"""How coefficients and points pass one node."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from abcrown_dist.bounds.concretize import contract
from abcrown_dist.bounds.types import RelaxedNode
from abcrown_dist.weights.maps import AffineMap


def affine_backward(affine: AffineMap, A: Tensor) -> tuple[Tensor, ...]:
    """W_i^T A for every operand: A (B or 1, R, *out) -> (B or 1, R, *in_i)."""
    lead = A.shape[:2]
    return tuple(part.unflatten(0, lead) for part in affine.transpose(A.flatten(0, 1)))


def relaxed_backward(
    relaxed: RelaxedNode,
    A: Tensor,
    alpha: Tensor | None,
    add_up: Callable[[Tensor, Tensor], Tensor] = contract,
) -> tuple[Tensor, Tensor | None]:
    """Coefficients of the pre-activation and the bias (B, R) that a relaxed nonlinearity adds.

    A lower bound takes the lower line where A >= 0 and the upper line where A < 0. `alpha`
    (B, R, *shape) replaces the lower slope; `add_up` contracts coefficients with intercepts.
    """
    lines = relaxed.lines
    low = lines.lower_slope[:, None] if alpha is None else alpha
    high = lines.upper_slope[:, None]
    negative = A.clamp(max=0)
    bias: Tensor | None = None
    if lines.upper_intercept is not None:
        bias = add_up(negative.flatten(2), lines.upper_intercept)
    if lines.lower_intercept is not None:
        positive = add_up((A - negative).flatten(2), lines.lower_intercept)
        bias = positive if bias is None else bias + positive
    # A low + min(A, 0) (high - low), in three passes over memory.
    gap = high - low  # of every domain, though rows may serve all of them
    negative = negative.mul_(gap) if len(negative) == len(gap) else negative * gap
    del gap  # as large as A, where slopes differ from row to row
    return torch.addcmul(negative, A, low), bias


def relaxed_forward(relaxed: RelaxedNode, A: Tensor, z: Tensor, alpha: Tensor | None) -> Tensor:
    """Value after a relaxed nonlinearity when every row follows the line that its A chose."""
    lines = relaxed.lines
    low = lines.lower_slope[:, None] if alpha is None else alpha
    takes_lower = A >= 0
    value = z * torch.where(takes_lower, low, lines.upper_slope[:, None])
    if lines.upper_intercept is not None:
        value += lines.upper_intercept[:, None].masked_fill(takes_lower, 0)
    if lines.lower_intercept is not None:
        value += lines.lower_intercept[:, None].masked_fill(~takes_lower, 0)
    return value
