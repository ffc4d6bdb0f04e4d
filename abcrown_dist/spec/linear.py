"""Exact linear arithmetic over named variables, and the comparisons made of it.

All arithmetic is decimal and traps rounding. Division keeps its divisor as a denominator, with
which a comparison is multiplied in the end: `(<= X_0 (/ Y_0 3))` becomes `3 X_0 - Y_0 <= 0`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal, Inexact, InvalidOperation
from typing import NamedTuple

ONE = Decimal(1)
ZERO = Decimal(0)
_LARGEST = Decimal(sys.float_info.max)
_SMALLEST_EXPONENT = -1000  # float64 ends at -324; far smaller numbers only cost time
_EXACT = Context(prec=4000, traps=[Inexact])  # four numbers of the whole range multiplied fit
_BOUND_DIGITS = 50  # of an input's bound that is no finite decimal, rounded outward


class NotLinear(ValueError):
    """A term or comparison that is not linear arithmetic; the message says why."""


class Bound(NamedTuple):
    """`variable <= value`, or `variable >= value` when not `upper`; strict for `<` and `>`."""

    variable: str
    upper: bool
    value: Decimal
    strict: bool


class Row(NamedTuple):
    """`sum of coefficients * variables <= rhs`; strict for `<`."""

    coefficients: dict[str, Decimal]
    rhs: Decimal
    strict: bool


Literal = Bound | Row


class Linear(NamedTuple):
    """`(sum of coefficients * variables + constant) / denominator`, the denominator positive."""

    coefficients: Mapping[str, Decimal]
    constant: Decimal
    denominator: Decimal = ONE


def is_input(variable: str) -> bool:
    """Whether the variable is an input, X_i, rather than an output, Y_i."""
    return variable[0] == "X"


def number(token: str) -> Decimal:
    """The decimal that `token` writes, exactly.

    Raises:
        NotLinear: it is no number, or one beyond float64's range.
    """
    try:
        value = Decimal(token)
    except InvalidOperation:
        raise NotLinear(f"'{token}' is neither a declared variable nor a number") from None
    if not value.is_finite() or "_" in token:
        raise NotLinear(f"'{token}' is not a finite number")
    if value.copy_abs() > _LARGEST or (value and value.adjusted() < _SMALLEST_EXPONENT):
        raise NotLinear(f"the number '{token}' is outside the range of float64")
    return value


def _scaled(term: Linear, factor: Decimal) -> Linear:
    """The term times a constant."""
    multiply = _EXACT.multiply
    coefficients = {name: multiply(factor, value) for name, value in term.coefficients.items() if factor}
    return Linear(coefficients, multiply(factor, term.constant), term.denominator)


def _negated(term: Linear) -> Linear:
    coefficients = {name: value.copy_negate() for name, value in term.coefficients.items()}
    return Linear(coefficients, term.constant.copy_negate(), term.denominator)


def _over(term: Linear, denominator: Decimal) -> Linear:
    """The term divided by a constant other than 0."""
    if denominator < 0:
        return _over(_negated(term), denominator.copy_negate())
    return term._replace(denominator=_EXACT.multiply(term.denominator, denominator))


def _add(terms: Sequence[Linear]) -> Linear:
    total, *others = terms
    coefficients, constant, denominator = dict(total.coefficients), total.constant, total.denominator
    for position, term in enumerate(others, start=1):
        if term.denominator != denominator:
            whole = Linear(coefficients, constant, denominator)
            return _add([_expanded(whole, term), _expanded(term, whole), *others[position:]])
        constant = _EXACT.add(constant, term.constant)
        for name, value in term.coefficients.items():
            known = coefficients.get(name)
            coefficients[name] = value if known is None else _EXACT.add(known, value)
    return Linear({name: value for name, value in coefficients.items() if value}, constant, denominator)


def _expanded(term: Linear, other: Linear) -> Linear:
    """The term with its denominator multiplied by the other's."""
    return _over(_scaled(term, other.denominator), other.denominator)


def _subtract(terms: Sequence[Linear]) -> Linear:
    first, *others = terms
    return _add([first, *map(_negated, others)]) if others else _negated(first)


def _multiply(terms: Sequence[Linear]) -> Linear:
    product = terms[0]
    for term in terms[1:]:
        if term.coefficients and product.coefficients:
            raise NotLinear("product of two expressions that both contain variables: not linear")
        varying, fixed = (term, product) if term.coefficients else (product, term)
        product = _over(_scaled(varying, fixed.constant), fixed.denominator)
    return product


def _divide(terms: Sequence[Linear]) -> Linear:
    if len(terms) < 2:
        raise NotLinear("'/' needs at least two operands, found 1")
    quotient = terms[0]
    for divisor in terms[1:]:
        if divisor.coefficients:
            raise NotLinear("division by an expression that contains variables: not linear")
        if not divisor.constant:
            raise NotLinear("division by zero")
        quotient = _over(_scaled(quotient, divisor.denominator), divisor.constant)
    return quotient


_OPERATIONS = {"+": _add, "-": _subtract, "*": _multiply, "/": _divide}
ARITHMETIC = frozenset(_OPERATIONS)


def calculate(operator: str, terms: Sequence[Linear]) -> Linear:
    """Value of `(operator terms...)` for an operator of `ARITHMETIC` and at least one term.

    Raises:
        NotLinear: the result is not linear, or its constants need thousands of digits.
    """
    try:
        return _OPERATIONS[operator](terms)
    except Inexact:
        raise NotLinear("the constants combine to a number with thousands of digits") from None


def _in_range(value: Decimal) -> Decimal:
    if value.copy_abs() > _LARGEST:
        raise NotLinear("the constants combine to a number outside the range of float64")
    return value


def _single(row: Row) -> list[Literal]:
    """A constraint on one variable.

    A bound; where no decimal equals it, the row, and for an input a slightly wider bound too,
    which keeps its box finite.
    """
    ((name, coefficient),) = row.coefficients.items()
    upper = coefficient > 0
    try:
        return [Bound(name, upper, _in_range(_EXACT.divide(row.rhs, coefficient)), row.strict)]
    except Inexact:
        if not is_input(name):
            return [row]
    outward = Context(prec=_BOUND_DIGITS, rounding=ROUND_CEILING if upper else ROUND_FLOOR)
    return [Bound(name, upper, _in_range(outward.divide(row.rhs, coefficient)), False), row]


def at_most(low: Linear, high: Linear, strict: bool) -> list[Literal] | bool:
    """The constraint `low <= high` (`<` when strict) as a conjunction, or its truth if it has no variable.

    Raises:
        NotLinear: its constants combine to a number of thousands of digits or beyond float64's range.
    """
    form = calculate("-", [low, high])
    if not form.coefficients:
        return form.constant < 0 if strict else form.constant <= 0
    coefficients = {name: _in_range(value) for name, value in form.coefficients.items()}
    row = Row(coefficients, _in_range(form.constant.copy_negate()), strict)
    return _single(row) if len(coefficients) == 1 else [row]
