"""The two-piece family: sound everywhere, exact where it can be, never certain of what is not a number."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from abcrown_dist.relax import REGISTRY, Lines
from abcrown_dist.relax.two_piece import TwoPiece

SLOPES = [0.0, 0.01, 0.3, 1.0, 1.7, -0.5]
DOUBLE = torch.float64
SPECIAL = [
    (-1.0, 1.0), (-1.0, 2.0), (-2.0, 1.0), (-3.0, -1.0), (1.0, 3.0), (0.0, 2.0), (-2.0, 0.0), (0.0, 0.0),
    (0.5, 0.5), (-0.5, -0.5), (-1e-30, 1e-30), (-1e30, 1e30), (-1e-8, 1e8), (-1e8, 1e-8), (-1e300, 1e-300),
]  # fmt: skip


def reference(slope: float, z: Tensor) -> Tensor:
    return torch.where(z >= 0, z, slope * z)


def attributes(slope: float) -> dict[str, float]:
    return {} if slope == 0 else {"negative_slope": slope}


def intervals(seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    ends = torch.randn(200, 2, generator=random, dtype=DOUBLE) * 10 ** (
        4 * torch.rand(200, 1, dtype=DOUBLE) - 2
    )
    ends = torch.cat([ends, torch.tensor(SPECIAL, dtype=DOUBLE)]).sort(1).values
    return ends[:, 0], ends[:, 1]


def points(lower: Tensor, upper: Tensor) -> Tensor:
    """A dense grid of every interval with both ends and the kink, (points, intervals)."""
    grid = torch.linspace(0, 1, 201, dtype=DOUBLE)[:, None]
    z = lower * (1 - grid) + upper * grid
    kink = torch.zeros(1, len(lower), dtype=DOUBLE).clamp(lower, upper)
    return torch.cat([z, lower[None], upper[None], kink]).clamp(lower, upper)


def line(slope: Tensor, intercept: Tensor | None, z: Tensor) -> Tensor:
    return slope * z if intercept is None else slope * z + intercept


def assert_sound(slope: float, lines: Lines, lower: Tensor, upper: Tensor) -> None:
    z = points(lower, upper)
    f = reference(slope, z)
    tolerance = 1e-12 * torch.maximum(lower.abs(), upper.abs()) * max(1, abs(slope))
    assert (line(lines.lower_slope, lines.lower_intercept, z) <= f + tolerance).all()
    assert (line(lines.upper_slope, lines.upper_intercept, z) >= f - tolerance).all()


@pytest.mark.parametrize("slope", SLOPES)
def test_default_lines_are_sound_and_touch(slope: float) -> None:
    lower, upper = intervals()
    lines = TwoPiece().lines(attributes(slope), lower, upper)
    assert_sound(slope, lines, lower, upper)
    z = points(lower, upper)
    scale = torch.maximum(lower.abs(), upper.abs()) * max(1, abs(slope)) + 1e-300
    below = (reference(slope, z) - line(lines.lower_slope, lines.lower_intercept, z)).amin(0)
    above = (line(lines.upper_slope, lines.upper_intercept, z) - reference(slope, z)).amin(0)
    assert (below <= 1e-12 * scale).all(), "no lower line could be raised as a whole"
    assert (above <= 1e-12 * scale).all()


@pytest.mark.parametrize("slope", SLOPES)
def test_every_slope_in_the_range_is_sound(slope: float) -> None:
    lower, upper = intervals()
    lines = TwoPiece().lines(attributes(slope), lower, upper)
    if slope > 1:
        assert lines.alpha_range is None
        return
    assert lines.alpha_range is not None
    low, high = lines.alpha_range
    assert (low <= lines.lower_slope).all() and (lines.lower_slope <= high).all()
    for part in (0, 0.1, 0.5, 0.77, 1):
        moved = Lines(low + part * (high - low), lines.upper_slope, None, lines.upper_intercept, None)
        assert_sound(slope, moved, lower, upper)
    if slope < 1:
        loose = TwoPiece().is_loose(attributes(slope), lower, upper)
        assert torch.equal(low < high, loose), "free exactly where it is not linear"


@pytest.mark.parametrize("slope", SLOPES)
def test_stable_intervals_are_exact(slope: float) -> None:
    lower, upper = intervals()
    relaxation = TwoPiece()
    stable = ~relaxation.is_loose(attributes(slope), lower, upper)
    assert torch.equal(stable, (lower >= 0) | (upper <= 0))
    lower, upper = lower[stable], upper[stable]
    lines = relaxation.lines(attributes(slope), lower, upper)
    z = points(lower, upper)
    f = reference(slope, z)
    assert torch.equal(line(lines.lower_slope, lines.lower_intercept, z), f)
    assert torch.equal(line(lines.upper_slope, lines.upper_intercept, z), f)


def test_the_rule_of_plain_crown() -> None:
    """Lower slope 1 where u > -l, else the negative slope; upper line the chord."""
    lower, upper = torch.tensor([-1.0, -2.0, -1.0]), torch.tensor([2.0, 1.0, 1.0])
    lines = REGISTRY["relu"].lines({}, lower, upper)
    assert lines.lower_slope.tolist() == [1, 0, 0]
    torch.testing.assert_close(lines.upper_slope, torch.tensor([2 / 3, 1 / 3, 1 / 2]))
    assert lines.upper_intercept is not None
    torch.testing.assert_close(lines.upper_intercept, torch.tensor([2 / 3, 2 / 3, 1 / 2]))
    assert REGISTRY["leaky_relu"].lines({"negative_slope": 0.25}, lower, upper).lower_slope.tolist() == [
        1,
        0.25,
        0.25,
    ]


@pytest.mark.parametrize("slope", SLOPES)
def test_range_and_value(slope: float) -> None:
    lower, upper = intervals()
    relaxation = TwoPiece()
    z = points(lower, upper)
    f = reference(slope, z)
    assert torch.equal(relaxation.value(attributes(slope), z), f)
    low, high = relaxation.interval(attributes(slope), lower, upper)
    assert torch.equal(low, f.amin(0)) and torch.equal(high, f.amax(0))


@pytest.mark.parametrize(("slope", "count"), [(0.0, 0), (1.0, 0), (0.3, 1), (-0.5, 1), (2.0, 1)])
def test_only_slopes_round(slope: float, count: int) -> None:
    assert TwoPiece().roundings(attributes(slope)) == count


@pytest.mark.parametrize("slope", SLOPES)
@pytest.mark.parametrize(
    ("low", "high"), [(math.nan, 1.0), (-1.0, math.nan), (math.nan, math.nan), (2.0, math.nan)]
)
def test_what_is_not_a_number_is_never_stable_nor_bounded(slope: float, low: float, high: float) -> None:
    lower, upper = torch.tensor([low]), torch.tensor([high])
    relaxation = TwoPiece()
    if not (low >= 0 or high <= 0):
        assert relaxation.is_loose(attributes(slope), lower, upper).all()
    ends = relaxation.interval(attributes(slope), lower, upper)
    assert ends[0].isnan().all() or ends[1].isnan().all()
    lines = relaxation.lines(attributes(slope), lower, upper)
    if not (low >= 0 or high <= 0) and slope != 1:
        moved = lines.lower_intercept if slope > 1 else lines.upper_intercept
        assert slope > 1 or moved is not None
        chord = lines.lower_slope if slope > 1 else lines.upper_slope
        assert chord.isnan().all()


@pytest.mark.parametrize("slope", SLOPES)
@settings(max_examples=60, deadline=None)
@given(st.floats(-1e150, 1e150), st.floats(-1e150, 1e150), st.floats(0, 1))
def test_sound_for_any_interval(slope: float, one: float, other: float, part: float) -> None:
    lower = torch.tensor([min(one, other)], dtype=DOUBLE)
    upper = torch.tensor([max(one, other)], dtype=DOUBLE)
    lines = TwoPiece().lines(attributes(slope), lower, upper)
    assert_sound(slope, lines, lower, upper)
    if lines.alpha_range is not None:
        low, high = lines.alpha_range
        moved = Lines(low + part * (high - low), lines.upper_slope, None, lines.upper_intercept, None)
        assert_sound(slope, moved, lower, upper)
