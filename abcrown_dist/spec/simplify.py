"""Smaller conjunctions of the same meaning, before a property is written out as disjuncts.

All comparisons are of decimals as written; a comparison of two literals knows them by their coefficients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType

from abcrown_dist.spec.dnf import Clause, Factor
from abcrown_dist.spec.linear import Bound, Literal, Row, is_input

_MOST = 200_000  # literals: a larger property is a list of boxes, which are compared with one another in vain
_MOST_PAIRS = 500  # of clauses or factors compared each with each

_Form = frozenset[tuple[str, Decimal]]


class _Known:
    """The tightest right-hand side known for every form."""

    def __init__(self, tightest: Mapping[_Form, tuple[Fraction, bool]] = MappingProxyType({})) -> None:
        self.tightest = dict(tightest)

    def add(self, literal: Literal) -> None:
        """Take what the literal says for granted."""
        form, rhs, strict = _parts(literal)
        known = self.tightest.get(form)
        if known is None or (rhs, not strict) < (known[0], not known[1]):
            self.tightest[form] = rhs, strict

    def implies(self, literal: Literal) -> bool:
        """Whether the literal says nothing new."""
        form, rhs, strict = _parts(literal)
        known = self.tightest.get(form)
        return known is not None and (known[0], not known[1]) <= (rhs, not strict)

    def contradicts(self, literal: Literal) -> bool:
        """Whether no values fulfil the literal as well."""
        form, rhs, strict = _parts(literal)
        other = self.tightest.get(frozenset((name, value.copy_negate()) for name, value in form))
        return other is not None and (rhs + other[0] < 0 or (rhs + other[0] == 0 and (strict or other[1])))


def _parts(literal: Literal) -> tuple[_Form, Fraction, bool]:
    if isinstance(literal, Row):
        return frozenset(literal.coefficients.items()), Fraction(literal.rhs), literal.strict
    sign = 1 if literal.upper else -1
    return frozenset([(literal.variable, Decimal(sign))]), sign * Fraction(literal.value), literal.strict


def _bounds_input(literal: Literal) -> bool:
    """Bounds on inputs make boxes, which say themselves when they are empty."""
    return isinstance(literal, Bound) and is_input(literal.variable)


def simplify(clause: Clause) -> Clause | None:
    """The same conjunction without what others imply; None where literals on outputs contradict each other.

    Literals that follow from others are dropped, disjunctions that follow from a literal or from another
    disjunction as well, and so are alternatives that are part of another or contradict a literal. What is
    left of a disjunction of one alternative joins the literals.
    """
    return clause if clause.size > _MOST else _simplified(clause, _Known())


def _simplified(clause: Clause, outer: _Known) -> Clause | None:
    literals, factors = list(clause.literals), list(clause.factors)
    while True:
        known = _learnt(literals, outer)
        if known is None:
            return None
        kept = _needed(literals, known, outer)
        remaining = [item for item in (_smaller(factor, known) for factor in factors) if item is not None]
        if any(not factor.alternatives for factor in remaining):
            return None
        single = [factor.alternatives[0] for factor in remaining if len(factor.alternatives) == 1]
        factors = [factor for factor in remaining if len(factor.alternatives) > 1]
        if not single:
            return Clause(kept, tuple(_weakest_factors(factors)))
        literals = kept + [literal for item in single for literal in item.literals]
        factors += [inner for item in single for inner in item.factors]


def _learnt(literals: Iterable[Literal], outer: _Known) -> _Known | None:
    """What is known of outputs with these literals as well; None where they contradict each other."""
    known = _Known(outer.tightest)
    for literal in literals:
        if not _bounds_input(literal):
            if known.contradicts(literal):
                return None
            known.add(literal)
    return known


def _needed(literals: Iterable[Literal], known: _Known, outer: _Known) -> list[Literal]:
    """The literals that give `known` what `outer` does not say, in order, and all bounds on inputs."""
    kept: list[Literal] = []
    seen: set[_Form] = set()
    for literal in literals:
        form, rhs, strict = _parts(literal)
        if not _bounds_input(literal):
            if form in seen or outer.implies(literal) or known.tightest[form] != (rhs, strict):
                continue
            seen.add(form)
        kept.append(literal)
    return kept


def _smaller(factor: Factor, known: _Known) -> Factor | None:
    """What is left of a disjunction; None if it holds anyway."""
    found: list[Clause] = []
    for item in factor.alternatives:
        rest = _simplified(item, known)
        if rest is None:
            continue
        if not rest.literals and not rest.factors:
            return None
        found.append(rest)
    return Factor.of(_weakest(found))


def _weakest(alternatives: Sequence[Clause]) -> Iterable[Clause]:
    """Alternatives that are not part of another, in order."""
    keys = [(_key(item), index) for index, item in enumerate(alternatives)]
    kept: dict[frozenset[object], int] = {}
    for key, index in sorted(keys, key=lambda pair: len(pair[0])):
        few = len(alternatives) <= _MOST_PAIRS
        if key in kept or (few and any(other <= key for other in kept)):
            continue
        kept[key] = index
    return [alternatives[index] for index in sorted(kept.values())]


def _weakest_factors(factors: Sequence[Factor]) -> list[Factor]:
    """Disjunctions that do not follow from another one, whose alternatives are all among theirs."""
    keys = [frozenset(_key(item) for item in factor.alternatives) for factor in factors]
    order = sorted(range(len(factors)), key=lambda index: len(keys[index]))
    kept: list[int] = []
    for index in order:
        among = kept if len(factors) <= _MOST_PAIRS else ()
        if not any(keys[other] <= keys[index] for other in among):
            kept.append(index)
    return [factors[index] for index in sorted(kept)]


def _key(item: Clause) -> frozenset[object]:
    inner = [frozenset(_key(each) for each in factor.alternatives) for factor in item.factors]
    return frozenset([*map(_parts, item.literals), *inner])
