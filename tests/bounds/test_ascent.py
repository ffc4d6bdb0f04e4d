"""Projected ascent: every row for itself, the best kept, no limit ever crossed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from abcrown_dist.bounds.ascent import Ascent, Variable
from abcrown_dist.bounds.types import RowBounds


def bounds(*rows: float) -> RowBounds:
    lower = torch.tensor([rows])
    return RowBounds(lower, torch.zeros_like(lower))


def ascent(value: Tensor, rate: float = 0.1, patience: int = 100, **limits: float) -> Ascent:
    variable = Variable(value, rate, **limits)
    return Ascent({"v": variable}, decay=1.0, patience=patience, keep=True)


def concave(value: Tensor, top: Tensor) -> tuple[RowBounds, Tensor]:
    """-(v - top)^2 summed over a row's parameters, and its slopes."""
    lower = -(value - top).square().sum(2)
    return RowBounds(lower, torch.zeros_like(lower)), -2 * (value - top)


def test_every_row_climbs_to_its_own_optimum_within_the_limits() -> None:
    value, top = torch.full((2, 2, 3), 0.5), torch.tensor([0.2, 0.9, 3.0])
    search = ascent(value, lower=0.0, upper=1.0)
    for _ in range(300):
        found, slopes = concave(value, top)
        search.record(found)
        search.move({"v": slopes})
        assert value.min() >= 0 and value.max() <= 1
    assert torch.allclose(search.best_values["v"], torch.tensor([0.2, 0.9, 1.0]).expand(2, 2, 3), atol=1e-2)


def test_the_first_step_is_as_long_as_the_rate_whatever_the_slope() -> None:
    """Adam; an initial value on its limit moves (a clamp inside the graph would hold it)."""
    for slope in (1e-4, 1.0, 1e4):
        value = torch.zeros(1, 1, 1)
        search = ascent(value, rate=0.25, lower=0.0)
        search.record(bounds(0.0))
        search.move({"v": torch.full((1, 1, 1), slope)})
        assert float(value) == pytest.approx(0.25, rel=1e-3)


def test_the_best_of_every_row_is_kept_with_its_values() -> None:
    value = torch.zeros(1, 2, 1)
    search = ascent(value)
    course = [((1.0, 5.0), 0.1), ((3.0, 4.0), 0.2), ((2.0, 6.0), 0.3)]
    for rows, at in course:
        value.fill_(at)
        search.record(bounds(*rows))
    assert search.best.lower.tolist() == [[3, 6]]
    assert search.best_values["v"].flatten().tolist() == pytest.approx([0.2, 0.3])


def test_the_largest_error_stays() -> None:
    search = ascent(torch.zeros(1, 1, 1))
    for error in (1e-3, 0.0, 0.0):
        search.record(RowBounds(torch.zeros(1, 1), torch.full((1, 1), error)))
    assert float(search.best.error) == pytest.approx(1e-3)


def test_no_number_stays_no_number_and_never_becomes_the_best() -> None:
    search = ascent(torch.zeros(1, 2, 1))
    for rows in ((math.nan, 1.0), (5.0, math.nan), (6.0, 2.0)):
        search.record(bounds(*rows))
    assert search.best.lower[0, 0].isnan()
    assert float(search.best.lower[0, 1]) == 2.0


def test_a_row_that_has_settled_is_left_alone() -> None:
    search = ascent(torch.zeros(1, 2, 1), patience=3)
    for step in range(4):
        search.record(bounds(1.0, float(step)))
    assert search.settled().tolist() == [[True, False]]
    search.record(bounds(9.0, 9.0))  # whatever the others need must not change it
    assert search.best.lower.tolist() == [[1, 9]]


def test_part_of_an_ascent_goes_on_as_the_whole_does() -> None:
    generator = torch.Generator().manual_seed(0)
    start, top = torch.rand(3, 2, 4, generator=generator), torch.rand(3, 2, 4, generator=generator)
    kept = torch.tensor([2, 0])

    def limits() -> dict[str, Tensor]:
        return {"lower": torch.full((3, 1, 4), 0.1), "upper": torch.full((3, 1, 4), 0.8)}

    whole = Ascent({"v": Variable(start.clone(), 0.1, **limits())}, decay=0.9, patience=5, keep=True)
    part = None
    for step in range(20):
        for search, goal in ((whole, top), *(((part, top[kept]),) if part else ())):
            value = search.variables["v"].value
            found, slopes = concave(value, goal)
            search.record(found)
            search.move({"v": slopes})
        if step == 6:
            part = whole.select(kept)
    assert part is not None
    assert torch.equal(part.best.lower, whole.best.lower[kept])
    assert torch.equal(part.best_values["v"], whole.best_values["v"][kept])
    assert torch.equal(part.variables["v"].value, whole.variables["v"].value[kept])


@pytest.mark.parametrize(("lower", "upper"), [(0.0, None), (None, 0.5), (0.0, 0.5), (None, None)])
def test_limits_are_optional(lower: float | None, upper: float | None) -> None:
    value = torch.tensor([[[-1.0, 0.2, 2.0]]])
    Variable(value, 0.1, lower, upper).project()
    expected = [-1.0 if lower is None else 0.0, 0.2, 2.0 if upper is None else 0.5]
    assert value.flatten().tolist() == pytest.approx(expected)
