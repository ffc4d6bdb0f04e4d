"""A slow second reading of VNN-LIB 1.0, straight from the definition, for comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from abcrown_dist.spec.property import Property


def forms(text: str) -> list[Any]:
    """The text as nested lists of words."""
    words = " ".join(line.split(";")[0] for line in text.splitlines())
    return list(_lists(iter(words.replace("(", " ( ").replace(")", " ) ").split())))


def _lists(words: Iterator[str]) -> Iterator[Any]:
    for word in words:
        if word == ")":
            return
        yield list(_lists(words)) if word == "(" else word


def holds(form: Any, values: Mapping[str, Fraction]) -> bool:
    """Truth of a formula at a point."""
    operator, *operands = form
    if operator == "and":
        return all(holds(item, values) for item in operands)
    if operator == "or":
        return any(holds(item, values) for item in operands)
    left, right = (term(item, values) for item in operands)
    return {
        "<=": left <= right,
        ">=": left >= right,
        "<": left < right,
        ">": left > right,
        "=": left == right,
    }[operator]


def term(form: Any, values: Mapping[str, Fraction]) -> Fraction:
    """Value of a term at a point."""
    if isinstance(form, str):
        return values[form] if form in values else Fraction(form)
    operator, *operands = form
    numbers = [term(item, values) for item in operands]
    if operator == "-" and len(numbers) == 1:
        return -numbers[0]
    result = numbers[0]
    for number in numbers[1:]:
        if operator == "+":
            result += number
        elif operator == "-":
            result -= number
        elif operator == "*":
            result *= number
        else:
            result /= number
    return result


def text_holds(text: str, values: Mapping[str, Fraction]) -> bool:
    """Whether a point fulfils all assertions of a text."""
    return all(holds(form[1], values) for form in forms(text) if form[0] == "assert")


def property_holds(prop: Property, values: Mapping[str, Fraction]) -> bool:
    """Whether a point fulfils some disjunct of a property, by its box and its terms as written."""
    inputs = [values[f"X_{i}"] for i in range(prop.num_inputs)]
    for disjunct in prop.disjuncts:
        box = zip(disjunct.box.lower, inputs, disjunct.box.upper, strict=True)
        if not all(Fraction(low) <= value <= Fraction(high) for low, value, high in box):
            continue
        assert disjunct.strict is not None
        sides = [
            (sum(Fraction(c) * values[name] for name, c in coefficients.items()), rhs, strict)
            for (coefficients, rhs), strict in zip(disjunct.terms, disjunct.strict, strict=True)
        ]
        held = [total < rhs if strict else total <= rhs for total, rhs, strict in sides]
        paths = [()] * len(held) if disjunct.groups is None else disjunct.groups[::-1].T.tolist()
        if _all_hold([(path, row, value) for row, (path, value) in enumerate(zip(paths, held, strict=True))]):
            return True
    return False


def _all_hold(rows: Sequence[tuple[Sequence[int], int, bool]]) -> bool:
    """Whether a conjunction holds: rows with their paths from the outside in (factor, alternative, ...)."""
    factors: dict[int, dict[int, list[tuple[Sequence[int], int, bool]]]] = {}
    for path, row, value in rows:
        if not path:
            if not value:
                return False
            continue
        factor, alternative, *rest = path
        factors.setdefault(factor, {}).setdefault(alternative, []).append((rest, row, value))
    return all(any(_all_hold(part) for part in factor.values()) for factor in factors.values())
