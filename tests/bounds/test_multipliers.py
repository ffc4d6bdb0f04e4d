"""Multipliers of linear functions against a linear-programming solver."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from abcrown_dist.bounds.multipliers import best_multipliers


def value(lam: torch.Tensor, G: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return (lam * c).sum(1) - torch.einsum("brn,br->bn", G, lam).abs().sum(1)


@pytest.mark.parametrize(("rows", "inputs"), [(2, 1), (2, 5), (3, 3), (5, 8)])
def test_they_refute_what_a_solver_refutes(rows: int, inputs: int) -> None:
    random = np.random.default_rng(rows)
    G, c = random.normal(size=(60, rows, inputs)), random.normal(size=(60, rows)) + inputs / 3
    allowed = torch.ones(60, rows, dtype=torch.bool)
    both = torch.from_numpy(G), torch.from_numpy(c)
    found = value(best_multipliers(*both, allowed), *both)
    signs = []
    for b in range(60):
        objective = np.append(np.zeros(inputs), 1.0)
        bounds = [(-1, 1)] * inputs + [(None, None)]
        least = linprog(objective, np.hstack([G[b], -np.ones((rows, 1))]), -c[b], bounds=bounds).fun
        if abs(least) > 1e-6:
            assert (float(found[b]) > 0) is (least > 0)
            signs.append(least > 0)
    assert any(signs) and not all(signs)


def test_rows_that_are_not_allowed_have_none() -> None:
    G, c = torch.zeros(2, 3, 2, dtype=torch.float64), torch.tensor([[1.0, -1, 5], [torch.inf, 1, 2]]).double()
    allowed = torch.tensor([[True, True, False], [False, False, False]])
    found = best_multipliers(G, c, allowed)
    assert found.isfinite().all() and (found >= 0).all()
    assert (found[~allowed] == 0).all()
    assert found[0, 0] > 0.99 * found[0].sum()


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e9])
def test_functions_of_very_different_size_are_combined(size: float) -> None:
    """x <= 0.4 and  size x >= 0.5 size."""
    G, c = torch.tensor([[[1.0], [-size]]]).double(), torch.tensor([[-0.4, 0.5 * size]]).double()
    found = best_multipliers(G, c, torch.ones(1, 2, dtype=torch.bool))
    assert float(value(found, G, c)) > 0
