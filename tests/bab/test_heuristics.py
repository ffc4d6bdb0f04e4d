"""Which neuron is split: free ones only, all different, and the one that decides."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from abcrown_dist.bab.domains import Domains
from abcrown_dist.bab.heuristics import Branching, _reduce
from abcrown_dist.bab.split_relu import ReluSplitter
from abcrown_dist.bounds.beta import BetaSettings
from tests.bab.problems import box, disjunct, network, problem
from tests.bab.splitters import relu_splitter, weights_of
from tests.searches import FAMILIES, draw

METHODS = ["babsr", "fsb", "kfsb"]


def rooted(splitter: ReluSplitter) -> Domains:
    return splitter.bound(splitter.roots()).domains


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_chosen_neurons_are_free_and_all_different(family: str, method: str) -> None:
    case = draw(family, 1)
    prop = case.property([0.01] * len(case.disjuncts))
    splitter = relu_splitter(weights_of(case), prop, branching=Branching(method, candidates=2))
    domains = rooted(splitter)
    for levels in (1, 2, 3, 6):
        children = splitter.branch(domains, levels).children
        if not len(children):
            break
        for neuron, sign in zip(children.state["neuron"].long(), children.state["sign"], strict=True):
            taken = neuron[sign != 0].tolist()
            assert len(set(taken)) == len(taken)
            assert splitter.neurons.loose[taken].all()
        domains = splitter.bound(children).domains


class Unequal(nn.Module):
    """y = 0.01 relu(x0) - 3 relu(x1) + 0.1 relu(x2): the second neuron's relaxation gives most away."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) @ torch.tensor([[0.01], [-3.0], [0.1]])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("reduceop", ["min", "max"])
def test_the_neuron_with_the_largest_gap_comes_first(method: str, reduceop: str) -> None:
    """-3 relu(x1) is relaxed to -1.5 (x1 + 1): splitting it raises both children's bounds."""
    prop = problem(disjunct(box([-1] * 3, [1] * 3), [[1]], [-2.9]))
    splitter = relu_splitter(
        network(Unequal(), 3), prop, branching=Branching(method, candidates=3, reduceop=reduceop)
    )
    children = splitter.branch(rooted(splitter), 1).children
    assert children.state["neuron"].tolist() == [[1], [1]]
    assert children.state["sign"].tolist() == [[1], [-1]]


@pytest.mark.parametrize("method", ["fsb", "kfsb"])
def test_with_all_candidates_the_best_by_bounds_is_taken(method: str) -> None:
    """Against splitting on each neuron in turn and bounding the children without any step."""
    still = BetaSettings(iteration=1)
    better = 0
    for seed in range(6):
        case = draw("mlp", seed, rows=1, disjuncts=1)
        prop = case.property([-0.01])
        splitter = relu_splitter(
            weights_of(case), prop, branching=Branching(method, candidates=99), beta=still, root=still
        )
        domains = rooted(splitter)
        branched = splitter.branch(domains, 1)
        if not len(branched.children):
            continue
        best = splitter.bound(branched.children).domains.margin
        for neuron in torch.nonzero(splitter.neurons.loose).flatten().tolist():
            state = dict(branched.children.state)
            state["neuron"] = torch.full_like(state["neuron"], neuron)
            other = splitter.bound(dataclasses.replace(branched.children, state=state)).domains.margin
            # What is refuted cannot get better.
            assert other.clamp(max=0).min() <= best.clamp(max=0).min() + 1e-5
            better += bool(other.clamp(max=0).min() < best.clamp(max=0).min() - 1e-4)
    assert better >= 2


def test_children_are_compared_by_the_worse_or_the_better_one() -> None:
    sides = torch.tensor([[-3.0, -1.0, 5.0], [-1.0, -2.0, -2.0]])
    enough = torch.zeros(3, dtype=torch.float64)
    worse, better = _reduce(sides, enough, "min"), _reduce(sides, enough, "max")
    assert worse.tolist() == pytest.approx([-3.001, -2.001, -2.0])
    assert better.tolist() == pytest.approx([-1.003, -1.002, -0.002])
