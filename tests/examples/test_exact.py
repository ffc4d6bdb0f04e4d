"""The oracle itself, against dense sampling."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.exact import exact_minimum


def _network(widths: list[int], seed: int) -> tuple[list[np.ndarray], list[np.ndarray], np.random.Generator]:
    rng = np.random.default_rng(seed)
    sizes = list(itertools.pairwise(widths))
    return [rng.normal(size=(o, i)) for i, o in sizes], [rng.normal(size=o) for _, o in sizes], rng


def _evaluate(weights: list[np.ndarray], biases: list[np.ndarray], x: np.ndarray) -> np.ndarray:
    for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
        x = np.maximum(x @ weight.T + bias, 0)
    return x @ weights[-1].T + biases[-1]


@pytest.mark.parametrize("widths", [[1, 4, 2], [1, 5, 3, 2], [2, 6, 4, 5, 3]])
@pytest.mark.parametrize("seed", range(3))
def test_minimum_is_reached_and_never_undercut(widths: list[int], seed: int) -> None:
    weights, biases, rng = _network(widths, seed)
    c, d = rng.normal(size=widths[-1]), 0.7
    low, high = np.full(widths[0], -1.0), np.full(widths[0], 1.5)
    minimum = exact_minimum(weights, biases, low, high, c, d)
    axis = np.linspace(-1, 1.5, 200_001 if widths[0] == 1 else 601)
    grid = np.stack(np.meshgrid(*[axis] * widths[0]), -1).reshape(-1, widths[0])
    sampled = (_evaluate(weights, biases, grid) @ c + d).min()
    steepest = np.abs(c) @ np.linalg.multi_dot([np.abs(w) for w in reversed(weights)]).sum(-1)
    assert minimum <= sampled + 1e-5
    assert minimum >= sampled - 1e-5 - steepest * (axis[1] - axis[0])


def test_fixed_inputs_and_affine_network() -> None:
    weight, bias = np.array([[2.0, -1.0]]), np.array([0.5])
    point = np.array([0.25, 1.0])
    assert exact_minimum([weight], [bias], point, point, np.array([1.0])) == pytest.approx(0.0)
    assert exact_minimum([weight], [bias], 0 * point, point, np.array([1.0])) == pytest.approx(-0.5)


def test_too_little_time_is_an_error_not_an_answer() -> None:
    weights, biases, _ = _network([20, 60, 60, 60, 1], 0)
    with pytest.raises(RuntimeError, match="HiGHS"):
        exact_minimum(weights, biases, -np.ones(20), np.ones(20), np.ones(1), time_limit=0.01)
