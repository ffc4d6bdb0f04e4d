"""Leaves: the bound never exceeds the exact least violation, whatever the solver says."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from abcrown_dist.exact import leaf
from abcrown_dist.exact.highs import LinearSolution
from abcrown_dist.exact.leaf import TOLERANCE, Leaf, least_violation

Array = np.ndarray
Problem = tuple[Array, Array, Array, Array, Array]
"""lower, upper, A, b, scale."""


def exact_violation(problem: Problem, x: Array) -> Fraction:
    """Largest violation at a point, in rational numbers: an upper bound of the least one."""
    _, _, A, b, scale = problem
    point = [Fraction(value) for value in x.tolist()]
    values = []
    for row, constant, unit in zip(A.tolist(), b.tolist(), scale.tolist(), strict=True):
        total = sum((Fraction(a) * value for a, value in zip(row, point, strict=True)), Fraction(constant))
        values.append(total / Fraction(unit))
    return max(values)


def exact_minimum_on_a_line(problem: Problem) -> Fraction:
    """Least largest violation for one input, in rational numbers: at an end or where two functions cross."""
    lower, upper, A, b, scale = problem
    low, high = Fraction(float(lower[0])), Fraction(float(upper[0]))
    lines = [
        (Fraction(float(a)) / Fraction(float(s)), Fraction(float(c)) / Fraction(float(s)))
        for a, c, s in zip(A[:, 0], b, scale, strict=True)
    ]
    candidates = {low, high}
    for i, (a, c) in enumerate(lines):
        for e, f in lines[:i]:
            if a != e and low <= (f - c) / (a - e) <= high:
                candidates.add((f - c) / (a - e))
    return min(max(a * x + c for a, c in lines) for x in candidates)


def plain(random: np.random.Generator, inputs: int, rows: int) -> Problem:
    lower = random.standard_normal(inputs)
    upper = lower + random.random(inputs)
    A, b = random.standard_normal((rows, inputs)), 2 * random.standard_normal(rows)
    return lower, upper, A, b, 10.0 ** random.uniform(-1, 1, rows)


def degenerate(random: np.random.Generator, inputs: int, rows: int) -> Problem:
    lower, upper, A, b, scale = plain(random, inputs, rows)
    fixed = random.random(inputs) < 0.6
    return lower, np.where(fixed, lower, np.nextafter(upper, 9)), A * (random.random(A.shape) < 0.5), b, scale


def nearly_parallel(random: np.random.Generator, inputs: int, rows: int) -> Problem:
    """Functions in opposite pairs that differ in the ninth digit, so that multipliers cancel."""
    lower, upper, A, b, scale = plain(random, inputs, rows)
    half = rows // 2
    A[half : 2 * half] = -A[:half] * (1 + 1e-9 * random.standard_normal((half, 1)))
    b[half : 2 * half] = -b[:half] + 1e-3 * random.standard_normal(half)
    return lower, upper, A, b, scale


def badly_scaled(random: np.random.Generator, inputs: int, rows: int) -> Problem:
    """Functions between 1e-8 and 1e8, half of them with a scale to match; inputs of different sizes."""
    lower, upper, A, b, scale = plain(random, inputs, rows)
    factor = 10.0 ** random.integers(-8, 9, rows)
    stretch = 10.0 ** random.integers(-4, 5, inputs)
    A, b = A * factor[:, None] / stretch, b * factor
    return lower * stretch, upper * stretch, A, b, np.where(random.random(rows) < 0.5, scale * factor, scale)


KINDS = [plain, degenerate, nearly_parallel, badly_scaled]


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_is_never_above_the_violation_of_any_point(
    kind: Callable[[np.random.Generator, int, int], Problem],
) -> None:
    random = np.random.default_rng(0)
    for _ in range(150):
        problem = kind(random, int(random.integers(1, 8)), int(random.integers(1, 12)))
        found = least_violation(*problem)
        lower, upper = problem[:2]
        assert (found.point >= lower).all() and (found.point <= upper).all()
        points = [found.point, *(lower + (upper - lower) * random.random((4, len(lower))))]
        assert found.violation <= min(exact_violation(problem, np.clip(x, lower, upper)) for x in points)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_is_never_above_the_exact_minimum(
    kind: Callable[[np.random.Generator, int, int], Problem],
) -> None:
    random = np.random.default_rng(1)
    for _ in range(150):
        problem = kind(random, 1, int(random.integers(1, 8)))
        assert least_violation(*problem).violation <= exact_minimum_on_a_line(problem)


@pytest.mark.parametrize("kind", [plain, degenerate, nearly_parallel])
def test_the_bound_reaches_the_minimum(kind: Callable[[np.random.Generator, int, int], Problem]) -> None:
    """Below the threshold of proof the bound and the point enclose the minimum."""
    random = np.random.default_rng(2)
    open_leaves = 0
    for _ in range(150):
        lower, upper, A, b, scale = kind(random, int(random.integers(1, 8)), int(random.integers(1, 12)))
        problem = lower, upper, A, b - 2 * scale, scale
        found = least_violation(*problem)
        assert found.solved
        if not found.refuted:
            open_leaves += 1
            assert float(exact_violation(problem, found.point)) - found.violation <= 1e-7
    assert open_leaves > 40


def test_constraints_count_together() -> None:
    """x >= 0.6 and x <= 0.4: each alone is possible."""
    A, b = np.array([[-1.0], [1.0]]), np.array([0.6, -0.4])
    found = least_violation(np.zeros(1), np.ones(1), A, b, np.ones(2))
    assert found.refuted
    assert found.violation == pytest.approx(0.1, abs=1e-9)
    assert found.point == pytest.approx(0.5, abs=1e-6)


def test_a_counterexample_is_found() -> None:
    """x + y >= 1.8 and x <= y hold together only near the corner (1, 1)."""
    A, b = np.array([[-1.0, -1.0], [1.0, -1.0]]), np.array([1.8, 0.0])
    found = least_violation(np.zeros(2), np.ones(2), A, b, np.ones(2))
    assert not found.refuted
    assert (A @ found.point + b <= 0).all()


@pytest.mark.parametrize("gap", [1e-5, 2e-6])
def test_what_lies_within_the_tolerance_is_not_refuted(gap: float) -> None:
    A, b = np.array([[-1.0], [1.0]]), np.array([0.5 + gap / 2, -0.5 + gap / 2])

    def refuted(scale: float) -> bool:
        return least_violation(np.zeros(1), np.ones(1), A, b, np.full(2, scale)).refuted

    assert refuted(0.4 * gap / TOLERANCE)
    assert not refuted(0.6 * gap / TOLERANCE)


def test_slack_is_subtracted() -> None:
    """Functions that may be off by 0.3 and 0.1, at multipliers of a half each."""
    A, b = np.array([[-1.0], [1.0]]), np.array([0.8, -0.2])
    found = least_violation(np.zeros(1), np.ones(1), A, b, np.ones(2), np.array([0.3, 0.1]))
    assert found.violation == pytest.approx(0.3 - 0.2, abs=1e-9)
    one = np.ones(1)
    single = least_violation(0 * one, one, np.zeros((1, 1)), one / 2, one, slack=one)
    assert single.violation == pytest.approx(-0.5, abs=1e-9)


@pytest.mark.parametrize(
    "change",
    [
        {"A": np.array([[math.nan, 0.0]])},
        {"b": np.array([math.inf])},
        {"lower": np.array([-math.inf, 0.0])},
        {"lower": np.array([2.0, 0.0])},
        {"scale": np.array([0.0])},
        {"scale": np.array([math.nan])},
        {"slack": np.array([-1.0])},
        {"A": np.zeros((0, 2)), "b": np.zeros(0), "scale": np.zeros(0), "slack": np.zeros(0)},
    ],
)
def test_what_makes_no_sense_is_not_refuted(change: dict[str, Array]) -> None:
    good = {
        "lower": np.zeros(2),
        "upper": np.ones(2),
        "A": np.ones((1, 2)),
        "b": np.array([5.0]),
        "scale": np.ones(1),
        "slack": np.zeros(1),
    }
    assert least_violation(**good).refuted  # type: ignore[arg-type]
    assert least_violation(**(good | change)).violation == -math.inf  # type: ignore[arg-type]


def test_enormous_numbers_prove_nothing() -> None:
    found = least_violation(
        np.full(2, 1e200), np.full(2, 2e200), np.array([[1e200, -1e200]]), np.ones(1), np.ones(1)
    )
    assert found.violation == -math.inf


def test_no_multipliers_can_make_the_bound_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(3)

    def lie(cost: Array, below: tuple[Array, Array], *_: object, **__: object) -> LinearSolution:
        rows = len(below[1])
        multipliers = random.standard_normal(rows) * 10.0 ** random.integers(-9, 9, rows)
        multipliers[random.random(rows) < 0.1] = random.choice([math.nan, math.inf, -math.inf])
        x = random.standard_normal(len(cost))
        return LinearSolution(True, 1e9, x, multipliers, np.zeros(0), np.zeros(len(cost)))

    monkeypatch.setattr(leaf, "solve_lp", lie)
    for _ in range(300):
        problem = badly_scaled(random, 1, int(random.integers(1, 8)))
        found = least_violation(*problem)
        assert found.violation <= exact_minimum_on_a_line(problem)
        assert problem[0] <= found.point <= problem[1]


@pytest.mark.parametrize("what", ["coefficients", "constants"])
def test_multipliers_that_cancel_are_evaluated_from_below(what: str) -> None:
    """Sums that nearly vanish, against the same sums in rational numbers."""
    random = np.random.default_rng(5)
    inexact = 0
    for _ in range(300):
        n, rows = int(random.integers(1, 5)), int(random.integers(2, 6))
        q = random.random(rows)
        A, b = random.standard_normal((rows, n)) * 1e6, random.standard_normal(rows) * 1e6
        A, b = (A, 0 * b) if what == "coefficients" else (0 * A, b)
        A[-1], b[-1] = -(q[:-1] @ A[:-1]) / q[-1], -(q[:-1] @ b[:-1]) / q[-1]
        lower = random.choice([-1.0, 1.0], n) * 1e3
        upper, scale = lower + random.random(n), random.random(rows)
        found = leaf._Functions(lower, upper, A, b, scale, np.zeros(rows)).bound(q)
        weights = [Fraction(value) for value in q.tolist()]
        total = sum((w * Fraction(c) for w, c in zip(weights, b.tolist(), strict=True)), Fraction(0))
        for column, low, high in zip(A.T.tolist(), lower.tolist(), upper.tolist(), strict=True):
            w = sum((q * Fraction(a) for q, a in zip(weights, column, strict=True)), Fraction(0))
            total += min(w * Fraction(low), w * Fraction(high))
        pairs = zip(weights, scale.tolist(), strict=True)
        exact = total / sum((w * Fraction(unit) for w, unit in pairs), Fraction(0))
        assert found <= exact
        inexact += float(exact) - found < 1e-3
    assert inexact == 300  # the allowance is not huge either


def test_without_time_single_functions_still_count() -> None:
    A, b = np.array([[-1.0], [1.0]]), np.array([0.6, -0.4])
    late = least_violation(np.zeros(1), np.ones(1), A, b, np.ones(2), time_limit=0)
    assert not late.solved
    assert late.violation == pytest.approx(-0.4, abs=1e-9)
    proof = least_violation(np.zeros(1), np.ones(1), A, b + 1, np.ones(2), time_limit=0)
    assert proof.refuted


def test_rounding_of_the_terms_is_allowed_for() -> None:
    """The sum of 1e16, 1 and -1e16 is 0 or 1 by the order of summation: the bound must not claim 1e-6."""
    A = np.array([[1e16, 1.0, -1e16]])
    found: Leaf = least_violation(np.ones(3), np.ones(3), A, np.array([-1.0]), np.ones(1))
    assert not found.refuted
    assert found.violation <= 0
