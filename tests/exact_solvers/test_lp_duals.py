"""The helper that turns duals into slopes: its own beta-CROWN bound must equal the linear programme."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog

from tests.lp_duals import (
    Array,
    Layers,
    Splits,
    beta_crown_value,
    interval_bounds,
    random_layers,
    solve_triangle,
)

Problem = tuple[Layers, Array, Array, list[tuple[Array, Array]], Array, dict[tuple[int, int], int]]


def random_problem(seed: int) -> Problem:
    """A network of one to four hidden layers, a box, intervals, a row, and splits that some point fulfils."""
    random = np.random.default_rng(seed)
    sizes = [int(random.integers(2, 5)), *random.integers(3, 10, random.integers(1, 5)).tolist(), 2]
    layers = random_layers(random, sizes)
    centre, radius = random.standard_normal(sizes[0]), 0.4 * random.random(sizes[0])
    lower, upper = centre - radius, centre + radius
    bounds = interval_bounds(layers, lower, upper)
    unstable = [(k, j) for k, (lo, up) in enumerate(bounds) for j in range(len(lo)) if lo[j] < 0 < up[j]]
    a = lower + (upper - lower) * random.random(sizes[0])
    z = []
    for W, b in layers[:-1]:
        z.append(W @ a + b)
        a = np.maximum(z[-1], 0)
    chosen = random.permutation(len(unstable))[: random.integers(0, 5)]
    splits = {unstable[i]: 1 if z[unstable[i][0]][unstable[i][1]] >= 0 else -1 for i in chosen}
    return layers, lower, upper, bounds, random.standard_normal(2), splits


def textbook_value(
    layers: Layers, lower: Array, upper: Array, bounds: list[tuple[Array, Array]], c: Array, splits: Splits
) -> float:
    """The same minimum from a programme written down plainly: variables x, then z and a of every layer."""
    widths = [len(b) for _, b in layers[:-1]]
    count = len(lower) + 2 * sum(widths)
    rows, rhs, equal, fixed = [], [], [], []
    before, at = np.arange(len(lower)), len(lower)
    limits = list(zip(lower, upper, strict=True)) + [(None, None)] * (count - len(lower))

    def row(entries: list[tuple[int, float]]) -> Array:
        line = np.zeros(count)
        for column, value in entries:
            line[column] += value
        return line

    for k, (W, b) in enumerate(layers[:-1]):
        for j in range(len(b)):
            z, a = at + 2 * j, at + 2 * j + 1
            low, high, sign = bounds[k][0][j], bounds[k][1][j], splits.get((k, j), 0)
            equal.append(row([(z, 1.0), *zip(before.tolist(), -W[j], strict=True)]))
            fixed.append(b[j])
            if sign:
                rows.append(row([(z, -float(sign))]))
                rhs.append(0.0)
            if sign > 0 or (not sign and low >= 0):
                equal.append(row([(a, 1.0), (z, -1.0)]))
                fixed.append(0.0)
            elif sign < 0 or high <= 0:
                limits[a] = (0.0, 0.0)
            else:
                slope = high / (high - low)
                rows += [row([(z, 1.0), (a, -1.0)]), row([(a, -1.0)]), row([(a, 1.0), (z, -slope)])]
                rhs += [0.0, 0.0, -slope * low]
        before, at = np.arange(at + 1, at + 2 * len(b), 2), at + 2 * len(b)
    cost = np.zeros(count)
    cost[before] = c @ layers[-1][0]
    result = linprog(
        cost,
        A_ub=np.array(rows) if rows else None,
        b_ub=rhs or None,
        A_eq=np.array(equal),
        b_eq=fixed,
        bounds=limits,
    )
    assert result.status == 0
    return float(result.fun + c @ layers[-1][1])


@pytest.mark.parametrize("seed", range(60))
def test_converted_duals_reach_the_linear_programme(seed: int) -> None:
    layers, lower, upper, bounds, c, splits = random_problem(seed)
    found = solve_triangle(layers, lower, upper, bounds, c, splits)
    assert found.value == pytest.approx(textbook_value(layers, lower, upper, bounds, c, splits), abs=1e-7)
    value = beta_crown_value(layers, lower, upper, bounds, c, splits, found.alphas, found.betas)
    assert value == pytest.approx(found.value, abs=1e-9)
    assert all(((alpha >= 0) & (alpha <= 1)).all() for alpha in found.alphas)
    assert set(found.betas) == set(splits)
    assert all(beta >= 0 for beta in found.betas.values())


def test_some_splits_bind() -> None:
    """Otherwise the test above would say nothing of beta."""
    binding = 0
    for seed in range(60):
        layers, lower, upper, bounds, c, splits = random_problem(seed)
        found = solve_triangle(layers, lower, upper, bounds, c, splits)
        none = dict.fromkeys(splits, 0.0)
        without = beta_crown_value(layers, lower, upper, bounds, c, splits, found.alphas, none)
        binding += without < found.value - 1e-4
    assert binding >= 10


@pytest.mark.parametrize("seed", range(20))
def test_no_slopes_give_more_than_the_linear_programme(seed: int) -> None:
    layers, lower, upper, bounds, c, splits = random_problem(seed)
    found = solve_triangle(layers, lower, upper, bounds, c, splits)
    random = np.random.default_rng(seed)
    for _ in range(50):
        alphas = [random.random(len(alpha)) for alpha in found.alphas]
        betas = {split: float(random.random() * random.choice([0.0, 0.1, 1.0])) for split in splits}
        value = beta_crown_value(layers, lower, upper, bounds, c, splits, alphas, betas)
        assert value <= found.value + 1e-9
