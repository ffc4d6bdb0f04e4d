"""Lower bounds from mixed-integer programmes, and what is demanded of a solver that certifies nothing.

A bound here is HiGHS's `mip_dual_bound` less a margin. What its tolerances may do:

- Rows are kept within 1e-6, and so are binaries: a neuron may leak 1e-6 of its big-M constant. That should
  only add points, but presolve and cuts reason within the same tolerance and were seen to cut off the
  optimum once what a neuron really does was 1e-5 of its constant. So the margin counts the leak of every
  row, carried on to the objective by absolute values. (Measured, 14 neurons: with constants up to 1e3 times
  what neurons do HiGHS was right to 1e-6, at 1e5 off by 0.2, at 1e6 by 5e5. The margin was 0.05, 6 and
  50.) Whoever uses the bound must not believe it where the margin exceeds `MOST_LEAK`.
- Reduced costs are trusted within 1e-7 of the objective, for each variable of range 1, and nodes within
  the absolute gap of 1e-6 of the best point are dropped. The objective is scaled so that both together
  are 1e-6 of its span, and counted.

For the first to stay small all variables lie in [0, 1], rows are scaled to coefficients of 1, and the
constants are those of each neuron's own bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import sparse

from abcrown_dist.exact.highs import solve_milp
from abcrown_dist.exact.program import Program

Array = np.ndarray

FEASIBILITY = 1e-6  # HiGHS's tolerance for rows and integrality, and its absolute gap
MOST_LEAK = 1e-2
"""Margin, in units of what the objective really does, above which HiGHS's bound is not believed at all."""
_DUAL = 1e-7  # its tolerance for reduced costs
_LOSS = 1e-6  # what objective tolerances may cost, in units of the objective's span
_MOST_SCALE = 1e6


@dataclass(frozen=True)
class IntegerBound:
    """Minimum of a linear function over a mixed-integer programme.

    Attributes:
        value: lower bound, margin subtracted; -inf where nothing is known.
        margin: what the solver's tolerances may amount to.
        optimal: whether HiGHS closed the gap.
        x: (n,) its best point, or None.
        nodes: of branch and bound.
    """

    value: float
    margin: float
    optimal: bool
    x: Array | None
    nodes: int


def leak(program: Program, cost: Array) -> float:
    """How far the objective may move when every row gives way by HiGHS's tolerance.

    Backwards through the rows: a variable that is worth T to the objective and bounded by a row moves by
    the tolerance over its coefficient in it, and passes T on to the row's other variables.
    """
    worth = np.abs(cost)
    total = 0.0
    for group in reversed(program.groups):
        if group.kind == "split":
            continue
        matrix = program.A_equal if group.kind == "link" else program.A
        rows = sparse.csr_array(abs(matrix[group.rows]))
        own = np.asarray(rows[np.arange(len(group.columns)), group.columns]).reshape(-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            each = np.where(worth[group.columns] > 0, worth[group.columns] / own, 0.0)
        total += FEASIBILITY * float(each.sum())
        if group.kind in ("lower", "link", "clause") and math.isfinite(total):
            passed = each @ rows
            passed[group.columns] = 0
            worth = worth + passed
    return total


def integer_minimum(
    program: Program, cost: Array, *, time_limit: float = math.inf
) -> IntegerBound | None:
    """Bound  cost v  from below over all solutions of `program`.

    Args:
        cost: (n,).
        time_limit: seconds.

    Returns:
        the bound; None where HiGHS has nothing to say.
    """
    span = float(np.abs(cost).sum())
    loose = 2 * FEASIBILITY + _DUAL * program.columns
    unit = float(np.clip(loose / _LOSS, 1.0, _MOST_SCALE)) / (span or 1.0)
    margin = loose / unit + leak(program, cost)
    found = solve_milp(
        cost * unit,
        (
            sparse.csr_array(sparse.vstack([program.A, program.A_equal], format="csr")),
            np.concatenate([np.full(len(program.b), -np.inf), program.b_equal]),
            np.concatenate([program.b, program.b_equal]),
        ),
        (np.zeros(program.columns), np.ones(program.columns)),
        program.integral,
        time_limit=time_limit,
    )
    if found is None:
        return None
    value = found.dual / unit - margin if math.isfinite(found.dual) else -math.inf
    return IntegerBound(value, margin, found.optimal, found.x, found.nodes)
