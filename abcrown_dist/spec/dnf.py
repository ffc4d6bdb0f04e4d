"""Disjunctive normal form of nested and/or, bottom-up and without recursion.

A formula is a literal (anything that is not one of the following), an `All`, a `Some`, or a `Dnf`.
A parser that closes the innermost parenthesis first calls `conjoin` and `disjoin` on finished
operands. Junctions of one kind nest without being copied, and are flattened once, when the other
kind (or `clauses`) takes them: chains of any depth cost linear time and no stack.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

MAX_CLAUSES = 2_000_000


class TooManyClauses(ValueError):
    """The disjunctive normal form has more than `MAX_CLAUSES` conjunctions."""


class Dnf(list[list[Any]]):
    """A disjunction of conjunctions of literals."""


class All(tuple[Any, ...]):
    """Conjunction of literals, `Dnf`s and further `All`s. Empty: true."""


class Some(tuple[Any, ...]):
    """Disjunction of literals, `Dnf`s and further `Some`s. Empty: false."""


def conjoin(operands: Iterable[Any]) -> All:
    """The formula `(and operands...)`."""
    return All(_alternatives(item) if isinstance(item, Some) else item for item in operands)


def disjoin(operands: Iterable[Any]) -> Some:
    """The formula `(or operands...)`.

    Raises:
        TooManyClauses: see `clauses`.
    """
    return Some(clauses(item) if isinstance(item, All) else item for item in operands)


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


def _alternatives(formula: Some) -> Dnf:
    result = Dnf()
    for leaf in _leaves(formula):
        if isinstance(leaf, Dnf):
            result.extend(leaf)
        else:
            result.append([leaf])
    return result


def factor(formula: All) -> tuple[list[Any], list[Dnf]]:
    """Literals that every clause of the conjunction contains, and the disjunctions left beside them."""
    common: list[Any] = []
    factors: list[Dnf] = []
    for leaf in _leaves(formula):
        if not isinstance(leaf, Dnf):
            common.append(leaf)
        elif len(leaf) == 1:
            common.extend(leaf[0])
        else:
            factors.append(leaf)
    return common, factors


def product(factors: Sequence[Dnf]) -> Iterator[list[Any]]:
    """Clauses of the conjunction of `factors`.

    Raises:
        TooManyClauses: at once, before the first one.
    """
    count = math.prod(len(disjunction) for disjunction in factors)
    if count > MAX_CLAUSES:
        raise TooManyClauses(f"the property expands to {count} disjuncts; the limit is {MAX_CLAUSES}")
    return (list(itertools.chain.from_iterable(choice)) for choice in itertools.product(*factors))


def clauses(formula: All) -> Dnf:
    """Disjunctive normal form of a conjunction.

    Raises:
        TooManyClauses: it is too long.
    """
    common, factors = factor(formula)
    return Dnf([*common, *clause] for clause in product(factors))
