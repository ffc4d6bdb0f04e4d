"""Bounds of real networks against those of auto_LiRPA, and against sampled outputs."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from abcrown_dist.bounds.alpha import AlphaSettings
from abcrown_dist.bounds.propagate import bound_intermediate, bound_outputs
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.bounds.types import Interval, preactivations
from abcrown_dist.weights.local import LocalWeights
from tests.bounds import oracle
from tests.bounds.sampling import assert_contains, sample_outputs

SINGLE = torch.float32
DOUBLE = torch.float64  # in float32 bounds are moved outward by more than some tolerances here


@pytest.fixture(params=oracle.NAMES)
def case(request: pytest.FixtureRequest, oracle_folder: Path, bench: Path) -> oracle.Case:
    return oracle.load(oracle_folder, bench, request.param)


@cache
def samples(case: oracle.Case) -> dict[str, Tensor]:
    return sample_outputs(case.graph, case.box, 0, 10_000, SINGLE)


def bounds(case: oracle.Case, settings: BoundSettings) -> Interval:
    with torch.no_grad():
        found = bound_outputs(LocalWeights(case.graph, DOUBLE), case.boxes(DOUBLE), settings)
    assert_contains(found, samples(case), 0, 1e-5)
    return found[case.graph.outputs[0]]


def relative(found: Interval, low: Tensor, high: Tensor) -> float:
    """Largest difference over largest magnitude of the reference."""
    off = torch.maximum((found.lower.flatten() - low).abs(), (found.upper.flatten() - high).abs()).max()
    return float(off / torch.maximum(low.abs(), high.abs()).max())


def mean_width(found: Interval) -> float:
    return float((found.upper.double() - found.lower.double()).mean())


@pytest.mark.parametrize(
    ("method", "key", "tolerance"),
    [("ibp", "IBP", 1e-5), ("crown-ibp", "CROWN-IBP", 1e-4), ("crown", "CROWN", 1e-4)],
)
def test_same_bounds(case: oracle.Case, method: str, key: str, tolerance: float) -> None:
    low, high = case.reference(key)
    found = bounds(case, BoundSettings(method=method, compare_with_ibp=False))
    assert relative(found, low, high) <= tolerance


def test_intersection_with_intervals_is_no_wider_in_the_mean(case: oracle.Case) -> None:
    low, high = case.reference("CROWN")
    found = bounds(case, BoundSettings(method="crown", compare_with_ibp=True))
    assert mean_width(found) <= (1 + 1e-5) * float((high - low).mean())


def test_same_bounds_of_unstable_pre_activations(case: oracle.Case) -> None:
    """Stable ones may come from interval bounds on either side."""
    with torch.no_grad():
        relaxed = bound_intermediate(
            LocalWeights(case.graph, DOUBLE), case.boxes(DOUBLE), BoundSettings(compare_with_ibp=False)
        )
    names, reference = preactivations(case.graph), case.preactivations()
    assert len(names) == len(reference)
    for name, (low, high) in zip(names, reference, strict=True):
        found = relaxed.intervals[name]
        lower, upper = found.lower.flatten(), found.upper.flatten()
        unstable = (low < 0) & (high > 0) & (lower < 0) & (upper > 0)
        differing = ((low < 0) & (high > 0)) != ((lower < 0) & (upper > 0))
        scale = torch.maximum(low.abs(), high.abs()).max()
        assert torch.minimum(low.abs(), high.abs())[differing].le(1e-4 * scale).all(), (
            "stable on one side only"
        )
        if unstable.any():
            off = torch.maximum((lower - low).abs(), (upper - high).abs())[unstable].max()
            assert off <= 1e-4 * scale


def test_optimised_bounds_are_as_tight(case: oracle.Case) -> None:
    """20 iterations at learning rate 0.1 on either side; ours layer by layer."""
    low, high = case.reference("alpha-CROWN")
    settings = BoundSettings(method="alpha-crown", alpha=AlphaSettings(iteration=20, lr_alpha=0.1))
    assert mean_width(bounds(case, settings)) <= 1.01 * float((high - low).mean())
