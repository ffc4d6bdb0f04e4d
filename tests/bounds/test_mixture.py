"""Combinations of rows against exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import nn

from abcrown_dist.bounds.mixture import Mixture, normalised, units
from tests.bab.problems import network


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gap_covers_what_rounding_changes(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(1, 4, 5, generator=generator, dtype=torch.float64).to(dtype)
    rhs = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    lam = torch.rand(3, 4, generator=generator, dtype=torch.float64).to(dtype)
    found = Mixture({"y": rows}, rhs, torch.ones(3, 4, dtype=torch.float64)).combined(lam)
    for b in range(3):
        factor = [Fraction(float(f)) for f in found.factor[b]]
        for i in range(5):
            exact = sum(f * Fraction(float(rows[0, r, i])) for r, f in enumerate(factor))
            off = abs(exact - Fraction(float(found.rows["y"][b, i])))
            assert off <= Fraction(float(found.gap["y"][b, i]))
        right = sum(f * Fraction(float(rhs[b, r])) for r, f in enumerate(factor))
        assert right <= Fraction(float(found.rhs[b]))


def test_what_cancels_leaves_nothing_behind() -> None:
    """y0 > y1 > y2 > y0."""
    rows = torch.tensor([[[-1.0, 1, 0], [0, -1, 1], [1, 0, -1]]])
    mixture = Mixture({"y": rows}, torch.zeros(1, 3).double(), torch.ones(1, 3).double())
    found = mixture.combined(mixture.uniform(torch.float32))
    assert (found.rows["y"] == 0).all() and (found.gap["y"] == 0).all() and (found.rhs == 0).all()


def test_rows_come_with_the_combination_after_them_or_alone() -> None:
    rows = {"y": torch.tensor([[[1.0, 2], [3, 4]]])}
    rhs, unit = torch.tensor([[1.0, torch.inf]] * 2).double(), torch.tensor([[1.0, 0]] * 2).double()
    lam = torch.tensor([[1.0, 7], [2, 7]])
    both = Mixture(rows, rhs, unit).start(lam)["y"]
    assert both.tolist() == [[[1, 2], [3, 4], [1, 2]], [[1, 2], [3, 4], [2, 4]]]
    assert torch.equal(Mixture(rows, rhs, unit, alone=True).start(lam)["y"], both[:, -1:])
    assert Mixture(rows, rhs, unit).combined(lam).rhs.tolist() == [1, 2]


def test_units_make_rows_of_different_size_alike() -> None:
    weights = network(nn.Identity(), 2)
    name = weights.graph.outputs[0]
    rows = {name: torch.tensor([[[1024.0, 0], [0, -0.25], [1, 1], [0, 0]]])}
    real = torch.tensor([[True, True, False, True]])
    assert units(weights, rows, real).tolist() == [[2.0**-10, 4, 0, 1]]


def test_multipliers_keep_their_sum() -> None:
    lam = normalised(torch.tensor([[-1.0, 1, 3], [0, 0, 0]]), torch.tensor([[3], [3]]))
    assert lam.tolist() == [[0, 0.75, 2.25], [0, 0, 0]]
