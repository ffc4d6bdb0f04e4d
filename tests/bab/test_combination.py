"""Disjuncts that no single row refutes, and rows that are refuted at their edge."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from abcrown_dist.bab.combination import Combination, judge_combined
from abcrown_dist.bab.domains import concatenate
from abcrown_dist.bab.judge import Judge
from abcrown_dist.bounds.types import RowBounds
from abcrown_dist.spec.property import Disjunct, Property, Verdict
from tests.bab.problems import box, disjunct, network, problem, run
from tests.bab.splitters import input_splitter, relu_splitter, weights_of
from tests.searches import draw, search

BOTH = [relu_splitter, input_splitter]


def layers(inputs: int, outputs: int, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, outputs))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return net


def cycle(gap: float, strict: bool = False) -> Property:
    """y0 >= y1 + gap, y1 >= y2 + gap, y2 >= y0 + gap over a wide box."""
    rows = [[-1, 1, 0], [0, -1, 1], [1, 0, -1]]
    item = disjunct(box([-1] * 6, [1] * 6), rows, [-gap] * 3)
    return problem(dataclasses.replace(item, strict=np.array([strict] * 3), terms=terms(rows, [-gap] * 3)))


Terms = tuple[tuple[dict[str, Decimal], Decimal], ...]


def terms(rows: Sequence[Sequence[float]], rhs: Sequence[float]) -> Terms:
    """As if written like that."""
    return tuple(
        ({f"Y_{i}": Decimal(value) for i, value in enumerate(row) if value}, Decimal(right))
        for row, right in zip(rows, rhs, strict=True)
    )


@pytest.mark.parametrize("method", ["crown", "alpha-crown", "crown-ibp"])
def test_a_cycle_is_refuted_over_the_whole_box(method: str) -> None:
    weights = network(layers(6, 3), 6)
    assert run(weights, cycle(0.01), method).refuted == {0}
    assert run(weights, cycle(-0.01), method).refuted == set()


def test_a_cycle_without_a_gap_is_refuted_by_its_strictness_alone() -> None:
    weights = network(layers(6, 3), 6)
    assert run(weights, cycle(0.0, strict=True)).refuted == {0}
    assert run(weights, cycle(0.0, strict=False)).refuted == set()


@pytest.mark.parametrize(("lam", "strict"), [([1.0, 1.0, 0.0], False), ([1.0, 1.0, 1.0], True)])
def test_a_combination_is_strict_where_a_row_in_it_is(lam: list[float], strict: bool) -> None:
    rows, rhs = [[-1, 1, 0], [1, -1, 0], [0, 0, 1]], [0.0, 0.0, 100.0]
    item = disjunct(box([-1] * 6, [1] * 6), rows, rhs)
    item = dataclasses.replace(item, strict=np.array([False, False, True]), terms=terms(rows, rhs))
    made = relu_splitter(network(layers(6, 3), 6), problem(item))
    combination = Combination.of(made.weights, made.goals)
    assert combination is not None
    combined = combination.mixture(torch.tensor([0])).combined(torch.tensor([lam]))
    found = judge_combined(made.weights, made.judge, combined, made.relaxed, made.box)
    assert found.strict.tolist() == [[False, False, True, strict]]


@pytest.mark.parametrize("splitter", BOTH)
@pytest.mark.parametrize(("gap", "proven"), [(0.01, True), (-0.01, False)])
def test_roots_of_searches_combine_rows(splitter: Callable[..., Any], gap: float, proven: bool) -> None:
    made = splitter(network(layers(6, 3), 6), cycle(gap))
    assert bool(made.bound(made.roots()).proven) is proven


@pytest.mark.parametrize("splitter", BOTH)
@pytest.mark.parametrize("size", [1.0, 3.0, 1000.0])
def test_rows_of_other_size_are_combined(splitter: Callable[..., Any], size: float) -> None:
    """y0 <= 0.5 and  size y0 >= 0.501 size."""
    item = disjunct(box([-1] * 6, [1] * 6), [[1, 0, 0], [-size, 0, 0]], [0.5, -0.501 * size])
    made = splitter(network(layers(6, 3), 6), problem(item))
    assert bool(made.bound(made.roots()).proven)
    assert run(made.weights, problem(item)).refuted == {0}


def test_goals_of_a_single_row_have_no_combination() -> None:
    item = disjunct(box([-1] * 6, [1] * 6), [[1, 0, 0]], [0.5])
    for splitter in BOTH:
        made = splitter(network(layers(6, 3), 6), problem(item, item))
        assert made.combination is None
        assert made.roots().state["lambda"].shape == (2, 0)


def test_a_goal_of_one_row_beside_one_of_two() -> None:
    where = box([-1] * 6, [1] * 6)
    prop = problem(
        disjunct(where, [[1, 0, 0], [-1, 0, 0]], [0.5, -0.6]), disjunct(where, [[1, 0, 0]], [0.5])
    )
    for splitter in BOTH:
        made = splitter(network(layers(6, 3), 6), prop)
        assert made.bound(made.roots()).proven.tolist() == [True, False]


def test_multipliers_are_inherited_and_kept() -> None:
    case = draw("mlp", 1, rows=3, disjuncts=1)
    for splitter in BOTH:
        made = splitter(weights_of(case), case.property([-0.01]))
        domains = made.bound(made.roots()).domains
        children = made.branch(domains, 1).children
        lam = children.state["lambda"]
        assert torch.equal(lam, domains.state["lambda"].expand(len(lam), -1))
        assert (lam >= 0).all()
        assert torch.allclose(lam.sum(1), torch.tensor(3.0))


def judge(strict: bool, rhs: float = 1.0, lost: float = 0.0) -> Judge:
    one = torch.ones(1, 1, dtype=torch.float64)
    return Judge(rhs * one, lost * one, one > 0, torch.tensor([[strict]]))


@pytest.mark.parametrize(
    ("strict", "lower", "error", "lost", "proven"),
    [
        (True, 1.0, 0.0, 0.0, True),
        (False, 1.0, 0.0, 0.0, False),
        (True, 1.0, 1e-30, 0.0, False),
        (True, 1.0, 0.0, 1e-30, False),
        (True, 0.9999999, 0.0, 0.0, False),
        (False, 1.5, 0.0, 0.0, True),
        (True, 1.5, 0.6, 0.0, False),
    ],
)
def test_a_strict_row_is_refuted_at_its_edge(
    strict: bool, lower: float, error: float, lost: float, proven: bool
) -> None:
    item = judge(strict, lost=lost)
    bounds = RowBounds(torch.tensor([[lower]]), torch.tensor([[error]]))
    assert bool(item.proves(*item.weigh(bounds))) is proven
    assert bool(item.verdicts(*item.weigh(bounds))[0]) is proven


def test_a_strict_row_proves_nothing_where_the_model_may_overflow() -> None:
    item = dataclasses.replace(judge(True), sane=torch.tensor([[False]]))
    bounds = RowBounds(torch.ones(1, 1), torch.zeros(1, 1))
    assert not item.proves(*item.weigh(bounds)).any()


def test_subtracting_what_is_nearly_equal_has_no_error() -> None:
    for rhs in (0.1, 1e-9, 3.0):
        _, error = judge(True, rhs).weigh(RowBounds(torch.tensor([[rhs]]).double() * 1.25, torch.zeros(1, 1)))
        assert float(error) == 0
    _, error = judge(True, 1e-9).weigh(RowBounds(torch.ones(1, 1).double(), torch.zeros(1, 1)))
    assert float(error) > 0


def equal_outputs(case_disjunct: Disjunct, gap: float) -> Disjunct:
    """The first row as an equality  row = c,  and  row >= c + gap."""
    row = case_disjunct.C[:1]
    c = float(case_disjunct.rhs[0])
    return disjunct(case_disjunct.box, np.concatenate([row, -row, -row]), [c, -c, -c - gap])


@pytest.mark.parametrize("kind", ["neurons", "inputs", "mip"])
@pytest.mark.parametrize("seed", range(3))
def test_an_equality_and_its_contradiction(kind: str, seed: int) -> None:
    """Without attack or bounds over the whole box, so that searches have to see it."""
    options = {
        "neurons": {"bab.branching.input_split.enable": False},
        "inputs": {"bab.branching.input_split.enable": True},
        "mip": {"general.complete_verifier": "mip"},
    }[kind]
    bare = {"attack.pgd_order": "skip", "general.enable_incomplete_verification": False}
    case = draw("mlp", seed, disjuncts=1)
    (first,) = case.property([0.1]).disjuncts
    outcome = search(case, problem(equal_outputs(first, 1e-3)), {**bare, **options})
    assert outcome.verdict is Verdict.UNSAT, outcome.reason


@pytest.mark.parametrize("splitter", BOTH)
def test_what_touches_its_edge_is_not_split_for_ever(splitter: Callable[..., Any]) -> None:
    """y >= max y: no bound in float32 or float64 tells it from rounding."""
    net = layers(8, 1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(0.1)
    weights = network(net, 8)
    top = float(net.double()(torch.ones(1, 8).double()).detach()) + 1e-16
    made = splitter(weights, problem(disjunct(box([-1] * 8, [1] * 8), [[-1]], [-top])))
    found, leaves = made.bound(made.roots()), []
    for _ in range(40):
        branched = made.branch(found.domains.select(~found.proven), 1)
        leaves.append(branched.leaves)
        if not len(branched.children):
            break
        found = made.bound(branched.children)
    assert not len(branched.children)
    last = concatenate(leaves)
    assert not made.examine(last).proven.any()
    assert 0 < len(last) < 4
    assert last.state["settled"].all()
