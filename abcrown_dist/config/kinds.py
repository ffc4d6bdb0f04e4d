"""Sorts of configuration values: what each accepts, in which words it refuses, and its canonical form.

A kind reads Python values (from YAML or the Python API) with `parse` and command-line text with
`parse_text`. Both raise `ValueError` with the reason alone; the caller adds the key and its place.
`parse` returns its own results unchanged.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, NoReturn, TypeVar

import yaml

T = TypeVar("T")

# Numbers that YAML 1.1 reads as text: 1e-3 (no dot), 1.0e3 (no sign), inf.
_MISREAD_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?[eE][+-]?\d+|\.\d+[eE][+-]?\d+|inf)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_UNIT_FACTORS = {"": 1, **{u: 1000**i for i, u in enumerate("kmgt", 1)}}
_UNIT_FACTORS.update({f"{u}i": 1024**i for i, u in enumerate("kmgt", 1)})


class Kind(ABC, Generic[T]):
    """One sort of value; `metavar` stands for it in the help text."""

    metavar = "VALUE"

    @abstractmethod
    def describe(self) -> str:
        """What is accepted, to follow the word "expected"."""

    @abstractmethod
    def parse(self, raw: object) -> T:
        """Canonical value of `raw`. Raises ValueError saying what is wrong with it."""

    def parse_text(self, text: str) -> T:
        """Canonical value of a command-line word, read as a YAML scalar."""
        try:
            raw = yaml.safe_load(text)
        except yaml.YAMLError:
            raw = text
        return self.parse(raw)

    def refuse(self, raw: object) -> NoReturn:
        """Raise ValueError with what was expected and what came instead."""
        shown = "null" if raw is None else str(raw).lower() if isinstance(raw, bool) else repr(raw)
        if len(shown) > 60:
            shown = shown[:57] + "..."
        raise ValueError(f"expected {self.describe()}, got {shown}")


def _number(raw: object) -> object:
    """`raw`, or the number that it stands for where YAML 1.1 took a number for text."""
    if isinstance(raw, str) and _MISREAD_NUMBER.fullmatch(raw):
        return float(raw)
    return raw


class Bool(Kind[bool]):
    """true or false."""

    metavar = "true|false"

    def describe(self) -> str:
        return "true or false"

    def parse(self, raw: object) -> bool:
        if not isinstance(raw, bool):
            self.refuse(raw)
        return raw


class Int(Kind[int]):
    """Whole number in [minimum, maximum]; 1e6 is one too."""

    metavar = "N"

    def __init__(self, minimum: int, maximum: int | None = None) -> None:
        self.minimum, self.maximum = minimum, maximum

    def describe(self) -> str:
        if self.maximum is None:
            return f"a whole number >= {self.minimum}"
        return f"a whole number from {self.minimum} to {self.maximum}"

    def parse(self, raw: object) -> int:
        value = _number(raw)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < self.minimum:
            self.refuse(raw)
        if self.maximum is not None and value > self.maximum:
            self.refuse(raw)
        return value


class Float(Kind[float]):
    """Number in a range; whole numbers count, NaN never does.

    Args:
        above: every value must be larger than this (an open end).
        maximum: largest value, itself allowed. Infinity is allowed when this is infinite.
    """

    metavar = "X"

    def __init__(self, *, above: float, maximum: float) -> None:
        self.above, self.maximum = above, maximum

    def describe(self) -> str:
        return f"a number > {self.above:g}" + (
            "" if math.isinf(self.maximum) else f" and <= {self.maximum:g}"
        )

    def parse(self, raw: object) -> float:
        value = _number(raw)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.refuse(raw)
        try:
            value = float(value)
        except OverflowError:
            self.refuse(raw)
        if not self.above < value <= self.maximum:
            self.refuse(raw)
        return value


class Text(Kind[str]):
    """Any text, such as a path."""

    metavar = "TEXT"

    def __init__(self, *, empty: bool = False) -> None:
        self.empty = empty

    def describe(self) -> str:
        return "text" if self.empty else "text that is not empty"

    def parse(self, raw: object) -> str:
        if not isinstance(raw, str) or not (raw or self.empty):
            self.refuse(raw)
        return raw

    def parse_text(self, text: str) -> str:
        return self.parse(text)  # a path such as 5 or true is text here


class Choice(Kind[str]):
    """One of several words.

    Args:
        values: the words.
        later: further words that users may know, answered with "not implemented yet".
    """

    def __init__(self, *values: str, later: Sequence[str] = ()) -> None:
        self.values, self.later = values, tuple(later)
        self.metavar = "|".join(values)

    def describe(self) -> str:
        return f"one of {', '.join(self.values)}" if len(self.values) > 1 else self.values[0]

    def parse(self, raw: object) -> str:
        if isinstance(raw, str) and raw in self.later:
            raise ValueError(f"{raw!r} is not implemented yet; expected {self.describe()}")
        if not isinstance(raw, str) or raw not in self.values:
            self.refuse(raw)
        return raw

    def parse_text(self, text: str) -> str:
        return self.parse(text)


class Device(Kind[str]):
    """Name of a torch device, or auto."""

    metavar = "auto|cpu|cuda|cuda:N"

    def describe(self) -> str:
        return "one of auto, cpu, cuda, cuda:N"

    def parse(self, raw: object) -> str:
        if not isinstance(raw, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", raw):
            self.refuse(raw)
        return raw

    def parse_text(self, text: str) -> str:
        return self.parse(text)


class IntList(Kind[tuple[int, ...]]):
    """Whole numbers: a YAML list, or words on the command line."""

    metavar = "N"

    def __init__(self, minimum: int) -> None:
        self.item = Int(minimum)

    def describe(self) -> str:
        return f"a list of whole numbers >= {self.item.minimum}"

    def parse(self, raw: object) -> tuple[int, ...]:
        if not isinstance(raw, (list, tuple)) or not raw:
            self.refuse(raw)
        try:
            return tuple(self.item.parse(item) for item in raw)
        except ValueError:
            self.refuse(raw)

    def parse_text(self, text: str) -> tuple[int, ...]:
        words = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
        return self.parse([yaml.safe_load(w) if re.fullmatch(r"[+-]?[\w.]+", w) else w for w in words])


class Shape(IntList):
    """Tensor shape; -1, as alpha-beta-CROWN's users write for the batch axis, means 1."""

    def __init__(self) -> None:
        super().__init__(1)

    def describe(self) -> str:
        return "a list of whole numbers >= 1 (-1 on the first axis: batch)"

    def parse(self, raw: object) -> tuple[int, ...]:
        if isinstance(raw, (list, tuple)) and raw and raw[0] == -1:
            return (1, *super().parse(raw[1:])) if len(raw) > 1 else (1,)
        return super().parse(raw)


class Size(Kind[int]):
    """Amount of memory in bytes; text such as 1GiB or 500 MB is converted."""

    metavar = "SIZE"

    def describe(self) -> str:
        return "a size > 0 in bytes, or with a unit such as 512MiB or 2GB"

    def parse(self, raw: object) -> int:
        value = _number(raw)
        if isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
            value = float(match[1]) * _UNIT_FACTORS[(match[2] or "").lower()]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.refuse(raw)
        if not 1 <= value < math.inf:
            self.refuse(raw)
        return int(value)


class OrNull(Kind[T | None]):
    """Another kind, or null."""

    def __init__(self, kind: Kind[T]) -> None:
        self.kind = kind
        self.metavar = kind.metavar

    def describe(self) -> str:
        return f"{self.kind.describe()}, or null"

    def parse(self, raw: object) -> T | None:
        return None if raw is None else self.kind.parse(raw)

    def parse_text(self, text: str) -> T | None:
        return None if text in ("null", "~") else self.kind.parse_text(text)


class OrAuto(Kind[T | str]):
    """Another kind, or the word auto."""

    def __init__(self, kind: Kind[T]) -> None:
        self.kind = kind
        self.metavar = f"auto|{kind.metavar}"

    def describe(self) -> str:
        return f"auto, or {self.kind.describe()}"

    def parse(self, raw: object) -> T | str:
        if raw == "auto":
            return "auto"
        try:
            return self.kind.parse(raw)
        except ValueError:
            self.refuse(raw)
