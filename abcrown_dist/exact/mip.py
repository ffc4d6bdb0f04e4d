"""Whole properties by mixed-integer programming: refuted, or a candidate counterexample, or unknown.

A disjunct asks for a point of the box with  C y + D x - rhs <= 0  in every row. As in `leaf` the question
is put elastically: minimise t over all points with every row <= t * scale. Always feasible, and t* > 0
refutes.

The linear relaxation's bound is certified (`program`) and is tried first; then comes HiGHS's branch and
bound, whose bound counts after a margin (`integer`), if that is small beside what the network does: with
constants 1e6 times too large HiGHS was seen to miss by all. A point of the network that lies below the
bound shows that HiGHS is wrong; then nothing is known.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy import sparse

from abcrown_dist.exact.encode import Encoding
from abcrown_dist.exact.expression import Expression, sum_sparse, widen
from abcrown_dist.exact.integer import MOST_LEAK, IntegerBound, integer_minimum
from abcrown_dist.exact.leaf import TOLERANCE
from abcrown_dist.exact.program import Program, linear_minimum
from abcrown_dist.spec.property import Disjunct

Array = np.ndarray

_ENOUGH = -1e-3  # a violation t this negative need not be improved
_SAMPLES = 256
_WRONG = "HiGHS's bound is wrong at a point of the network"
_FIRST_SLICE = 2.0  # seconds; HiGHS cannot be told to stop at a bound, so it is asked again and again,
_NEXT_SLICE = 4.0  # each time this many times longer


@dataclass(frozen=True)
class Decision:
    """Answer for one disjunct.

    Attributes:
        outcome: `refuted` is proof; `candidate` is a point to be confirmed; `unknown` says `reason`.
        bound: lower bound of t*, the least possible largest violation in units of the scales, margins
            for the solver's tolerances subtracted; -inf where there is none.
        point: (inputs,) float64 in the box, the best one seen; None where none was.
        reason: one line.
        nodes: branch-and-bound nodes of HiGHS.
    """

    outcome: Literal["refuted", "candidate", "unknown"]
    bound: float = -math.inf
    point: Array | None = None
    reason: str = ""
    nodes: int = 0


@np.errstate(over="ignore", invalid="ignore")  # what is not finite is found and proves nothing
def decide(
    encoding: Encoding, disjunct: Disjunct, scale: Array, *, time_limit: float = math.inf, seed: int = 0
) -> Decision:
    """Decide one disjunct over the encoding's box.

    Args:
        encoding: of the whole network, not relaxed.
        disjunct: its own box is ignored.
        scale: (K,) > 0, what counts as 1 for each row.
        time_limit: seconds.
        seed: of the points that are tried first.
    """
    begun = time.monotonic()
    run = _Run(encoding, disjunct, np.asarray(scale, float))
    best, spread = run.sample(seed)
    if best.violation <= 0:
        return Decision("candidate", point=best.point, reason="found by sampling")
    try:
        question = pose(encoding, disjunct, run.scale)
    except ValueError as error:
        return Decision("unknown", point=best.point, reason=str(error))
    if question.least > TOLERANCE:
        return Decision("refuted", question.least, best.point, "intervals")
    relaxation = linear_minimum(question.program, question.cost, time_limit=time_limit)
    bound = question.violation(relaxation.value)
    if bound > TOLERANCE:
        return _checked(Decision("refuted", bound, best.point, "linear relaxation"), best)
    last = Decision("unknown", bound, best.point, "no answer from HiGHS within the time limit")
    if relaxation.solution is None:
        return last
    best = run.better(best, encoding.point(relaxation.solution.x))
    exact = not question.program.integral.any()
    if best.violation <= (TOLERANCE if exact else 0):
        return Decision("candidate", bound, best.point, "linear relaxation")
    if exact:
        return replace(last, reason="within rounding of the linear programme")
    for seconds in _slices(time_limit - (time.monotonic() - begun)):
        found = integer_minimum(question.program, question.cost, time_limit=seconds)
        if found is None:
            return last
        if found.x is not None:
            best = run.better(best, encoding.point(found.x))
        trusted = found.margin <= MOST_LEAK * min(1.0, spread)
        last = _judge(question, found, last.bound if trusted else bound, best, trusted)
        if found.optimal or last.outcome != "unknown" or last.reason == _WRONG:
            return last
    return last


def _slices(total: float) -> Iterator[float]:
    """Growing time limits that add up to `total` seconds."""
    seconds, begun = _FIRST_SLICE, time.monotonic()
    while (left := total - (time.monotonic() - begun)) > 0:
        yield min(seconds, left) if left > 2 * seconds else left
        seconds *= _NEXT_SLICE


@dataclass(frozen=True)
class Question:
    """Minimise t over a programme whose last variable v stands for  t = least + width v.

    Attributes:
        program: of the network and the clauses.
        least, width: of t, in units of the clauses' scales. `least` is a valid lower bound, or low enough.
    """

    program: Program
    least: float
    width: float

    @property
    def cost(self) -> Array:
        """Objective (variables,): t - least."""
        cost = np.zeros(self.program.columns)
        cost[-1] = self.width
        return cost

    def violation(self, value: float) -> float:
        """t of a lower bound of the objective, rounded down."""
        if not math.isfinite(value):
            return -math.inf
        return self.least + value - 4 * 2.0**-53 * (abs(self.least) + abs(value))


def pose(encoding: Encoding, disjunct: Disjunct, scale: Array) -> Question:
    """Add the clauses of a disjunct and the variable t to a network's programme.

    Raises:
        ValueError: no clauses, or something is not finite.
    """
    clauses = encoding.clauses(disjunct.C, disjunct.D, disjunct.rhs)
    lower, upper = clauses.interval()
    if not (len(scale) and np.isfinite(lower).all() and np.isfinite(upper).all() and (scale > 0).all()):
        raise ValueError("clauses have no finite bounds")
    least = max(float((lower / scale).max()), _ENOUGH)
    least -= 4 * 2.0**-53 * abs(least)
    width = 1.01 * max(float((upper / scale).max()) - least, 1e-3)  # room for t at any point
    builder = encoding.builder.copy()
    column = builder.variables(1)
    rows = _clause_rows(clauses, scale, width, int(column[0]))
    rounding = 8 * 2.0**-53 * (np.abs(clauses.offset) + scale * abs(least))
    rhs = scale * least - clauses.offset + clauses.error + rounding
    builder.at_most("clause", "", np.arange(len(scale)), column.repeat(len(scale)), rows, rhs)
    return Question(builder.build(), least, width)


def _clause_rows(clauses: Expression, scale: Array, width: float, column: int) -> sparse.csr_array:
    """Rows of  f_i <= scale_i (least + width v)."""
    count = np.arange(len(scale) + 1)
    elastic = sparse.csr_array(
        (-scale * width, np.full(len(scale), column), count), shape=(len(scale), column + 1)
    )
    return sum_sparse([widen(clauses.E, column + 1), elastic])


@dataclass(frozen=True)
class _Point:
    point: Array
    violation: float


@dataclass(frozen=True)
class _Run:
    """What the network does at points, in float64."""

    encoding: Encoding
    disjunct: Disjunct
    scale: Array

    def violations(self, points: Array) -> Array:
        """Largest violation (P,) of points (P, inputs) in units of the scales; NaN counts as infinite."""
        item = self.disjunct
        values = self.encoding.network(points) @ item.C.T - item.rhs
        if item.D is not None:
            values = values + points @ item.D.T
        largest = (values / self.scale).max(axis=1, initial=-np.inf)
        return np.where(np.isnan(largest), np.inf, largest)

    def sample(self, seed: int) -> tuple[_Point, float]:
        """The best of some points (the middle, corners, and others), and how far their violations spread."""
        lower, upper = self.encoding.lower, self.encoding.upper
        random = np.random.default_rng(seed)
        share = random.random((_SAMPLES, len(lower)))
        share[::2] = share[::2] > 0.5
        share[0] = 0.5
        points = np.clip(lower + (upper - lower) * share, lower, upper)
        return self._best(points), float(np.ptp(self.violations(points)))

    def better(self, known: _Point, point: Array) -> _Point:
        found = self._best(point[None])
        return found if found.violation < known.violation else known

    def _best(self, points: Array) -> _Point:
        violations = self.violations(points)
        index = int(np.argmin(violations))
        return _Point(points[index], float(violations[index]))


def _judge(
    question: Question, found: IntegerBound, known: float, best: _Point, trusted: bool
) -> Decision:
    """What HiGHS's bound proves, after its margin; `known` is a bound from before."""
    bound = max(question.violation(found.value), known) if trusted else known
    if bound > TOLERANCE:
        return _checked(Decision("refuted", bound, best.point, "mixed-integer programme", found.nodes), best)
    if best.violation <= TOLERANCE + found.margin:
        return Decision("candidate", bound, best.point, "mixed-integer programme", found.nodes)
    reason = "within HiGHS's tolerances" if found.optimal else "time limit of HiGHS"
    return Decision("unknown", bound, best.point, reason, found.nodes)


def _checked(decision: Decision, best: _Point) -> Decision:
    """Not refuted after all if a point of the network contradicts the bound."""
    if best.violation < decision.bound - TOLERANCE / 2:
        return replace(decision, outcome="unknown", bound=-math.inf, reason=_WRONG)
    return decision
