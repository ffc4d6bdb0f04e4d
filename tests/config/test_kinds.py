"""What each kind of value accepts, refuses, and says."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from abcrown_dist.config.kinds import (
    Bool,
    Choice,
    Device,
    Float,
    Int,
    IntList,
    Kind,
    OrAuto,
    OrNull,
    Shape,
    Size,
    Text,
)

POSITIVE = Float(above=0, maximum=math.inf)
KINDS = [
    Bool(),
    Int(0),
    POSITIVE,
    Text(),
    Choice("a", "b"),
    Device(),
    IntList(0),
    Shape(),
    Size(),
    OrNull(Int(0)),
    OrAuto(POSITIVE),
]


@pytest.mark.parametrize(
    ("kind", "raw", "value"),
    [
        (Int(0), 1e9, 10**9),
        (Int(0), "1e9", 10**9),
        (POSITIVE, 3, 3.0),
        (POSITIVE, "1e-3", 1e-3),
        (POSITIVE, "1.5e3", 1500.0),
        (POSITIVE, math.inf, math.inf),
        (IntList(0), [3, 1], (3, 1)),
        (Shape(), [-1, 3, 32, 32], (1, 3, 32, 32)),
        (Size(), "1GiB", 2**30),
        (Size(), "1.5 kb", 1500),
        (Size(), 4096, 4096),
        (OrNull(Int(0)), None, None),
        (OrAuto(POSITIVE), "auto", "auto"),
        (OrAuto(POSITIVE), 0.5, 0.5),
        (Device(), "cuda:3", "cuda:3"),
    ],
)
def test_accepted(kind: Kind[Any], raw: object, value: object) -> None:
    parsed = kind.parse(raw)
    assert parsed == value
    assert type(parsed) is type(value)
    assert kind.parse(parsed) == value


@pytest.mark.parametrize(
    ("kind", "raw", "message"),
    [
        (Int(0), True, "expected a whole number >= 0, got true"),
        (Int(0), -1, "expected a whole number >= 0, got -1"),
        (Int(0), 1.5, "expected a whole number >= 0, got 1.5"),
        (Int(0), math.nan, "expected a whole number"),
        (Int(0), math.inf, "expected a whole number"),
        (Int(0), "5", "expected a whole number >= 0, got '5'"),
        (Int(0), None, "got null"),
        (Int(0, 9), 10, "expected a whole number from 0 to 9, got 10"),
        (Bool(), 1, "expected true or false, got 1"),
        (Bool(), "true", "expected true or false, got 'true'"),
        (POSITIVE, 0, "expected a number > 0, got 0"),
        (POSITIVE, math.nan, "expected a number > 0, got nan"),
        (POSITIVE, True, "got true"),
        (POSITIVE, 10**400, "expected a number > 0"),
        (Float(above=0, maximum=1), 2, "expected a number > 0 and <= 1, got 2"),
        (Text(), "", "expected text that is not empty"),
        (Text(), 5, "expected text that is not empty, got 5"),
        (Choice("a", "b"), "c", "expected one of a, b, got 'c'"),
        (Choice("a", "b", later=("c",)), "c", "'c' is not implemented yet; expected one of a, b"),
        (Device(), "gpu", "expected one of auto, cpu, cuda, cuda:N, got 'gpu'"),
        (IntList(0), 3, "expected a list of whole numbers >= 0, got 3"),
        (IntList(0), [1, True], "expected a list of whole numbers"),
        (IntList(0), [], "expected a list of whole numbers"),
        (Shape(), [1, -1], "expected a list of whole numbers >= 1"),
        (Size(), "1 apple", "expected a size > 0"),
        (Size(), 0, "expected a size > 0"),
        (OrAuto(POSITIVE), "never", "expected auto, or a number > 0, got 'never'"),
        (Text(), ["x" * 100], r"\.\.\.$"),
    ],
)
def test_refused(kind: Kind[Any], raw: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind.parse(raw)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Bool(), "true", True),
        (Bool(), "False", False),
        (Int(0), "12", 12),
        (POSITIVE, "1e-3", 1e-3),
        (POSITIVE, "inf", math.inf),
        (Text(), "5", "5"),
        (Text(), "null", "null"),
        (OrNull(Text()), "null", None),
        (OrNull(Text()), "5", "5"),
        (IntList(0), "1 2 3", (1, 2, 3)),
        (IntList(0), "[1, 2]", (1, 2)),
        (Size(), "2MiB", 2**21),
        (OrAuto(POSITIVE), "auto", "auto"),
    ],
)
def test_words(kind: Kind[Any], text: str, value: object) -> None:
    assert kind.parse_text(text) == value


@given(st.sampled_from(KINDS), st.text(max_size=12))
def test_any_word_is_accepted_or_refused(kind: Kind[Any], text: str) -> None:
    try:
        value = kind.parse_text(text)
    except ValueError:
        return
    assert kind.parse(value) == value


@given(
    st.sampled_from(KINDS),
    st.none() | st.booleans() | st.floats() | st.integers() | st.lists(st.integers()) | st.text(),
)
def test_any_value_is_accepted_or_refused(kind: Kind[Any], raw: object) -> None:
    try:
        value = kind.parse(raw)
    except ValueError:
        return
    assert kind.parse(value) == value
