"""Nested and/or as conjunctions of factors, bottom-up and without recursion.

A formula is a literal (anything that is not one of the following), an `All` or a `Some`. A parser that
closes the innermost parenthesis first calls `conjoin` and `disjoin` on finished operands. Junctions of one
kind nest without being copied, and are flattened once, when the other kind (or `clause`) takes them: chains
of any depth cost linear time and no stack.

A conjunction of disjunctions is not multiplied out here unless that makes it hardly longer: its disjunctive
normal form doubles with every `or` of two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

MAX_LITERALS = 20_000_000
MAX_DEPTH = 16
_FEW = 64  # conjunctions: as many are written out rather than kept as a product


class TooManyClauses(ValueError):
    """A formula that grows beyond `MAX_LITERALS`, or nests "or" in "and" in "or" beyond `MAX_DEPTH`."""


class All(tuple[Any, ...]):
    """Conjunction of literals, `Factor`s, `Clause`s and further `All`s. Empty: true."""


class Some(tuple[Any, ...]):
    """Disjunction of literals, `Clause`s, `Factor`s and further `Some`s. Empty: false."""


@dataclass(frozen=True)
class Clause:
    """A conjunction of literals and of disjunctions."""

    literals: list[Any]
    factors: tuple[Factor, ...] = ()

    @property
    def depth(self) -> int:
        """How often "or" stands in "and"."""
        return max((factor.depth for factor in self.factors), default=0)

    @property
    def size(self) -> int:
        """Number of literals."""
        return len(self.literals) + sum(factor.size for factor in self.factors)

    @property
    def false(self) -> bool:
        """Whether one of the disjunctions has no alternatives."""
        return any(not factor.alternatives for factor in self.factors)


@dataclass(frozen=True)
class Factor:
    """A disjunction.

    Attributes:
        alternatives: none of them false.
        size: number of literals.
        depth: 1 where no alternative holds a disjunction, else greater.

    Raises:
        TooManyClauses: see there.
    """

    alternatives: tuple[Clause, ...]
    size: int = 0
    depth: int = 1

    @classmethod
    def of(cls, alternatives: Iterable[Clause]) -> Factor:
        """The disjunction of clauses."""
        found = tuple(item for item in alternatives if not item.false)
        size = sum(item.size for item in found)
        depth = 1 + max((item.depth for item in found), default=0)
        if size > MAX_LITERALS:
            raise TooManyClauses(f"the property expands to {size} comparisons; the limit is {MAX_LITERALS}")
        if depth > MAX_DEPTH:
            raise TooManyClauses(f"'and' and 'or' are nested more than {MAX_DEPTH} times")
        return cls(found, size, depth)


def conjoin(operands: Iterable[Any]) -> All:
    """The formula `(and operands...)`.

    Raises:
        TooManyClauses: see there.
    """
    return All(factor(item) if isinstance(item, Some) else item for item in operands)


def disjoin(operands: Iterable[Any]) -> Some:
    """The formula `(or operands...)`."""
    return Some(clause(item) if isinstance(item, All) else item for item in operands)


def _leaves(junction: All | Some) -> Iterator[Any]:
    """Operands of a junction and of the junctions of its own kind within it, in order."""
    kind = type(junction)
    pending = [iter(junction)]
    while pending:
        for item in pending[-1]:
            if isinstance(item, kind):
                pending.append(iter(item))
                break
            yield item
        else:
            pending.pop()


def clause(formula: All) -> Clause:
    """A conjunction as literals and the disjunctions beside them, none of one alternative, none true."""
    literals: list[Any] = []
    factors: list[Factor] = []
    for leaf in _leaves(formula):
        if not isinstance(leaf, Factor):
            literals.append(leaf)
        elif len(leaf.alternatives) == 1:
            literals.extend(leaf.alternatives[0].literals)
            factors.extend(leaf.alternatives[0].factors)
        elif not any(_true(item) for item in leaf.alternatives):
            factors.append(leaf)
    return Clause(literals, tuple(factors))


def _true(item: Clause) -> bool:
    return not item.literals and not item.factors


def factor(formula: Some) -> Factor:
    """A disjunction as clauses.

    Raises:
        TooManyClauses: see there.
    """
    found: list[Clause] = []
    for leaf in _leaves(formula):
        found.extend(_written_out(leaf) if isinstance(leaf, Clause) else [Clause([leaf])])
    return Factor.of(found)


def _written_out(item: Clause) -> Iterable[Clause]:
    """Clauses whose disjunction is the clause: itself, or its product where that is short."""
    count = math.prod(len(each.alternatives) for each in item.factors)
    if not item.factors or (len(item.factors) > 1 and count > _FEW):
        return [item]
    if count * len(item.literals) > MAX_LITERALS:
        raise TooManyClauses(f"the property expands to {count} conjunctions of {len(item.literals)}")
    return product(item.literals, item.factors)


def product(literals: Sequence[Any], factors: Sequence[Factor]) -> Iterator[Clause]:
    """The clauses of a conjunction of literals and `factors`, multiplied out."""
    for choice in itertools.product(*(item.alternatives for item in factors)):
        parts = [part for item in choice for part in item.literals]
        yield Clause([*literals, *parts], tuple(inner for item in choice for inner in item.factors))
