"""What is to be verified, independent of the format it was written in.

A property describes the *counterexamples*, as VNN-LIB does: a disjunction of (input box,
conjunction of linear constraints). It is `sat` when some input of some disjunct's box fulfils all
of that disjunct's constraints, `unsat` when every disjunct is refuted.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

import numpy as np

from abcrown_dist.spec import junctions


class Verdict(enum.Enum):
    """Answers of the VNN-COMP results file, spelt as there."""

    SAT = "sat"
    UNSAT = "unsat"
    UNKNOWN = "unknown"
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True)
class Box:
    """Closed box over the flat input variables X_0 ... X_{n-1}, exactly as it was written.

    Attributes:
        lower, upper: n decimals each. `lower[i] > upper[i]` for some i makes the box empty.
    """

    lower: tuple[Decimal, ...]
    upper: tuple[Decimal, ...]

    @property
    def empty(self) -> bool:
        """Whether no point lies in the box."""
        return any(lo > hi for lo, hi in zip(self.lower, self.upper, strict=True))

    def outward(self) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper bounds, each (n,), in float64, rounded outward: the result contains the box."""
        lower = np.array([float(value) for value in self.lower])
        upper = np.array([float(value) for value in self.upper])
        for i, (lo, hi) in enumerate(zip(self.lower, self.upper, strict=True)):
            if Decimal(lower[i]) > lo:
                lower[i] = np.nextafter(lower[i], -np.inf)
            if Decimal(upper[i]) < hi:
                upper[i] = np.nextafter(upper[i], np.inf)
        return lower, upper


@dataclass(frozen=True)
class Disjunct:
    """One box and the K constraints  C y + D x <= rhs  that a counterexample in it fulfils, all at once.

    To refute it, it is enough to show  min over the box of (C_k y + D_k x - rhs_k) > 0  for one k.

    Where there are `groups`, a counterexample fulfils the constraints that stand by themselves, and of every
    factor at least one alternative.

    Attributes:
        box: the input set. Disjuncts with equal boxes share one object, so that `is` groups them.
        C: (K, outputs) float64.
        rhs: (K,) float64.
        D: (K, inputs) float64, or None where no constraint mentions an input.
        strict: (K,) bool; True where the text had < instead of <=. Bounds ignore it (proving the
            closed constraint is stronger); the confirmation of a counterexample does not.
        terms: the constraints exactly as written, for confirmation: K pairs of
            (coefficients by variable name "X_3" / "Y_0", right-hand side) in decimals.
        groups: (depth, K) int64, which constraints are joined by "or", see `junctions`; None: none.

    K may be 0: then every point of the box is a counterexample.
    """

    box: Box
    C: np.ndarray
    rhs: np.ndarray
    D: np.ndarray | None = None
    strict: np.ndarray | None = None
    terms: tuple[tuple[dict[str, Decimal], Decimal], ...] = ()
    groups: np.ndarray | None = None

    def direct(self) -> Disjunct:
        """What the constraints that stand by themselves say."""
        return self._of(np.flatnonzero(junctions.direct(self.groups, len(self.rhs))), None)

    def cases(self) -> list[Disjunct]:
        """Disjuncts that together say the same: one for each alternative of the smallest factor."""
        if self.groups is None:
            return [self]
        return [self._of(rows, groups) for rows, groups in junctions.branch(self.groups)]

    def _of(self, rows: np.ndarray, groups: np.ndarray | None) -> Disjunct:
        return Disjunct(
            self.box,
            self.C[rows],
            self.rhs[rows],
            None if self.D is None else self.D[rows],
            None if self.strict is None else self.strict[rows],
            tuple(self.terms[row] for row in rows) if self.terms else (),
            groups,
        )


@dataclass(frozen=True)
class Property:
    """A disjunction of `Disjunct`s over flat input and output variables.

    No disjuncts at all means that nothing can be a counterexample: `unsat`.
    """

    num_inputs: int
    num_outputs: int
    disjuncts: tuple[Disjunct, ...]
    source: str = ""

    def boxes(self) -> list[tuple[Box, list[int]]]:
        """Distinct boxes, each with the indices of its disjuncts, in order of first appearance."""
        groups: dict[int, tuple[Box, list[int]]] = {}
        for index, disjunct in enumerate(self.disjuncts):
            groups.setdefault(id(disjunct.box), (disjunct.box, []))[1].append(index)
        return list(groups.values())


@dataclass(frozen=True)
class Witness:
    """A confirmed counterexample.

    Attributes:
        inputs: decimals, one per flat input variable, inside the disjunct's box as written.
        outputs: what onnxruntime (or the model itself) answered, one float per output variable.
        disjunct: index of the disjunct that it fulfils.
    """

    inputs: Sequence[Decimal]
    outputs: Sequence[float]
    disjunct: int
