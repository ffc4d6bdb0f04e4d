"""Domains cut out by signs: they cover the box, their bounds hold in them, and leaves are decided exactly."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from abcrown_dist.bab.domains import Domains, concatenate
from abcrown_dist.bab.heuristics import Branching
from abcrown_dist.bab.split_relu import ReluSplitter
from abcrown_dist.bab.splitter import Bounded
from abcrown_dist.bounds.beta import BetaSettings
from abcrown_dist.bounds.settings import BoundSettings
from tests.bab.problems import box, disjunct, network, problem
from tests.bab.splitters import inside, random_points, relu_splitter, values_at, weights_of
from tests.searches import FAMILIES, Case, draw

METHODS = ["babsr", "fsb", "kfsb"]


def grown(splitter: ReluSplitter, rounds: int, levels: int = 1) -> tuple[Domains, Domains]:
    """All domains, refuted or not, after some rounds of splitting each, and the leaves on the way."""
    domains = splitter.bound(splitter.roots()).domains
    leaves = domains.select(slice(0, 0))
    for _ in range(rounds):
        branched = splitter.branch(domains, levels)
        leaves = concatenate([leaves, branched.leaves])
        domains = branched.children
        if not len(domains):
            break
        domains = splitter.bound(domains).domains
    return domains, leaves


def first_disjunct(case: Case, margin: float = -0.01) -> ReluSplitter:
    """A splitter about the first disjunct alone."""
    single = dataclasses.replace(case, disjuncts=case.disjuncts[:1])
    return relu_splitter(weights_of(case), single.property([margin]), branching=Branching("babsr"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("rounds", "levels"), [(3, 1), (2, 2), (1, 3)])
def test_every_point_lies_in_exactly_one_child(family: str, rounds: int, levels: int) -> None:
    case = draw(family, 0)
    splitter = first_disjunct(case)
    domains, leaves = grown(splitter, rounds, levels)
    points = random_points((case.disjuncts[0].lower, case.disjuncts[0].upper), 2000)
    every = concatenate([domains, leaves])
    found = inside(splitter, every, values_at(splitter.weights, points))
    # On a sign's border a point lies on both sides (a ReLU of the input: on the box's faces).
    assert (found.sum(0) == 1).double().mean() > 0.7
    assert (found.sum(0) >= 1).all()
    assert len(every.ident.unique()) == len(every) >= 4
    assert 2 <= int(every.depth.min()) <= int(every.depth.max()) <= rounds * levels


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recompute", [False, True])
def test_bounds_hold_at_every_point_of_a_domain(family: str, recompute: bool) -> None:
    for seed in range(4):
        case = draw(family, seed)
        item = case.disjuncts[0]
        single = dataclasses.replace(case, disjuncts=[item])
        anew = BoundSettings("crown") if recompute else None
        splitter = relu_splitter(weights_of(case), single.property([-0.01]), recompute=anew)
        points = random_points((item.lower, item.upper), 3000, seed)
        values = values_at(splitter.weights, points)
        output = splitter.weights.graph.outputs[0]
        rows, rhs = splitter.goals.rows[output][0].flatten(1).double(), splitter.goals.rhs[0]
        worst = (values[output].flatten(1) @ rows.T - rhs).amax(1)
        domains, leaves = grown(splitter, 4)
        bounded = splitter.bound(concatenate([domains, leaves]))
        mask = inside(splitter, bounded.domains, values)
        for b in range(len(mask)):
            if mask[b].any():
                # The greatest of the rows' bounds lies below the greatest of the rows, everywhere.
                assert bounded.domains.margin[b] <= worst[mask[b]].min() + 1e-5 * item.scale
                assert not bounded.proven[b] or worst[mask[b]].min() > 0


def test_gaps_and_order_of_decisions_change_no_bound() -> None:
    case = draw("mlp", 1)
    splitter = first_disjunct(case)
    domains = splitter.branch(splitter.bound(splitter.roots()).domains, 3).children
    state = dict(domains.state)
    empty = torch.zeros_like(state["sign"][:, :2])
    for name in ("sign", "neuron"):
        gap = empty.to(state[name].dtype)
        state[name] = torch.cat([gap, state[name][:, :2], gap, state[name][:, 2:]], dim=1)
    gap = torch.zeros_like(state["beta"][:, :, :1]).expand(-1, -1, 2)
    state["beta"] = torch.cat([gap, state["beta"][:, :, :2], gap, state["beta"][:, :, 2:]], dim=2)
    plain, gapped = splitter.bound(domains), splitter.bound(dataclasses.replace(domains, state=state))
    assert torch.equal(plain.domains.margin, gapped.domains.margin)
    assert gapped.domains.state["sign"].shape[1] == 3


def open_margins(bounded: Bounded) -> dict[int, float]:
    """Margins of what is not refuted, by identity."""
    left = bounded.domains.select(~bounded.proven)
    return dict(zip(left.ident.tolist(), left.margin.tolist(), strict=True))


@pytest.mark.parametrize("family", ["mlp", "convolutional"])
def test_slices_give_the_same_bits_in_any_order(family: str) -> None:
    """What bab.force_synchronous rests on. A refuted domain goes on until its neighbours are done."""
    case = draw(family, 2)
    prop = case.property([0.01] * len(case.disjuncts))
    fixed = BetaSettings(iteration=5, prune=None)
    splitter = relu_splitter(weights_of(case), prop, slice=4, beta=fixed, root=fixed)
    domains = splitter.branch(splitter.bound(splitter.roots()).domains, 3).children
    found = []
    for seed in (0, 1):
        order = torch.randperm(len(domains), generator=torch.Generator().manual_seed(seed))
        found.append(open_margins(splitter.bound(domains.select(order))))
    part = open_margins(splitter.bound(domains.select(slice(0, 3))))
    assert found[0] == found[1]
    assert len(found[0]) >= 2
    assert part == {ident: found[0][ident] for ident in domains.ident[:3].tolist() if ident in found[0]}


@pytest.mark.parametrize("family", FAMILIES)
def test_leaves_are_decided_as_the_exact_answer_says(family: str) -> None:
    """Everything is split to the end and bounds refute nothing: linear programs alone decide."""
    case = draw(family, 5, rows=3, disjuncts=1, most=7)
    for margin in (-0.01, 0.01):
        splitter = first_disjunct(case, margin)
        _, leaves = grown(splitter, 8)
        assert len(leaves) >= 8
        examined = splitter.examine(leaves)
        assert bool(examined.proven.all()) is (margin < 0)
        assert (examined.margin[examined.proven] > 0).all()
        if margin > 0:  # and the program's point is the counterexample
            item = case.disjuncts[0]
            y = np.stack([case.evaluate(x) for x in examined.points[~examined.proven].numpy()])
            assert ((y @ item.C.T - item.base).max(1) <= item.least + 0.0101 * item.scale).any()


def linear(weight: list[list[float]], bias: list[float]) -> nn.Linear:
    layer = nn.Linear(len(weight[0]), len(weight))
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight))
        layer.bias.copy_(torch.tensor(bias))
    return layer


class Fork(nn.Module):
    """y = (relu(x), relu(-x))."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.cat([x, -x], 1))


def test_a_leaf_is_empty_though_no_constraint_shows_it_alone() -> None:
    """Both outputs >= 0.5: each can be, both cannot. On the leaf (+, -) the second is 0, and so on."""
    prop = problem(disjunct(box([-2], [2]), [[-1, 0], [0, -1]], [-0.5, -0.5]))
    splitter = relu_splitter(network(Fork(), 1), prop)
    _, leaves = grown(splitter, 3)
    examined = splitter.examine(leaves)
    assert len(leaves) == 4
    assert examined.proven.all()


def test_a_conjunction_of_both_sides_needs_the_program() -> None:
    """y >= 0.5 and y <= 0.4, y = x: neither constraint has a positive bound."""
    prop = problem(disjunct(box([-2], [2]), [[-1], [1]], [-0.5, 0.4]))
    splitter = relu_splitter(network(nn.Identity(), 1), prop)
    assert splitter.bound(splitter.roots()).proven.all()  # by the combination of both
    splitter.combination = None
    alone = splitter.roots()
    kept = {"alpha": alone.state["alpha"][:, :2], "beta": alone.state["beta"][:, :2]}
    root = splitter.bound(dataclasses.replace(alone, state={**alone.state, **kept}))
    assert not root.proven.any()
    assert (root.domains.margin < 0).all()
    leaves = splitter.branch(root.domains, 1).leaves
    assert splitter.examine(leaves).proven.tolist() == [True]
    touching = problem(disjunct(box([-2], [2]), [[-1], [1]], [-0.5, 0.5]))
    splitter = relu_splitter(network(nn.Identity(), 1), touching)
    assert splitter.examine(splitter.roots()).proven.tolist() == [False]


def test_rounded_constraints_prove_no_leaf() -> None:
    """x >= c and x <= c - gap with a gap below what the program may be off: not refuted."""
    for gap, proven in ((1e-9, False), (1e-3, True)):
        prop = problem(disjunct(box([1], [2]), [[-1], [1]], [-1.5, 1.5 - gap]))
        splitter = relu_splitter(network(nn.Identity(), 1), prop)
        assert splitter.examine(splitter.roots()).proven.tolist() == [proven]


@pytest.mark.parametrize("largest", [65504.0, 3e38])
def test_what_the_models_own_numbers_cannot_hold_proves_nothing(largest: float) -> None:
    """y = 300 relu(300 x) is far above 10 in [1, 2], but float16 knows no 180000: open, also as a leaf."""
    net = nn.Sequential(linear([[300.0]], [0.0]), nn.ReLU(), linear([[300.0]], [0.0]))
    prop = problem(disjunct(box([1], [2]), [[1]], [10]))
    splitter = relu_splitter(network(net, 1), prop, largest=largest)
    root = splitter.bound(splitter.roots())
    leaves = splitter.branch(root.domains, 1).leaves
    assert len(leaves) == 1
    assert root.proven.tolist() == splitter.examine(leaves).proven.tolist() == [largest > 1e5]


def test_an_empty_domain_is_refuted_in_the_end_with_recomputed_bounds() -> None:
    """x < 0 makes relu(x) - 1 = -1, whose sign cannot be +: bounds of this neuron cross."""
    net = nn.Sequential(
        *(linear([[1.0], [-1.0]], [0.0, 0.0]), nn.ReLU(), linear([[1.0, 0.0], [0.0, 1.0]], [-1.0, -1.0])),
        *(nn.ReLU(), linear([[1.0, 1.0]], [0.0])),
    )
    prop = problem(disjunct(box([-2], [2]), [[1]], [-0.001]))
    splitter = relu_splitter(network(net, 1), prop, recompute=BoundSettings("crown"))
    _, leaves = grown(splitter, 6)
    bounded = splitter.bound(leaves)
    assert bounded.domains.margin.isfinite().all()
    assert (bounded.proven | splitter.examine(leaves).proven).all()


@pytest.mark.parametrize("method", METHODS)
def test_several_goals_share_a_splitter(method: str) -> None:
    """Each domain is judged by the rows of its own disjunct."""
    net = nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 2))
    where = box([-1], [1])
    prop = problem(
        disjunct(where, [[1, 0]], [-1000]),
        disjunct(where, [[0, 1], [1, 0]], [1000, 1000]),
        disjunct(where, [[1, 0], [0, 1]], [1000, -1000]),
    )
    splitter = relu_splitter(network(net, 1), prop, branching=Branching(method))
    bounded = splitter.bound(splitter.roots())
    assert bounded.proven.tolist() == [True, False, True]
    assert bounded.domains.state["row"][2].tolist() == [1]


def test_a_short_disjunct_is_not_judged_by_rows_of_others() -> None:
    """Goals are filled up to the same number of rows, with what proves nothing."""
    where = box([-1], [1])
    prop = problem(disjunct(where, [[1], [1]], [-1000, 1000]), disjunct(where, [[1]], [1000]))
    net = nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 1))
    splitter = relu_splitter(network(net, 1), prop)
    assert splitter.bound(splitter.roots()).proven.tolist() == [True, False]
