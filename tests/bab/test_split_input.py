"""Domains that are boxes: halves cover them, and what is cut off holds no counterexample."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from torch import nn

from abcrown_dist.bab.domains import Domains, concatenate
from abcrown_dist.bab.split_input import InputSplitter, contracted
from abcrown_dist.bounds.settings import METHODS, BoundSettings
from tests.bab.problems import box, disjunct, network, problem
from tests.bab.splitters import input_splitter, random_points, values_at, weights_of
from tests.searches import FAMILIES, draw

NAN, INFINITY = float("nan"), float("inf")


def halved(splitter: InputSplitter, rounds: int, levels: int = 1) -> Domains:
    """All boxes after some rounds, refuted or not."""
    domains = splitter.bound(splitter.roots()).domains
    for _ in range(rounds):
        branched = splitter.branch(domains, levels)
        domains = concatenate([splitter.bound(branched.children).domains, branched.leaves])
    return domains


def holds(domains: Domains, points: torch.Tensor) -> torch.Tensor:
    """Mask (domains, points)."""
    lower, upper = domains.state["lower"].double()[:, None], domains.state["upper"].double()[:, None]
    return ((points >= lower) & (points <= upper)).all(2)


@pytest.mark.parametrize("method", ["sb", "naive"])
@pytest.mark.parametrize(("rounds", "levels"), [(4, 1), (2, 2), (1, 6)])
def test_halves_cover_the_box(method: str, rounds: int, levels: int) -> None:
    case = draw("mlp", 3, disjuncts=1)
    splitter = input_splitter(weights_of(case), case.property([-0.01]), method=method, clip=False)
    domains = halved(splitter, rounds, levels)
    item = case.disjuncts[0]
    found = holds(domains, random_points((item.lower, item.upper), 3000))
    assert (found.sum(0) >= 1).all()
    assert (found.sum(0) == 1).double().mean() > 0.9
    assert len(domains) == 2 ** (rounds * min(levels, len(item.lower)))
    assert len(domains.ident.unique()) == len(domains)
    lower, upper = domains.state["lower"].double(), domains.state["upper"].double()
    whole = np.prod(item.upper - item.lower)
    assert float((upper - lower).prod(1).sum()) == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("clip", [True, False])
def test_no_counterexample_is_lost_and_no_domain_with_one_is_refuted(family: str, clip: bool) -> None:
    cut = 0.0
    for seed in range(4):
        case = draw(family, seed, disjuncts=1)
        item = case.disjuncts[0]
        margin = 0.2  # many counterexamples
        splitter = input_splitter(weights_of(case), case.property([margin]), clip=clip)
        points = random_points((item.lower, item.upper), 4000, seed)
        y = values_at(splitter.weights, points)[splitter.weights.graph.outputs[0]].flatten(1).numpy()
        rows = y @ item.C.T - (item.base + item.least + margin * item.scale)
        worst = torch.from_numpy(rows.max(1))
        domains = halved(splitter, 5)
        bounded = splitter.bound(domains)
        found = holds(domains, points)
        assert found[:, worst <= 0].any(0).all()
        for b in torch.nonzero(found.any(1)).flatten().tolist():
            least = worst[found[b]].min()
            assert not bounded.proven[b] or least > 0
            if not clip:
                assert bounded.domains.margin[b] <= least + 1e-5 * item.scale
        cut += float((~found.any(0)).double().mean())
    assert (cut > 0) is clip


@pytest.mark.parametrize("method", [m for m in METHODS if m != "forward+alpha-crown"])
def test_every_bound_method_is_sound(method: str) -> None:
    case = draw("mlp", 4, disjuncts=1)
    item = case.disjuncts[0]
    splitter = input_splitter(
        weights_of(case), case.property([0.1]), bounds=BoundSettings(method=method), clip=True
    )
    points = random_points((item.lower, item.upper), 2000)
    y = values_at(splitter.weights, points)[splitter.weights.graph.outputs[0]].flatten(1).numpy()
    worst = torch.from_numpy((y @ item.C.T - (item.base + item.least + 0.1 * item.scale)).max(1))
    domains = halved(splitter, 4)
    assert holds(domains, points)[:, worst <= 0].any(0).all()
    assert not splitter.bound(domains).proven[holds(domains, points)[:, worst <= 0].any(1)].any()


# The contraction by itself


def linear_problem(
    seed: int, count: int = 6, rows: int = 3, inputs: int = 3, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    """Random boxes with random functions  A x + b  that are positive in a part of them."""
    random = torch.Generator().manual_seed(seed)
    lower = torch.randn(count, inputs, generator=random, dtype=torch.float64).to(dtype)
    width = torch.rand(count, inputs, generator=random, dtype=torch.float64).to(dtype)
    width[0, 0] = 0
    upper = lower + width
    A = torch.randn(count, rows, inputs, generator=random, dtype=torch.float64).to(dtype)
    A[1, 0] = 0
    low, high, slope = lower.double()[:, None], upper.double()[:, None], A.double()
    share = 0.05 + 0.9 * torch.rand(count, rows, generator=random, dtype=torch.float64)
    least, most = (
        (slope * torch.where(slope > 0, low, high)).sum(2),
        (slope * torch.where(slope > 0, high, low)).sum(2),
    )
    margin = -share * (most - least)
    return lower, upper, A, margin, least


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(6))
def test_contraction_keeps_every_point_that_no_row_refutes(seed: int, dtype: torch.dtype) -> None:
    lower, upper, A, margin, least = linear_problem(seed, dtype=dtype)
    error = 1e-3 * torch.rand(
        margin.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    low, high = contracted(lower, upper, A, margin, error)
    assert (low >= lower).all() and (high <= upper).all() and (low <= high).all()
    smaller = 0
    for b in range(len(lower)):
        points = random_points((lower[b].double().numpy(), upper[b].double().numpy()), 20000, seed)
        rows = points @ A[b].double().T - least[b] + margin[b]  # the functions minus right-hand sides
        kept = points[(rows <= error[b]).all(1)]
        assert ((kept >= low[b].double()) & (kept <= high[b].double())).all()
        smaller += bool((high[b] - low[b] < upper[b] - lower[b]).any())
        # The corner that is just not refuted lies on the new border: it could not be tighter by one row.
    assert smaller >= 3


def test_contraction_reaches_the_border_and_counts_the_error() -> None:
    """x + 2 y - 1 <= 0 on [0, 1]^2, within an error of 0.5: x <= 1 stays, y <= 0.75."""
    ends = torch.zeros(1, 2), torch.ones(1, 2)
    A = torch.tensor([[[1.0, 2.0]]])
    for error, most in ((0.0, 0.5), (0.5, 0.75)):
        low, high = contracted(*ends, A, torch.tensor([[-1.0]]).double(), torch.tensor([[error]]).double())
        assert low.tolist() == [[0, 0]]
        assert high[0].tolist() == pytest.approx([1, most], abs=1e-6)
        assert high[0, 1] >= most
    low, high = contracted(*ends, -A, torch.tensor([[-1.0]]).double(), torch.zeros(1, 1).double())
    assert low[0].tolist() == pytest.approx([0, 0.5], abs=1e-6)
    assert low[0, 1] <= 0.5


@pytest.mark.parametrize(
    ("slope", "margin", "error"),
    [
        (NAN, -1.0, 0.0), (1.0, NAN, 0.0), (1.0, -1.0, NAN), (1.0, -INFINITY, NAN), (0.0, -1.0, 0.0),
        (0.0, 0.0, 0.0), (1e-300, -1.0, 0.0), (1.0, -1.0, INFINITY),
    ],
)  # fmt: skip
def test_what_is_not_finite_cuts_nothing(slope: float, margin: float, error: float) -> None:
    ends = torch.tensor([[-1.0, 2.0]]), torch.tensor([[1.0, 2.0]])
    A = torch.tensor([[[slope, 1.0]]], dtype=torch.float64)
    low, high = contracted(*ends, A, torch.tensor([[margin]]).double(), torch.tensor([[error]]).double())
    if slope == slope:
        assert low.tolist() == ends[0].tolist()
    assert low[0, 0] == -1 and high[0, 0] == 1
    assert (low <= high).all()


def test_a_refuted_box_stays_a_box() -> None:
    """Both ends are cut away: nothing is left, and no crossed bounds come of it."""
    ends = torch.zeros(1, 2), torch.ones(1, 2)
    A = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]])
    low, high = contracted(*ends, A, torch.tensor([[-0.2, -0.3]]).double(), torch.zeros(1, 2).double())
    assert (low <= high).all()


# Boxes that cannot be split


def test_a_point_is_a_leaf_and_is_bounded_in_double_precision() -> None:
    """y = x at 0.5: above 0.5 - 1e-9 as float64 can tell, and float32 cannot."""
    for rhs, proven in ((0.5 - 1e-9, True), (0.5, False), (0.5 + 1e-9, False)):
        prop = problem(disjunct(box([0.5], [0.5]), [[1]], [rhs]))
        splitter = input_splitter(network(nn.Identity(), 1), prop)
        root = splitter.bound(splitter.roots())
        assert root.proven.tolist() == [proven]
        branched = splitter.branch(root.domains, 1)
        assert len(branched.children) == 0 and len(branched.leaves) == 1
        assert splitter.examine(branched.leaves).proven.tolist() == [proven]


def test_in_double_precision_a_leaf_stays_open() -> None:
    prop = problem(disjunct(box([0.5], [0.5]), [[1]], [0.5]))
    splitter = input_splitter(network(nn.Identity(), 1, torch.float64), prop)
    assert splitter.examine(splitter.roots()).proven.tolist() == [False]


def test_a_fixed_input_is_never_split() -> None:
    case = draw("convolutional", 0, disjuncts=1)
    item = case.disjuncts[0]
    upper = np.where([False, True, False], item.lower, item.upper)
    fixed = dataclasses.replace(case, disjuncts=[dataclasses.replace(item, upper=upper)])
    splitter = input_splitter(weights_of(case), fixed.property([-0.01]), clip=False)
    domains = halved(splitter, 6)
    assert len(domains) == 64
    root = splitter.roots()
    assert (domains.state["lower"][:, 1] == root.state["lower"][0, 1]).all()
    assert (domains.state["upper"][:, 1] == root.state["upper"][0, 1]).all()


def test_halving_comes_to_an_end() -> None:
    """Boxes of a few floats are leaves, at any magnitude."""
    for value in (0.0, 1e-3, 1.0, 1e6):
        high = float(np.float32(value) + np.spacing(np.float32(value)) * 3)
        prop = problem(disjunct(box([value], [high]), [[1]], [value]))
        splitter = input_splitter(network(nn.Identity(), 1), prop, clip=False)
        domains = splitter.bound(splitter.roots()).domains
        for _ in range(12):
            domains = splitter.branch(domains, 1).children
            if not len(domains):
                break
        assert not len(domains), value


@pytest.mark.parametrize("largest", [65504.0, 3e38])
def test_what_the_models_own_numbers_cannot_hold_proves_nothing(largest: float) -> None:
    net = nn.Linear(1, 1)
    with torch.no_grad():
        net.weight.fill_(1e5)
        net.bias.zero_()
    splitter = input_splitter(network(net, 1), problem(disjunct(box([1], [1]), [[1]], [10])), largest=largest)
    assert splitter.bound(splitter.roots()).proven.tolist() == [largest > 1e5]
    assert splitter.examine(splitter.roots()).proven.tolist() == [largest > 1e5]


def test_boxes_of_several_disjuncts_are_judged_by_their_own_rows() -> None:
    corners = [box(low, high) for low, high in itertools.pairwise([[0.0], [1.0], [2.0], [3.0]])]
    prop = problem(*(disjunct(where, [[1]], [1.5]) for where in corners))
    splitter = input_splitter(network(nn.Identity(), 1), prop, clip=False)
    bounded = splitter.bound(splitter.roots())
    verdict = dict(
        zip(
            [splitter.disjuncts[g] for g in bounded.domains.goal.tolist()],
            bounded.proven.tolist(),
            strict=True,
        )
    )
    assert verdict == {0: False, 1: False, 2: True}
