"""What makes a search the same on any number of ranks: pieces of settled size, ties settled by place."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from abcrown_dist.bab.domains import Domains
from abcrown_dist.bounds.chunks import chunks


def slices(domains: Domains, size: int | None) -> Iterator[tuple[Domains, int]]:
    """Pieces of `size`, the last one filled up, and how many domains of each count; None: all in one."""
    index = torch.arange(len(domains), device=domains.goal.device)
    for piece, real in chunks(index, size or max(1, len(domains))):
        yield domains.select(piece), real


def best(score: Tensor, count: int, steady: bool) -> Tensor:
    """Indices (B, count) of the greatest entries of each row.

    Args:
        steady: entries that agree to three digits count as equal, and the first of them wins: rounding, which
            tensor parallelism changes, must not choose between neurons that are as good as each other.
    """
    if not steady:
        return score.topk(count, dim=1).indices
    mantissa, exponent = torch.frexp(score)
    rounded = torch.ldexp((mantissa * 1024).round() / 1024, exponent)
    rounded = torch.where(score.isfinite(), rounded, score)
    return rounded.argsort(dim=1, descending=True, stable=True)[:, :count]
