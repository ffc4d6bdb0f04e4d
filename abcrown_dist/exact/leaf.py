"""Leaves of branch and bound, where nothing is left to split: all clauses and splits at once, exactly.

Within a leaf every function that a counterexample must make <= 0 is linear in the input: the clauses of
a disjunct and the signs that the splits demand. The leaf is refuted when no point of its box fulfils
all of them. A solver's "infeasible" would be no proof, so the question is put elastically,

    t* = min over the box of  max over i of  f_i(x) / scale_i,      f_i(x) = A_i x + b_i,

which always has an answer, and t* > 0 refutes the leaf. By duality t* is the maximum over q >= 0 of

    [ min over the box of  sum_i q_i f_i(x) ] / [ sum_i q_i scale_i ],

and every q gives a bound. HiGHS proposes q; the bound is computed here, with an allowance for rounding.
(Boyd and Vandenberghe, "Convex Optimization", 2004, section 5.8.3: theorems of alternatives.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from abcrown_dist.exact.highs import solve_lp
from abcrown_dist.exact.rounding import box_minimum, gamma

Array = np.ndarray

TOLERANCE = 1e-6
"""Violation, in units of a function's scale, above which a leaf counts as refuted."""


@dataclass(frozen=True)
class Leaf:
    """Answer for one leaf.

    Attributes:
        violation: valid lower bound of t*, the least possible largest violation in units of the
            functions' scales; -inf where nothing is known.
        point: (n,) float64 in the box: HiGHS's minimiser, which is a counterexample if there is one.
        solved: whether HiGHS finished; if not, `violation` is sound but may be far from t*.
    """

    violation: float
    point: Array
    solved: bool

    @property
    def refuted(self) -> bool:
        """Whether no point of the box fulfils all constraints."""
        return self.violation > TOLERANCE


@np.errstate(over="ignore", invalid="ignore")  # what is not finite is found and proves nothing
def least_violation(
    lower: Array,
    upper: Array,
    A: Array,
    b: Array,
    scale: Array,
    slack: Array | None = None,
    *,
    time_limit: float = math.inf,
) -> Leaf:
    """Bound from below how much the functions  A x + b <= 0  must be violated, all over the box.

    Args:
        lower, upper: the box, (n,) float64.
        A, b: M linear functions that a counterexample makes <= 0, (M, n) and (M,) float64.
        scale: (M,) > 0, what counts as 1 for each of them.
        slack: (M,) >= 0, by how much each function may be off within the box (rounding of A and b).
        time_limit: seconds for the solver.

    Returns:
        the leaf. With no functions at all, or with numbers that are not finite, or crossed bounds, its
        violation is -inf.
    """
    slack = np.zeros_like(b) if slack is None else slack
    middle = np.clip(lower / 2 + upper / 2, lower, upper)
    sane = all(np.isfinite(part).all() for part in (lower, upper, A, b, scale, slack))
    if not sane or not len(b) or (lower > upper).any() or not (scale > 0).all() or (slack < 0).any():
        return Leaf(-math.inf, middle, False)
    functions = _Functions(lower, upper, A, b, scale, slack)
    single, closest = functions.best_single()
    if single > TOLERANCE:
        return Leaf(single, closest, True)
    proposed = functions.propose(time_limit)
    if proposed is None:
        return Leaf(single, closest, False)
    multipliers, point, finished = proposed
    return Leaf(max(single, functions.bound(multipliers)), point, finished)


@dataclass(frozen=True)
class _Functions:
    """A x + b over a box, each entry finite, lower <= upper, scale > 0, slack >= 0."""

    lower: Array
    upper: Array
    A: Array
    b: Array
    scale: Array
    slack: Array

    def best_single(self) -> tuple[float, Array]:
        """Best bound that one function alone gives, and where that function is least."""
        exact = np.zeros((1, 1))
        minima = box_minimum(
            self.A, self.b, self.lower, self.upper, coefficient_error=exact, constant_error=self.slack
        )
        ratios = np.nextafter(minima / self.scale, -np.inf)
        best = int(np.argmax(np.where(np.isfinite(ratios), ratios, -np.inf)))
        value = float(ratios[best])
        return _number(value), np.where(self.A[best] >= 0, self.lower, self.upper)

    def bound(self, multipliers: Array) -> float:
        """The bound of t* that multipliers (M,) give, whatever they are."""
        q = np.where(multipliers > 0, multipliers, 0.0)
        total = float(q @ self.scale)
        if not (math.isfinite(total) and total > 0):
            return -math.inf
        rate = gamma(len(q))
        minimum = box_minimum(
            q @ self.A,
            np.asarray(q @ self.b),
            self.lower,
            self.upper,
            coefficient_error=rate * (q @ np.abs(self.A)),
            constant_error=np.asarray(rate * (q @ np.abs(self.b)) + (1 + rate) * (q @ self.slack)),
        )
        # The denominator is rounded as well: towards the side that makes the quotient smaller.
        total = total * (1 + rate) if minimum > 0 else total * (1 - rate)
        return _number(math.nextafter(float(minimum) / total, -math.inf))

    def propose(self, time_limit: float) -> tuple[Array, Array, bool] | None:
        """Multipliers, minimiser and whether HiGHS finished, by the linear programme.

        HiGHS sees  min t,  A x + b <= t scale  with x in [-1, 1] around the middle of the box, every row
        divided by its magnitude: its tolerances are absolute.
        """
        centre = self.lower / 2 + self.upper / 2
        radius = self.upper / 2 - self.lower / 2
        G = self.A * radius
        h = self.A @ centre + self.b
        size = np.maximum(np.abs(G).sum(axis=1) + np.abs(h), self.scale)
        # t in units of the least of these: a row of larger magnitude cannot be what decides.
        unit = float((size / self.scale).min())
        elastic = np.maximum(unit * self.scale / size, 1e-8)  # HiGHS drops what is smaller
        rows = np.concatenate([G / size[:, None], -elastic[:, None]], axis=1)
        ones = np.ones(len(centre))
        solution = solve_lp(
            np.append(0 * ones, 1.0),
            (rows, -h / size),
            (np.append(-ones, -np.inf), np.append(ones, np.inf)),
            time_limit=time_limit,
        )
        if solution is None:
            return None
        point = np.clip(centre + radius * solution.x[:-1], self.lower, self.upper)
        return solution.below / size, point, solution.optimal


def _number(value: float) -> float:
    """The value, or -inf where it is not finite: only finite bounds prove."""
    return value if math.isfinite(value) else -math.inf
