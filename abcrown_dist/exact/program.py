"""A mixed-integer programme over variables in [0, 1], and certified bounds of its linear relaxation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from scipy import sparse

from abcrown_dist.exact.expression import widen
from abcrown_dist.exact.highs import LinearSolution, solve_lp
from abcrown_dist.exact.rounding import box_minimum, gamma

Array = np.ndarray

_UNIT = 2.0**-53
_SMALL = 2e-9  # HiGHS silently drops coefficients below 1e-9, which could cut points off


@dataclass(frozen=True)
class RowGroup:
    """What some rows of a programme mean.

    Attributes:
        kind: `lower` a >= z; `flat` a >= s z (s the negative slope, for ReLU a bound of the variable
            instead); `upper` the chord; `off`, `on` big-M rows of the two pieces; `split` a sign;
            `link` the definition of a variable; `clause` f <= t.
        node: name of the nonlinear node (`link`: of the affine one).
        neurons: (rows,) its flat neurons.
        start: number of the first row, among the rows <= or, for `link`, the rows =.
        columns: (rows,) the variable that the row bounds; -1 for `split`.
        scale: (rows,) each row was divided by this power of two: the multiplier of the row as it is
            meant is the programme's divided by it.
    """

    kind: str
    node: str
    neurons: Array
    columns: Array
    start: int
    scale: Array

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + len(self.neurons))


@dataclass(frozen=True)
class Program:
    """Rows  A v <= b  and  A_equal v = b_equal  over v in [0, 1]^n, some of v integral.

    Attributes:
        A, b: (M, n), (M,). Largest coefficient of a row between 1 and 2.
        A_equal, b_equal: (L, n), (L,), likewise.
        integral: (n,) bool.
        groups: the meaning of all rows.
    """

    A: sparse.csr_array
    b: Array
    A_equal: sparse.csr_array
    b_equal: Array
    integral: Array
    groups: tuple[RowGroup, ...]

    @property
    def columns(self) -> int:
        return len(self.integral)


@dataclass(frozen=True)
class LinearBound:
    """Minimum of a linear function over a programme's linear relaxation.

    Attributes:
        value: certified lower bound; -inf where nothing is known.
        solution: what HiGHS proposed, in units of the cost; None where it had nothing.
    """

    value: float
    solution: LinearSolution | None


def linear_minimum(program: Program, cost: Array, *, time_limit: float = math.inf) -> LinearBound:
    """Bound  cost v  from below over the linear relaxation of `program`, certified.

    For any multipliers p >= 0 of the rows <= and q of the rows =, weak duality gives

        cost v >= min over [0, 1]^n of (cost + p A + q A_equal) v  -  p b - q b_equal,

    whose right-hand side is evaluated here; HiGHS only proposes p and q.

    Args:
        cost: (n,).
        time_limit: seconds.
    """
    unit = float(np.abs(cost).max(initial=0)) or 1.0
    solution = solve_lp(
        cost / unit,
        (program.A, program.b),
        (np.zeros(program.columns), np.ones(program.columns)),
        (program.A_equal, program.b_equal),
        time_limit=time_limit,
    )
    if solution is None:
        return LinearBound(-math.inf, None)
    solution = LinearSolution(
        solution.optimal,
        solution.value * unit,
        solution.x,
        solution.below * unit,
        solution.equal * unit,
        solution.reduced * unit,
    )
    return LinearBound(certify(program, cost, solution.below, solution.equal), solution)


def certify(program: Program, cost: Array, below: Array, equal: Array) -> float:
    """The bound of `cost v` that multipliers prove, whatever they are; -inf if they are not finite."""
    p, q = np.maximum(below, 0.0), equal
    if not (np.isfinite(p).all() and np.isfinite(q).all()):
        return -math.inf
    reduced = cost + p @ program.A + q @ program.A_equal
    terms = np.abs(cost) + p @ abs(program.A) + np.abs(q) @ abs(program.A_equal)
    count = len(p) + len(q)
    minimum = box_minimum(
        reduced,
        np.asarray(-(p @ program.b) - q @ program.b_equal),
        np.zeros(program.columns),
        np.ones(program.columns),
        coefficient_error=gamma(count + 1) * terms,
        constant_error=np.asarray(
            gamma(count) * (p @ np.abs(program.b) + np.abs(q) @ np.abs(program.b_equal))
        ),
    )
    return -math.inf if math.isnan(minimum) else float(minimum)


@dataclass
class ProgramBuilder:
    """Collects variables and rows; rows may be added before later variables exist."""

    columns: int = 0
    integral: list[Array] = field(default_factory=list)
    groups: list[RowGroup] = field(default_factory=list)
    _below: _Rows = field(default_factory=lambda: _Rows())
    _equal: _Rows = field(default_factory=lambda: _Rows())

    def variables(self, count: int, integral: bool = False) -> Array:
        """Columns (count,) of new variables in [0, 1]."""
        self.integral.append(np.full(count, integral))
        self.columns += count
        return np.arange(self.columns - count, self.columns)

    def at_most(
        self, kind: str, node: str, neurons: Array, columns: Array, rows: sparse.csr_array, rhs: Array
    ) -> None:
        """Rows  R v <= rhs,  each relaxed by what writing them down may round."""
        if not len(rhs):
            return
        rows, dropped, scale = _scaled(rows)
        lost = -dropped.minimum(0).sum(axis=1)  # a dropped c v with c < 0 may be as low as c
        rhs = rhs / scale + lost
        rhs = rhs + 8 * _UNIT * (np.abs(rhs) + abs(rows).sum(axis=1) + 1)
        self.groups.append(RowGroup(kind, node, neurons, columns, self._below.add(rows, rhs), scale))

    def link(
        self, node: str, neurons: Array, columns: Array, rows: sparse.csr_array, rhs: Array
    ) -> Array:
        """Rows  R v = rhs  that define variables; returns how far off (rows,) the definition is."""
        rows, dropped, scale = _scaled(rows)
        start = self._equal.add(rows, rhs / scale)
        self.groups.append(RowGroup("link", node, neurons, columns, start, scale))
        return abs(dropped).sum(axis=1) * scale * (1 + 8 * _UNIT)

    def build(self) -> Program:
        """The programme of everything so far; later additions do not change it."""
        A, b = self._below.matrix(self.columns)
        A_equal, b_equal = self._equal.matrix(self.columns)
        integral = np.concatenate(self.integral) if self.integral else np.zeros(0, bool)
        return Program(A, b, A_equal, b_equal, integral, tuple(self.groups))

    def copy(self) -> ProgramBuilder:
        """A builder that goes on from here on its own."""
        return ProgramBuilder(
            self.columns, list(self.integral), list(self.groups), self._below.copy(), self._equal.copy()
        )


@dataclass
class _Rows:
    parts: list[sparse.csr_array] = field(default_factory=list)
    rhs: list[Array] = field(default_factory=list)
    count: int = 0

    def add(self, rows: sparse.csr_array, rhs: Array) -> int:
        """Append rows; returns the number of the first one."""
        self.parts.append(rows)
        self.rhs.append(rhs)
        self.count += len(rhs)
        return self.count - len(rhs)

    def matrix(self, columns: int) -> tuple[sparse.csr_array, Array]:
        if not self.parts:
            return sparse.csr_array((0, columns)), np.zeros(0)
        rows = sparse.vstack([widen(part, columns) for part in self.parts], format="csr")
        return sparse.csr_array(rows), np.concatenate(self.rhs)

    def copy(self) -> _Rows:
        return _Rows(list(self.parts), list(self.rhs), self.count)


def _scaled(rows: sparse.csr_array) -> tuple[sparse.csr_array, sparse.csr_array, Array]:
    """Rows divided by powers of two, what had to be dropped of them (divided likewise), and the powers."""
    largest = abs(rows).max(axis=1).toarray().reshape(-1)
    scale = np.exp2(np.floor(np.log2(np.where(largest > 0, largest, 1.0))))
    rows = sparse.csr_array(sparse.diags_array(1 / scale) @ rows)
    dropped = rows.copy()
    small = np.abs(rows.data) < _SMALL
    dropped.data = np.where(small, rows.data, 0.0)
    rows.data = np.where(small, 0.0, rows.data)
    rows.eliminate_zeros()
    dropped.eliminate_zeros()
    return rows, dropped, scale
