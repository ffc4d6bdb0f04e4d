"""Rows of a disjunct that are joined by "or" as well as "and".

A disjunct is a conjunction of rows and of *factors*, each of which is a disjunction of alternatives, each
of which is a conjunction again, and so on. `groups` says so: integers (depth, K), an even depth, for K rows.
Entry k of a row names a group by the group's first row. From the inside out, an even level joins rows into
alternatives ("and"), the odd level that follows joins alternatives into factors ("or"). A row that is joined
with nothing at a level names itself there; one that does so at the last level stands in the disjunct
directly.

To refute a conjunction one of its members will do, to refute a disjunction takes all of them: proofs and
margins are greatest, then least, from the inside out, and so are the amounts by which a point misses rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

Array = np.ndarray


def fold(values: Tensor, groups: Tensor | None) -> Tensor:
    """Values of rows (..., K), or truth values, each replaced by that of the factor which the row belongs to.

    Args:
        groups: (depth, ..., K), see above; None where every row stands in its disjunct directly.
    """
    if groups is None:
        return values
    if not values.is_floating_point():
        return fold(values.float(), groups) > 0
    for level in range(len(groups)):
        values = _joined(values, groups[level], level)
    return values


def _joined(values: Tensor, group: Tensor, level: int) -> Tensor:
    how = "amin" if level % 2 else "amax"
    return values.scatter_reduce(-1, group, values, how).gather(-1, group)


def decisive(margins: Tensor, groups: Tensor | None) -> Tensor:
    """Margins (..., K) of the rows that give their factor its margin, -inf for all others."""
    if groups is None:
        return margins
    return margins.masked_fill(margins != fold(margins, groups), -float("inf"))


def fulfilled_by_all(refuted: Tensor, groups: Tensor | None) -> Tensor:
    """Bool (..., K): rows that every counterexample fulfils, given (bool) those that none does.

    Those that stand in the disjunct directly, and those of the last alternative that is left of a factor.
    """
    if groups is None:
        return refuted | ~refuted
    own = groups.new_ones(groups.shape[1:]).cumsum(-1) - 1
    values, last = refuted.float(), own >= 0
    for level in range(0, len(groups), 2):
        values = _joined(values, groups[level], level)
        is_open = (groups[level] == own) & (values == 0)
        count = is_open.long().scatter_add(-1, groups[level + 1], is_open.long() * (groups[level + 1] != own))
        last = last & (count.gather(-1, groups[level + 1]) == 1) & (values == 0)
        values = _joined(values, groups[level + 1], level + 1)
    return last


def direct(groups: Array | None, count: int) -> Array:
    """Bool (count,): rows that stand in the disjunct directly."""
    if groups is None:
        return np.ones(count, dtype=bool)
    alone: Array = np.bincount(groups[-1], minlength=count)[groups[-1]] == 1
    return alone


def branch(groups: Array) -> list[tuple[Array, Array | None]]:
    """The cases of the factor with the fewest alternatives.

    Returns:
        by alternative, the rows (n,) that are left when it is chosen, and how these are joined.
    """
    count = groups.shape[1]
    joined = np.flatnonzero(~direct(groups, count))
    factors = {int(f): np.unique(groups[-2][groups[-1] == f]) for f in np.unique(groups[-1][joined])}
    factor, alternatives = min(factors.items(), key=lambda item: len(item[1]))
    cases = []
    for alternative in alternatives:
        chosen = (groups[-1] == factor) & (groups[-2] == alternative)
        rows = np.flatnonzero(chosen | (groups[-1] != factor))
        own = np.arange(count)
        changed = np.where(chosen, np.concatenate([[own, own], groups[:-2]]), groups)
        cases.append((rows, _renumbered(changed, rows)))
    return cases


def _renumbered(groups: Array, rows: Array) -> Array | None:
    """The groups of some rows, without levels at which nothing is joined."""
    place = np.zeros(groups.shape[1], dtype=np.int64)
    place[rows] = own = np.arange(len(rows))
    kept = place[groups[:, rows]]
    while len(kept) and (kept[:2] == own).all():
        kept = kept[2:]
    return kept if len(kept) else None
