"""Certified bounds of linear programmes: valid for any multipliers, in rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import sparse

from abcrown_dist.exact import program as program_module
from abcrown_dist.exact.expression import Expression, combine
from abcrown_dist.exact.program import Program, ProgramBuilder, certify, linear_minimum

Array = np.ndarray


def random_program(random: np.random.Generator, size: float = 1.0) -> tuple[Program, Array, Array]:
    """A programme, a point that fulfils it exactly in rational arithmetic, and a cost."""
    n, rows, links = 6, 5, 2
    v = random.integers(0, 5, n) / 4.0
    A = random.integers(-9, 10, (rows, n)) * size
    A_equal = random.integers(-9, 10, (links, n)) * size
    b = A @ v + random.integers(0, 3, rows) * size / 4
    programme = Program(
        sparse.csr_array(A), b, sparse.csr_array(A_equal), A_equal @ v, np.zeros(n, bool), ()
    )
    return programme, v, random.standard_normal(n) * size


def exactly(cost: Array, v: Array) -> Fraction:
    pairs = zip(cost.tolist(), v.tolist(), strict=True)
    return sum((Fraction(c) * Fraction(x) for c, x in pairs), Fraction(0))


@pytest.mark.parametrize("size", [2.0**-20, 1.0, 2.0**20])
def test_no_multipliers_prove_too_much(size: float) -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        programme, v, cost = random_program(random, size)
        below = random.standard_normal(5) * 10.0 ** random.integers(-3, 9)
        equal = random.standard_normal(2) * 10.0 ** random.integers(-3, 9)
        assert certify(programme, cost, below, equal) <= exactly(cost, v)


def test_a_tight_certificate_stays_below_in_the_last_digit() -> None:
    """Multipliers that cancel the cost: bound and minimum agree but for rounding, which must not help."""
    random = np.random.default_rng(1)
    for _ in range(300):
        v = random.random(4)
        row = random.standard_normal(4)
        b = float(row @ v)
        below = abs(float(random.standard_normal())) * 10.0 ** random.integers(-3, 6)
        equality = random.random() < 0.5
        empty, none = sparse.csr_array((0, 4)), np.zeros(0)
        rows = sparse.csr_array(row[None]), np.array([b])
        first, second = (rows, (empty, none)) if not equality else ((empty, none), rows)
        programme = Program(*first, *second, np.zeros(4, bool), ())
        cost = -below * row
        p, q = (none, np.array([below])) if equality else (np.array([below]), none)
        # All points of the hyperplane row v = b have the exact cost -below * b, but for cost's rounding.
        exact = -Fraction(below) * Fraction(b)
        pairs = zip(cost.tolist(), row.tolist(), strict=True)
        gap = sum(abs(Fraction(c) + Fraction(below) * Fraction(w)) for c, w in pairs)
        assert certify(programme, cost, p, q) <= exact + gap


@pytest.mark.parametrize("what", ["coefficients", "constants"])
def test_multipliers_that_cancel_are_evaluated_from_below(what: str) -> None:
    """Rows whose combination nearly vanishes, against the same combination in rational numbers."""
    random = np.random.default_rng(6)
    for _ in range(200):
        n, rows, links = 3, 4, 2
        A, b = random.standard_normal((rows, n)) * 1e6, random.standard_normal(rows) * 1e6
        p, q = random.random(rows), random.standard_normal(links)
        A_equal, b_equal = random.standard_normal((links, n)) * 1e6, random.standard_normal(links) * 1e6
        keep_A, keep_b = (1, 0) if what == "coefficients" else (0, 1)
        A, A_equal, b, b_equal = A * keep_A, A_equal * keep_A, b * keep_b, b_equal * keep_b
        A_equal[-1] = -(p @ A + q[:-1] @ A_equal[:-1]) / q[-1]
        b_equal[-1] = -(p @ b + q[:-1] @ b_equal[:-1]) / q[-1]
        cost = random.standard_normal(n) * 1e-9
        programme = Program(
            sparse.csr_array(A), b, sparse.csr_array(A_equal), b_equal, np.zeros(n, bool), ()
        )
        multipliers = np.concatenate([p, q])
        total = -exactly(multipliers, np.concatenate([b, b_equal]))
        for column, c in zip(np.vstack([A, A_equal]).T, cost.tolist(), strict=True):
            total += min(Fraction(0), Fraction(c) + exactly(multipliers, column))
        assert certify(programme, cost, p, q) <= total


def test_a_negative_multiplier_of_an_inequality_counts_as_none() -> None:
    """-v <= 10 with multiplier -1 would prove that the cost -v is at least 10 everywhere."""
    rows = sparse.csr_array(np.array([[-1.0]])), np.array([10.0])
    none = sparse.csr_array((0, 1)), np.zeros(0)
    programme = Program(*rows, *none, np.zeros(1, bool), ())
    assert certify(programme, np.array([-1.0]), np.array([-1.0]), np.zeros(0)) <= -1.0


def test_minima_are_found_and_certified() -> None:
    random = np.random.default_rng(2)
    for _ in range(100):
        programme, v, cost = random_program(random)
        found = linear_minimum(programme, cost)
        assert found.solution is not None and found.solution.optimal
        assert found.value <= exactly(cost, v)
        assert found.value == pytest.approx(found.solution.value, abs=1e-6)
        assert found.value <= found.solution.value + 1e-7


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_multipliers_that_are_not_finite_prove_nothing(bad: float) -> None:
    programme, _, cost = random_program(np.random.default_rng(3))
    assert certify(programme, cost, np.full(5, bad), np.zeros(2)) == -math.inf
    assert certify(programme, cost, np.zeros(5), np.full(2, bad)) == -math.inf


def test_no_solution_is_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    programme, _, cost = random_program(np.random.default_rng(4))
    monkeypatch.setattr(program_module, "solve_lp", lambda *_, **__: None)
    assert linear_minimum(programme, cost).value == -math.inf


def test_dropped_coefficients_relax_rows() -> None:
    """-1e-10 v + w <= 0 with v up to 1 allows w = 1e-10: without its first entry the row must too."""
    builder = ProgramBuilder()
    builder.variables(2)
    rows = sparse.csr_array(np.array([[-1e-10, 1.0]]))
    builder.at_most("lower", "", np.arange(1), np.ones(1, int), rows, np.zeros(1))
    programme = builder.build()
    assert programme.A.toarray().tolist() == [[0.0, 1.0]]
    assert (programme.A @ np.array([1.0, 1e-10]) <= programme.b).all()
    link = sparse.csr_array(np.array([[3e-10, -1.0]]))
    off = builder.link("", np.arange(1), np.ones(1, int), link, np.zeros(1))
    assert off[0] >= 3e-10


def test_expressions_allow_for_rounding() -> None:
    """Sums of large terms that cancel: the exact value lies in the interval, which float64 alone misses."""
    random = np.random.default_rng(5)
    missed = 0
    for _ in range(200):
        E = sparse.csr_array(random.standard_normal((3, 4)) * 1e8)
        inner = Expression(E, random.standard_normal(3) * 1e8, np.zeros(3))
        W = random.standard_normal((1, 3)) * 1e8
        outer = combine([sparse.csr_array(W)], np.zeros(1), [inner])
        v = random.random(4)
        exact = Fraction(0)
        for w, row, constant in zip(W[0].tolist(), E.toarray().tolist(), inner.offset.tolist(), strict=True):
            exact += Fraction(w) * (exactly(np.array(row), v) + Fraction(constant))
        fixed = Expression(
            sparse.csr_array((1, 0)),
            outer.value(v),
            outer.error + 1e-15 * (abs(outer.E) @ v + np.abs(outer.offset)),
        )
        low, high = fixed.interval()
        assert Fraction(float(low[0])) <= exact <= Fraction(float(high[0]))
        missed += Fraction(float(outer.value(v)[0])) != exact
    assert missed > 100
