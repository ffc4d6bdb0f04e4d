"""From literals over named variables to boxes and matrices: the last step of reading a property."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import numpy as np

from abcrown_dist.spec.dnf import All, Clause, Factor, clause, product
from abcrown_dist.spec.linear import Bound, Literal, Row, is_input
from abcrown_dist.spec.property import Box, Disjunct, Property
from abcrown_dist.spec.simplify import simplify
from abcrown_dist.util.errors import LoadError

_log = logging.getLogger(__name__)
_ONE = Decimal(1)
_FEW = 64  # disjuncts: as many are written out rather than kept as a product
_SOME_BOXES = 1000

_Path = tuple[int, ...]


class _Ranges:
    """Intersection of bounds on the inputs; None where there is none yet."""

    def __init__(self, lower: list[Decimal | None], upper: list[Decimal | None]) -> None:
        self.lower = lower
        self.upper = upper

    def copy(self) -> _Ranges:
        return _Ranges(self.lower.copy(), self.upper.copy())

    def narrow(self, index: int, bound: Bound) -> None:
        """Intersect with a bound on input `index`."""
        value = bound.value
        if bound.upper:
            known = self.upper[index]
            if known is None or value < known:
                self.upper[index] = value
        else:
            known = self.lower[index]
            if known is None or value > known:
                self.lower[index] = value

    def empty_at(self) -> int | None:
        """First input that is left without a value."""
        for index, (low, high) in enumerate(zip(self.lower, self.upper, strict=True)):
            if low is not None and high is not None and low > high:
                return index
        return None

    def box(self) -> Box:
        """The finished box.

        Raises:
            LoadError: an input has no lower or no upper bound.
        """
        for side, values in (("lower", self.lower), ("upper", self.upper)):
            if None in values:
                raise LoadError(f"the input X_{values.index(None)} has no {side} bound")
        return Box(tuple(self.lower), tuple(self.upper))  # type: ignore[arg-type]


def _hull(parts: Sequence[_Ranges]) -> _Ranges:
    """The smallest ranges that hold all of several."""

    def widest(sides: Iterable[Decimal | None], choose: Callable[[list[Decimal]], Decimal]) -> Decimal | None:
        values = [value for value in sides if value is not None]
        return choose(values) if len(values) == len(parts) else None

    return _Ranges(
        [widest(sides, min) for sides in zip(*(part.lower for part in parts), strict=True)],
        [widest(sides, max) for sides in zip(*(part.upper for part in parts), strict=True)],
    )


class _Assembler:
    """Builds disjuncts that share what all of them have in common."""

    def __init__(self, num_inputs: int, num_outputs: int, common: Iterable[Literal]) -> None:
        self._num_outputs = num_outputs
        self._index = {f"X_{i}": i for i in range(num_inputs)}
        self._columns = self._index | {f"Y_{i}": i for i in range(num_outputs)}
        none: list[Decimal | None] = [None] * num_inputs
        self._ranges, self._rows = self._split(common, _Ranges(none, none.copy()))
        self._boxes: dict[tuple[tuple[Decimal | None, ...], tuple[Decimal | None, ...]], Box] = {}
        self._common_box: Box | None = None
        self._common_empty = self._emptiness(self._ranges, self._rows)

    def _split(self, literals: Iterable[Literal], ranges: _Ranges) -> tuple[_Ranges, list[Row]]:
        """Input bounds narrow `ranges`; the rest is returned as rows, strict input bounds as well.

        The box is closed: only a row can keep its edge out.
        """
        rows: list[Row] = []
        for literal in literals:
            if isinstance(literal, Row):
                rows.append(literal)
                continue
            if is_input(literal.variable):
                ranges.narrow(self._index[literal.variable], literal)
                if not literal.strict:
                    continue
            rows.append(_as_row(literal))
        return ranges, rows

    def disjunct(self, item: Clause) -> Disjunct | str:
        """The disjunct of the common literals and a clause, or the name of an input without a value left."""
        while True:
            ranges, rows = self._ranges, self._rows
            empty = self._common_empty
            if item.literals:
                changed = any(_bounds_input(literal) for literal in item.literals)
                ranges, own = self._split(item.literals, ranges.copy() if changed else ranges)
                rows = rows + own
                empty = self._emptiness(ranges, rows) if changed else empty
            if empty is not None:
                return empty
            found = self._possible(item.factors, ranges)
            if isinstance(found, str):
                return found
            ranges, factors = found
            single = [factor.alternatives[0] for factor in factors if len(factor.alternatives) == 1]
            if not single:
                return self._joined(self._shared_box(ranges), rows, factors)
            literals = [literal for each in single for literal in each.literals]
            inner = [factor for each in single for factor in each.factors]
            several = [factor for factor in factors if len(factor.alternatives) > 1]
            item = Clause([*item.literals, *literals], (*several, *inner))

    def _possible(self, factors: Sequence[Factor], ranges: _Ranges) -> tuple[_Ranges, list[Factor]] | str:
        """The ranges in which each factor can hold, and its alternatives that can.

        The name of an input without a value left where one cannot.
        """
        kept: list[Factor] = []
        for factor in factors:
            parts = [self._split(each.literals, ranges.copy()) for each in factor.alternatives]
            names = [self._emptiness(*part) for part in parts]
            alive = [index for index, name in enumerate(names) if name is None]
            if not alive:
                return str(names[0])
            kept.append(Factor.of(factor.alternatives[index] for index in alive))
            ranges = _hull([parts[index][0] for index in alive])
        return ranges, kept

    def _joined(self, box: Box, rows: list[Row], factors: Sequence[Factor]) -> Disjunct:
        if not factors:
            return self._with_matrices(box, rows)
        rows = list(rows)
        paths: list[_Path] = [()] * len(rows)
        for factor in factors:
            _write(factor, rows, paths, ())
        return replace(self._with_matrices(box, rows), groups=_groups(paths))

    def _emptiness(self, ranges: _Ranges, rows: list[Row]) -> str | None:
        """Name of an input without a value left."""
        index = ranges.empty_at()
        if index is not None:
            return f"X_{index}"
        for row in rows:  # x <= 5, x > 5: the closed box is a point, the set is empty
            (name, coefficient), *others = row.coefficients.items()
            if row.strict and not others and is_input(name):
                low, high = ranges.lower[self._index[name]], ranges.upper[self._index[name]]
                if low is not None and low == high and Fraction(coefficient) * Fraction(low) >= row.rhs:
                    return name
        return None

    def _shared_box(self, ranges: _Ranges) -> Box:
        if ranges is self._ranges:
            self._common_box = self._common_box or ranges.box()
            return self._common_box
        key = (tuple(ranges.lower), tuple(ranges.upper))
        if key not in self._boxes:
            self._boxes[key] = ranges.box()
        return self._boxes[key]

    def _with_matrices(self, box: Box, rows: list[Row]) -> Disjunct:
        mixed = any(is_input(name) for row in rows for name in row.coefficients)
        C = np.zeros((len(rows), self._num_outputs))
        D = np.zeros((len(rows), len(self._index))) if mixed else None
        for k, row in enumerate(rows):
            for name, coefficient in row.coefficients.items():
                target = D if D is not None and is_input(name) else C
                target[k, self._columns[name]] = float(coefficient)
        return Disjunct(
            box=box,
            C=C,
            rhs=np.array([_float_above(row.rhs) for row in rows], dtype=np.float64),
            D=D,
            strict=np.array([row.strict for row in rows], dtype=bool),
            terms=tuple((row.coefficients, row.rhs) for row in rows),
        )


def _bounds_input(literal: Literal) -> bool:
    return isinstance(literal, Bound) and is_input(literal.variable)


def _write(factor: Factor, rows: list[Row], paths: list[_Path], outside: _Path) -> None:
    """Append the rows of a factor, each with its alternative and factor, from the inside out."""
    first = len(rows)
    for item in factor.alternatives:
        path = (len(rows), first, *outside)
        for literal in item.literals:
            rows.append(literal if isinstance(literal, Row) else _as_row(literal))
            paths.append(path)
        for inner in item.factors:
            _write(inner, rows, paths, path)


def _groups(paths: Sequence[_Path]) -> np.ndarray:
    """The groups (depth, K) of `junctions`."""
    depth = max(map(len, paths))
    columns = [[row] * (depth - len(path)) + list(path) for row, path in enumerate(paths)]
    return np.array(columns, dtype=np.int64).T


def _as_row(bound: Bound) -> Row:
    if bound.upper:
        return Row({bound.variable: _ONE}, bound.value, bound.strict)
    return Row({bound.variable: -_ONE}, bound.value.copy_negate(), bound.strict)


def _float_above(value: Decimal) -> float:
    """Smallest float64 not below `value`: a right-hand side may only grow, never cut anything off."""
    nearest = float(value)
    return nearest if Decimal(nearest) >= value else float(np.nextafter(nearest, np.inf))


def _count(variables: Collection[str], kind: str, what: str) -> int:
    """Number of variables X_i or Y_i, which must be numbered without a gap."""
    count = sum(name[0] == kind for name in variables)
    for index in range(count):
        if f"{kind}_{index}" not in variables:
            raise LoadError(f"{count} {what}s are declared, but {kind}_{index} is not among them")
    if count == 0:
        raise LoadError(f"no {what} {kind}_0 is declared")
    return count


def _multiplied_out(factors: Sequence[Factor]) -> list[Factor]:
    """The factors whose product becomes disjuncts of its own; the others stay factors of each of these.

    All of them where that makes few disjuncts. Else those that bound inputs, as long as they make no more
    boxes than are bounded in no time: a box of its own bounds more tightly than rows on the inputs.
    """
    if len(factors) == 1 or math.prod(len(factor.alternatives) for factor in factors) <= _FEW:
        return list(factors)
    chosen: list[Factor] = []
    count = 1
    for factor in sorted(factors, key=lambda factor: -len(factor.alternatives)):
        makes = count * len(factor.alternatives)
        bounds = any(_bounds_input(literal) for item in factor.alternatives for literal in item.literals)
        if bounds and (not chosen or makes <= _SOME_BOXES):
            chosen.append(factor)
            count = makes
    return [factor for factor in factors if any(factor is item for item in chosen)]


def assemble(variables: Collection[str], formula: All, source: str) -> Property:
    """The property that a formula over declared variables describes.

    Disjuncts whose inputs cannot exist are left out, with one warning for all of them.

    Raises:
        LoadError: a gap in the variables' numbers, or an input without a bound.
        TooManyClauses: see `dnf`.
    """
    num_inputs = _count(variables, "X", "input")
    num_outputs = _count(variables, "Y", "output")
    whole = clause(formula)
    if whole.false or (found := simplify(whole)) is None:
        _log.warning("%s: no values fulfil the property, whatever the network", source)
        return Property(num_inputs, num_outputs, (), source)
    chosen = _multiplied_out(found.factors)
    others = tuple(factor for factor in found.factors if not any(factor is item for item in chosen))
    assembler = _Assembler(num_inputs, num_outputs, found.literals)
    built = [
        assembler.disjunct(replace(item, factors=(*item.factors, *others))) for item in product((), chosen)
    ]
    disjuncts = tuple(item for item in built if isinstance(item, Disjunct))
    if len(disjuncts) < len(built):
        name = next(item for item in built if isinstance(item, str))
        _log.warning(
            "%s: %d of %d disjuncts have an empty input set (no value is left for %s)",
            source,
            len(built) - len(disjuncts),
            len(built),
            name,
        )
    return Property(num_inputs, num_outputs, disjuncts, source)
