"""Disjuncts as goals of branch and bound: a domain belongs to one, and is done when one of its rows is.

All constraints of a disjunct must hold in a counterexample, so that refuting a single one will do, or all
alternatives of a factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from abcrown_dist.bab.clauses import Clauses


@dataclass(frozen=True)
class Goals:
    """G disjuncts of at most R rows each.

    Attributes:
        disjunct: their indices in the property.
        box: (G,) int64, which of the clauses' boxes each is about.
        rows: coefficients (G, R, *shape) by output (and input) node, over own neurons.
        lost: what rounding took from the coefficients, likewise.
        rhs: (G, R) float64; infinity in padding.
        strict: (G, R) bool.
        groups: (depth, G, R), see `spec.junctions`; None where no goal has factors.
    """

    disjunct: tuple[int, ...]
    box: Tensor
    rows: Mapping[str, Tensor]
    lost: Mapping[str, Tensor]
    rhs: Tensor
    strict: Tensor
    groups: Tensor | None = None

    def __len__(self) -> int:
        return len(self.disjunct)

    @classmethod
    def of(cls, clauses: Clauses, wanted: set[int]) -> Goals:
        """The disjuncts `wanted` of a batch of clauses, box by box."""
        found = [
            (b, index, torch.nonzero(clauses.disjunct[b] == index).flatten())
            for b in range(len(clauses.disjunct))
            for index in sorted(set(clauses.disjunct[b].tolist()) & wanted)
        ]
        height = max(len(columns) for _, _, columns in found)
        device = clauses.rhs.device
        box = torch.tensor([b for b, _, _ in found], device=device)
        column = torch.zeros(len(found), height, dtype=torch.int64, device=device)
        real = torch.zeros(len(found), height, dtype=torch.bool, device=device)
        for g, (_, _, columns) in enumerate(found):
            column[g, : len(columns)], real[g, : len(columns)] = columns, True

        def gather(values: Tensor) -> Tensor:
            return values.expand(len(clauses.rhs), *values.shape[1:])[box[:, None], column]

        return cls(
            disjunct=tuple(index for _, index, _ in found),
            box=box,
            rows={name: gather(values) for name, values in clauses.rows.items()},
            lost={name: gather(values) for name, values in clauses.lost.items()},
            rhs=gather(clauses.rhs).masked_fill(~real, torch.inf),
            strict=gather(clauses.strict) & real,
            groups=_groups(clauses, box, column, real),
        )

    def of_domains(self, goal: Tensor) -> Tensor | None:
        """The groups (depth, B, R) of domains with goals (B,)."""
        return None if self.groups is None else self.groups[:, goal]

    def combinable(self) -> Tensor:
        """Bool (G, R): rows that every counterexample fulfils; none of a goal that has only one of them."""
        direct = self.rhs.isfinite()
        if self.groups is not None:
            size = torch.zeros_like(self.groups[-1]).scatter_add(
                1, self.groups[-1], torch.ones_like(self.groups[-1])
            )
            direct = direct & (size.gather(1, self.groups[-1]) == 1)
        return direct & (direct.sum(1, keepdim=True) > 1)

    def start(self, goal: Tensor, row: Tensor | None = None) -> dict[str, Tensor]:
        """Rows (B, R, *shape) of domains with goals (B,), or only the row (B,) of each: R = 1.

        (1, R, *shape) where all rows are the same: what is common to all domains is computed once.
        """
        if len(self) == 1 and row is None:
            return dict(self.rows)
        if row is None:
            return {name: values[goal] for name, values in self.rows.items()}
        return {name: values[goal, row][:, None] for name, values in self.rows.items()}


def _groups(clauses: Clauses, box: Tensor, column: Tensor, real: Tensor) -> Tensor | None:
    """The groups of goals whose rows, of the given boxes (G,), are the consecutive columns (G, R)."""
    if clauses.groups is None:
        return None
    here = clauses.groups[:, box[:, None], column] - column[:, :1]
    return torch.where(real, here, torch.arange(column.shape[1], device=column.device))
