"""Rounds of branch and bound as the report sees them."""

from __future__ import annotations

import math

from abcrown_dist.bab.search import Round


def proof(count: int, most_open: int) -> list[Round]:
    """A run of `count` rounds that opens up to `most_open` domains and ends with a proof."""
    found = []
    for number in range(1, count):
        share = number / count
        waiting = 1 + int(4 * (most_open - 1) * share * (1 - share))
        found.append(Round(2 + share, number, waiting, number, 2 * number, share - 1.5, number, 64 * waiting))
    return [*found, Round(3.0, count, 0, count, 2 * count, math.inf, count, 0)]
