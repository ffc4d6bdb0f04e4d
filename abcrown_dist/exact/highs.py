"""Calls of HiGHS (through scipy), each within a time limit; what goes wrong is a status, never an exception.

Source: Huangfu and Hall, "Parallelizing the dual revised simplex method", Mathematical Programming
Computation 2018. scipy is imported by the call: it takes a third of a second.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Array = np.ndarray

_TOLERANCES = (1e-9, 1e-7)  # of linear programmes; the second, HiGHS's own, where the first is out of reach


@dataclass(frozen=True)
class LinearSolution:
    """What HiGHS says of a linear programme. Nothing in it is proof.

    Attributes:
        optimal: whether HiGHS claims an optimum.
        value: objective at `x`.
        x: (n,) primal point.
        below: (rows,) multipliers >= 0 of the rows  A x <= b.
        equal: (rows,) multipliers of the rows  A x = b,  of the sign that adds  equal (A x - b).
        reduced: (n,) reduced costs: what the bounds of the variables are worth.
    """

    optimal: bool
    value: float
    x: Array
    below: Array
    equal: Array
    reduced: Array


@dataclass(frozen=True)
class IntegerSolution:
    """What HiGHS says of a mixed-integer programme.

    Attributes:
        optimal: whether HiGHS closed the gap.
        dual: its lower bound of the objective; NaN where it has none.
        value: objective of the best point; infinity where there is none.
        x: (n,) best point, or None.
        nodes: branch-and-bound nodes.
    """

    optimal: bool
    dual: float
    value: float
    x: Array | None
    nodes: int


def solve_lp(
    cost: Array,
    below: tuple[Array | csr_array, Array],
    bounds: tuple[Array, Array],
    equal: tuple[Array | csr_array, Array] | None = None,
    *,
    time_limit: float = math.inf,
) -> LinearSolution | None:
    """Minimise  cost x  subject to  A x <= b,  A' x = b'  and bounds, by the dual simplex method.

    Args:
        below, equal: (A, b) and (A', b').
        bounds: lower and upper bounds of the variables, each (n,); infinite where there is none.
        time_limit: seconds; nothing is tried when none are left.

    Returns:
        the solution, or None where there are no multipliers (out of time, infeasible, trouble).
    """
    begun = time.monotonic()
    for tolerance in _TOLERANCES:
        left = time_limit - (time.monotonic() - begun)
        result = _linprog(cost, below, bounds, equal, tolerance, left) if left > 0 else None
        if result is None:
            return None
        if result.status in (0, 1) and result.x is not None:
            return LinearSolution(
                optimal=result.status == 0,
                value=float(result.fun),
                x=np.asarray(result.x, float),
                below=-np.asarray(result.ineqlin.marginals, float),
                equal=-np.asarray(result.eqlin.marginals, float),
                reduced=np.asarray(result.lower.marginals, float) + np.asarray(result.upper.marginals, float),
            )
    return None


def _linprog(
    cost: Array,
    below: tuple[Array | csr_array, Array],
    bounds: tuple[Array, Array],
    equal: tuple[Array | csr_array, Array] | None,
    tolerance: float,
    time_limit: float,
) -> Any | None:
    """scipy's answer, or None for a programme with numbers that are not finite."""
    from scipy.optimize import linprog

    options: dict[str, Any] = {
        "primal_feasibility_tolerance": tolerance,
        "dual_feasibility_tolerance": tolerance,
    }
    if math.isfinite(time_limit):
        options["time_limit"] = time_limit
    try:
        return linprog(
            cost,
            A_ub=below[0],
            b_ub=below[1],
            A_eq=None if equal is None else equal[0],
            b_eq=None if equal is None else equal[1],
            bounds=np.stack(bounds, axis=1),
            method="highs-ds",
            options=options,
        )
    except ValueError:
        return None


def solve_milp(
    cost: Array,
    rows: tuple[csr_array, Array, Array],
    bounds: tuple[Array, Array],
    integral: Array,
    *,
    time_limit: float = math.inf,
) -> IntegerSolution | None:
    """Minimise  cost x  subject to  b <= A x <= b'  and bounds, some variables integral.

    The gap to be closed is HiGHS's absolute one (1e-6), which scipy does not let us change; so the
    caller scales the objective.

    Args:
        rows: (A, b, b').
        integral: (n,) bool.
        time_limit: seconds; nothing is tried when none are left.

    Returns:
        the solution, or None where HiGHS has no bound (infeasible, trouble).
    """
    if time_limit <= 0:
        return None
    from scipy.optimize import Bounds, LinearConstraint, milp

    options: dict[str, Any] = {"mip_rel_gap": 0.0}
    if math.isfinite(time_limit):
        options["time_limit"] = time_limit
    try:
        result = milp(
            cost,
            integrality=integral.astype(np.uint8),
            bounds=Bounds(*bounds),
            constraints=LinearConstraint(*rows),
            options=options,
        )
    except ValueError:
        return None
    if result.status not in (0, 1):
        return None
    found = result.x is not None
    dual = math.nan if result.mip_dual_bound is None else result.mip_dual_bound
    return IntegerSolution(
        optimal=result.status == 0,
        dual=float(dual),
        value=float(result.fun) if found else math.inf,
        x=np.asarray(result.x, float) if found else None,
        nodes=int(result.mip_node_count or 0),
    )
