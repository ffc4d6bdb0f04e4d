"""Domains in pieces of a settled size, so that bits do not depend on how many come together."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from abcrown_dist.bab.domains import Domains
from abcrown_dist.bounds.chunks import chunks


def slices(domains: Domains, size: int | None) -> Iterator[tuple[Domains, int]]:
    """Pieces of `size`, the last one filled up, and how many domains of each count; None: all in one."""
    index = torch.arange(len(domains), device=domains.goal.device)
    for piece, real in chunks(index, size or max(1, len(domains))):
        yield domains.select(piece), real
