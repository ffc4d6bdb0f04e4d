"""The best combination of linear functions over boxes: small linear programs, many at once.

For R functions  g_r(x) = c_r + G_r x  over x in [-1, 1]^n, the multipliers lam >= 0 with  sum lam = 1  that
maximise  min over x of sum_r lam_r g_r(x).  They are the dual of  min t, g_r(x) <= t,  which a primal-dual
interior-point method solves (Boyd and Vandenberghe, "Convex Optimization", 2004, section 11.7), with one
system of R equations a step. Any lam >= 0 gives a valid bound, so that nothing depends on how far it has
converged.
"""

from __future__ import annotations

import torch
from torch import Tensor

_STEPS, _CENTRING, _INSIDE = 20, 0.1, 0.97
_ABSENT = 1e6  # above any other function: of no use


def best_multipliers(G: Tensor, c: Tensor, allowed: Tensor) -> Tensor:
    """Multipliers (B, R) in float64 that add up to 1, zero where not `allowed` (B, R).

    Args:
        G, c: (B, R, n) and (B, R), in float64; what is not finite counts as zero.
    """
    G, c, size = _scaled(G, c, allowed)
    rows, inputs = G.shape[1:]
    lam = allowed.double() / allowed.sum(1, keepdim=True).clamp(min=1)
    lam = torch.where(allowed, lam, 1e-12)
    x = torch.zeros_like(G[:, 0])
    t = c.masked_fill(~allowed, -torch.inf).amax(1, keepdim=True).nan_to_num(0.0, 0.0, 0.0) + 1
    low, high = torch.ones_like(x), torch.ones_like(x)  # multipliers of -1 <= x and x <= 1
    for _ in range(_STEPS):
        s = torch.where(allowed, t - c - torch.einsum("brn,bn->br", G, x), _ABSENT)
        gap = (lam * s * allowed).sum(1) + (high * (1 - x)).sum(1) + (low * (1 + x)).sum(1)
        mu = (_CENTRING * gap / (rows + 2 * inputs))[:, None]
        curved = high / (1 - x) + low / (1 + x)
        q = mu / (1 + x) - mu / (1 - x) - torch.einsum("brn,br->bn", G, lam)
        system = torch.einsum("brn,bsn->brs", G / curved[:, None], G) + torch.diag_embed(s / lam)
        right = mu / lam - s + torch.einsum("brn,bn->br", G, q / curved)
        factor, _ = torch.linalg.cholesky_ex(system)
        solved = torch.cholesky_solve(torch.stack([right, torch.ones_like(right)], dim=2), factor)
        total = solved.sum(1)
        dt = (total[:, :1] - (1 - lam.sum(1, keepdim=True))) / total[:, 1:]
        dlam = (solved[:, :, 0] - solved[:, :, 1] * dt) * allowed
        dx = (q - torch.einsum("brn,br->bn", G, dlam)) / curved
        ds = torch.where(allowed, dt - torch.einsum("brn,bn->br", G, dx), 0.0)
        dhigh, dlow = (mu + high * dx) / (1 - x) - high, (mu - low * dx) / (1 + x) - low
        primal = _longest((s, ds), (1 - x, -dx), (1 + x, dx))
        dual = _longest((lam, dlam), (high, dhigh), (low, dlow))
        good = torch.isfinite(primal) & torch.isfinite(dual) & (gap[:, None] > 1e-13)
        good &= dlam.isfinite().all(1, keepdim=True) & dx.isfinite().all(1, keepdim=True)
        x, t = torch.where(good, x + primal * dx, x), torch.where(good, t + primal * dt, t)
        lam = torch.where(good, lam + dual * dlam, lam)
        high, low = torch.where(good, high + dual * dhigh, high), torch.where(good, low + dual * dlow, low)
    lam = torch.where(allowed & (lam > 1e-8), lam / size, 0.0)
    return lam / lam.sum(1, keepdim=True).clamp(min=1e-300)


def _scaled(G: Tensor, c: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The functions divided by the largest values (B, R) that they take, and these."""
    c = torch.where(allowed, c, 0.0).nan_to_num(0.0, 0.0, 0.0)
    G = torch.where(allowed[:, :, None], G, 0.0).nan_to_num(0.0, 0.0, 0.0)
    size = c.abs() + G.abs().sum(2)
    size = torch.maximum(size, 1e-12 * size.amax(1, keepdim=True)).clamp(min=1e-300)
    return G / size[:, :, None], c / size, size


def _longest(*pairs: tuple[Tensor, Tensor]) -> Tensor:
    """How far (B, 1), at most 1, values may go along steps without vanishing."""
    most = torch.ones_like(pairs[0][0][:, :1])
    for value, step in pairs:
        if value.shape[1]:
            ratio = (-value / step).masked_fill(step >= 0, torch.inf).amin(1, keepdim=True)
            most = torch.minimum(most, _INSIDE * ratio)
    return most
