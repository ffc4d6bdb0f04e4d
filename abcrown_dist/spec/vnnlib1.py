"""VNN-LIB 1.0: text to `Property`.

The language as the competitions of all years use it: `declare-const`, and `assert`s of nested
`and`/`or` over comparisons of linear terms in the variables X_i and Y_i. Lists are evaluated as
they close, innermost first, so nothing recurses and no syntax tree of the file ever exists.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from abcrown_dist.spec.assemble import assemble
from abcrown_dist.spec.dnf import All, Some, TooManyClauses, conjoin, disjoin
from abcrown_dist.spec.lexer import locate, tokens, without_comments
from abcrown_dist.spec.linear import (
    ARITHMETIC,
    ONE,
    ZERO,
    Bound,
    Linear,
    NotLinear,
    Row,
    at_most,
    calculate,
    number,
)
from abcrown_dist.spec.property import Property
from abcrown_dist.util.errors import LoadError

_VARIABLE = re.compile(r"[XY]_(0|[1-9][0-9]{0,8})")
_WITHOUT_MEANING = {"set-logic", "set-info", "set-option", "check-sat", "get-model", "exit"}
_GZIP_MAGIC = b"\x1f\x8b"


class _Malformed(Exception):
    """Something wrong with an element of the list that is being read (None: with all of it)."""

    def __init__(self, message: str, element: int | None = None) -> None:
        super().__init__(message)
        self.element = element


class _Reader:
    """State of one parse: what was declared and asserted so far.

    A list that is being read is a Python list of the index of its opening token, the operator,
    and the operands: words as text, inner lists as their values. A value is a `Linear`, or a
    formula in the sense of `dnf` with `Bound` and `Row` as literals.
    """

    def __init__(self) -> None:
        self.variables: dict[str, None] = {}
        self.assertions: list[Any] = []
        self._handlers: dict[str, Callable[[str, list[Any]], Any]] = {
            **dict.fromkeys(("<=", ">=", "<", ">"), self._compare),
            **dict.fromkeys(ARITHMETIC, self._calculate),
            "=": self._equal,
            "and": lambda _, frame: conjoin(self._formulas(frame)),
            "or": lambda _, frame: disjoin(self._formulas(frame)),
        }
        self._commands: dict[str, Callable[[list[Any]], None]] = {
            "declare-const": self._declare,
            "assert": self._assert,
        }

    def read(self, text: str, source: str) -> None:
        """Evaluate all commands of a comment-free text."""
        stack: list[list[Any]] = []
        frame: list[Any] = []  # the file itself, as if it were a list without parentheses
        opened = index = 0
        try:
            for index, token in enumerate(tokens(text)):
                if token == "(":
                    stack.append(frame)
                    frame = [index]
                elif token == ")":
                    opened = frame[0] if stack else index
                    value = self._close(frame, len(stack))
                    frame = stack.pop()
                    if stack:
                        frame.append(value)
                elif stack:
                    frame.append(token)
                else:
                    opened = index
                    raise _Malformed(f"'{token}' stands outside of any parentheses")
            if stack:
                opened = frame[0]
                raise _Malformed("this parenthesis is never closed")
        except (_Malformed, NotLinear, TooManyClauses) as error:
            line, column = locate(text, opened, getattr(error, "element", None))
            raise LoadError(f"{source}:{line}:{column}: {error}") from None

    def _close(self, frame: list[Any], depth: int) -> Any:
        """Value of a finished list at `depth` (1: a command)."""
        if depth == 0:
            raise _Malformed("this parenthesis closes nothing")
        if len(frame) < 2:
            raise _Malformed("empty parentheses: an operator is missing")
        operator = frame[1]
        if not isinstance(operator, str):
            raise _Malformed("an operator is missing: a parenthesis follows a parenthesis")
        if depth == 1:
            return self._command(operator, frame)
        handler = self._handlers.get(operator)
        if handler is None:
            raise _Malformed(_unexpected(operator), 0)
        return handler(operator, frame)

    # Commands

    def _command(self, operator: str, frame: list[Any]) -> None:
        command = self._commands.get(operator)
        if command is not None:
            command(frame)
        elif operator not in _WITHOUT_MEANING:
            raise _Malformed(f"unknown command '{operator}': expected declare-const or assert", 0)

    def _declare(self, frame: list[Any]) -> None:
        if len(frame) != 4 or not isinstance(frame[2], str) or frame[3] != "Real":
            raise _Malformed("expected (declare-const NAME Real)")
        name = frame[2]
        if not _VARIABLE.fullmatch(name):
            raise _Malformed(f"the variable '{name}' is neither an input X_i nor an output Y_i", 1)
        if name in self.variables:
            raise _Malformed(f"the variable '{name}' is declared twice", 1)
        self.variables[name] = None

    def _assert(self, frame: list[Any]) -> None:
        if len(frame) != 3:
            raise _Malformed(f"'assert' takes one formula, found {len(frame) - 2}")
        self.assertions.extend(self._formulas(frame))

    # Operands

    def _formulas(self, frame: list[Any]) -> list[Any]:
        operands = frame[2:]
        for element, value in enumerate(operands, start=1):
            if isinstance(value, (Linear, str)):
                if value not in ("true", "false"):
                    raise _Malformed(f"operand of '{frame[1]}' is not a comparison, 'and' or 'or'", element)
                operands[element - 1] = _truth(value == "true")
        return operands

    def _terms(self, frame: list[Any]) -> list[Linear]:
        return [self._term(value, element) for element, value in enumerate(frame[2:], start=1)]

    def _term(self, value: Any, element: int) -> Linear:
        if isinstance(value, Linear):
            return value
        if type(value) is not str:
            raise _Malformed("a formula where a number, a variable or arithmetic is expected", element)
        if value in self.variables:
            return Linear({value: ONE}, ZERO)
        if _VARIABLE.fullmatch(value):
            raise _Malformed(f"the variable '{value}' is not declared", element)
        try:
            return Linear({}, number(value))
        except NotLinear as error:
            raise _Malformed(str(error), element) from None

    # Operators

    def _calculate(self, operator: str, frame: list[Any]) -> Linear:
        if len(frame) < 3:
            raise _Malformed(f"'{operator}' needs operands, found none")
        return calculate(operator, self._terms(frame))

    def _compare(self, operator: str, frame: list[Any]) -> Any:
        strict = operator in ("<", ">")
        if len(frame) == 4:
            low, high = (frame[2], frame[3]) if operator[0] == "<" else (frame[3], frame[2])
            plain = self._compare_plain(low, high, strict)
            if plain is not None:
                return plain
        terms = self._two_or_more(operator, frame)
        if operator[0] == ">":
            terms.reverse()
        return conjoin(_formula(at_most(low, high, strict)) for low, high in pairwise(terms))

    def _compare_plain(self, low: Any, high: Any, strict: bool) -> Bound | Row | None:
        """`low <= high` where both are words and at least one is a variable: nearly all of any file.

        The result is what `at_most` makes of the same operands, at a fifth of the time.
        """
        if type(low) is not str or type(high) is not str:
            return None
        try:
            if low not in self.variables:
                return Bound(high, False, number(low), strict) if high in self.variables else None
            if high not in self.variables:
                return Bound(low, True, number(high), strict)
        except NotLinear:
            return None  # `_term` says what is wrong, and where
        return Row({low: ONE, high: -ONE}, ZERO, strict) if low != high else None

    def _equal(self, operator: str, frame: list[Any]) -> All:
        terms = self._two_or_more(operator, frame)
        pairs = (pair for a, b in pairwise(terms) for pair in ((a, b), (b, a)))
        return conjoin(_formula(at_most(low, high, False)) for low, high in pairs)

    def _two_or_more(self, operator: str, frame: list[Any]) -> list[Linear]:
        if len(frame) < 4:
            raise _Malformed(f"'{operator}' needs two operands, found {len(frame) - 2}")
        return self._terms(frame)


def _truth(value: bool) -> All | Some:
    return conjoin([]) if value else disjoin([])


def _formula(result: list[Bound | Row] | bool) -> All | Some:
    return _truth(result) if isinstance(result, bool) else conjoin(result)


def _unexpected(operator: str) -> str:
    if operator in ("assert", "declare-const"):
        return f"'{operator}' inside another list: is a ')' missing before it?"
    return f"unknown operator '{operator}'"


def parse_vnnlib(text: str, source: str = "<text>") -> Property:
    """Read a property from VNN-LIB 1.0 text.

    Args:
        text: the file's content.
        source: its name, for messages and for `Property.source`.

    Raises:
        LoadError: malformed or non-linear (message `source:line:column: ...`), an input without a
            bound, a gap in the variables' numbers, or too large a disjunctive normal form.
    """
    reader = _Reader()
    reader.read(without_comments(text), source)
    try:
        return assemble(reader.variables, conjoin(reader.assertions), source)
    except (TooManyClauses, LoadError) as error:
        raise LoadError(f"{source}: {error}") from None


def load_vnnlib(path: str | Path) -> Property:
    """Read a property from a VNN-LIB 1.0 file, plain or compressed by gzip.

    Raises:
        LoadError: the file cannot be read; or see `parse_vnnlib`.
    """
    try:
        content = Path(path).read_bytes()
        if content.startswith(_GZIP_MAGIC):
            content = gzip.decompress(content)
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise LoadError(f"{path}: cannot read the property: {error.strerror or error}") from None
    except (EOFError, ValueError, zlib.error) as error:
        raise LoadError(f"{path}: cannot read the property: {error}") from None
    return parse_vnnlib(text, str(path))


def check_sizes(prop: Property, graph_inputs: int, graph_outputs: int) -> None:
    """Make sure that a property fits a network.

    Args:
        graph_inputs, graph_outputs: numbers of the network's scalar inputs and outputs.

    Raises:
        LoadError: they differ from the property's.
    """
    for what, declared, present in (
        ("inputs", prop.num_inputs, graph_inputs),
        ("outputs", prop.num_outputs, graph_outputs),
    ):
        if declared != present:
            raise LoadError(
                f"{prop.source}: the property declares {declared} {what}, but the network has {present}"
            )
