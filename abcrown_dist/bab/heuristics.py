"""Which neuron to split next: scores for all of them from one backward pass and one forward sweep.

* `babsr`: Bunel et al., "Branch and Bound for Piecewise Linear Neural Network Verification", JMLR 2020,
  section 5.2: how much the bound would change to first order if the neuron were fixed, with everything
  below the neuron's own bias left out.
* `gap`: how much the relaxation gives away at the minimiser of the bound,  |A| |line(z) - f(z)|.

Neither is reliable alone. fsb (De Palma et al., "Improved Branch and Bound for Neural Network Verification
via Lagrangian Decomposition", 2021) and kfsb of alpha-beta-CROWN therefore compare the best few by the
bounds that splitting them gives: fsb with CROWN's slopes, kfsb with those and the multipliers of the domain.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from abcrown_dist.bab.domains import pad_last
from abcrown_dist.bab.neurons import Neurons
from abcrown_dist.bab.slices import best
from abcrown_dist.bounds.backward import concretize, sweep
from abcrown_dist.bounds.beta import Problem, impose
from abcrown_dist.bounds.rules import relaxed_forward
from abcrown_dist.bounds.types import RelaxedNode
from abcrown_dist.graph.aten import classify
from abcrown_dist.weights.base import Weights


@dataclass(frozen=True)
class Rows:
    """One row of each of B domains, with all that bounds it.

    Attributes:
        problem: with R = 1.
        neuron, sign: (B, D) decisions.
        alpha, beta: (B, 1, U) and (B, 1, D), as domains keep them.
        enough: (B,) float64, the bound from which on a row is refuted.
        free: (B, neurons) bool, which may be split.
    """

    problem: Problem
    neuron: Tensor
    sign: Tensor
    alpha: Tensor
    beta: Tensor
    enough: Tensor
    free: Tensor


@dataclass(frozen=True)
class Branching:
    """How to choose: names as in `bab.branching`.

    Attributes:
        method: babsr, fsb or kfsb.
        candidates: how many of each score fsb and kfsb compare.
        reduceop: what makes one number of both children's bounds.
    """

    method: str = "kfsb"
    candidates: int = 3
    reduceop: str = "min"


class Chooser:
    """Chooses neurons of a network.

    Args:
        neurons: of the network.
        branching: how to choose.
    """

    def __init__(self, neurons: Neurons, branching: Branching) -> None:
        self.neurons, self.weights, self.branching = neurons, neurons.weights, branching
        self.steady = neurons.everywhere  # the same on any number of ranks
        self.biases = {source: _bias(neurons.weights, source) for source in neurons.offset}

    def choose(self, rows: Rows, count: int) -> Tensor:
        """The best `count` neurons (B, count) of every domain, all different; each has that many free."""
        babsr, gap = self.score(rows)
        if self.branching.method == "babsr":
            return best(babsr, count, self.steady)
        wanted = min(max(self.branching.candidates, count), babsr.shape[1])
        listed = torch.stack([best(score, wanted, self.steady) for score in (babsr, gap)], dim=2).flatten(1)
        value = self._by_bounds(rows, listed).nan_to_num(neginf=-1e300)  # what is free comes first
        value.masked_fill_(~rows.free.gather(1, listed), -torch.inf)
        value.masked_fill_(_repeated(listed), -torch.inf)
        return listed.gather(1, best(value, count, self.steady))

    def score(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Both scores (B, neurons), greater is better; -inf where a neuron is not free."""
        neurons, weights, problem = self.neurons, self.weights, rows.problem
        relaxed, tape = problem.relaxed, dict[str, Tensor]()
        linear, alphas = problem.linear(rows.alpha, rows.beta, tape, track_error=False)
        points = problem.inputs.minimiser(linear.A)
        babsr = torch.zeros(rows.free.shape, dtype=weights.dtype, device=weights.device)
        gap = torch.zeros_like(babsr)
        for name, z in sweep(weights, problem.start, relaxed, points, tape, alphas):
            source = relaxed.nodes[name].node.inputs[0]
            if source in neurons.offset:
                first = neurons.offset[source]
                here = slice(first, first + neurons.size[source])
                node, A = relaxed.nodes[name], tape[name]
                babsr[:, here] += _whole(weights, source, _babsr(node, A, self.biases[source]))
                gap[:, here] += _whole(weights, source, _gap(node, A, z, alphas.get(name)))
            del z
        return babsr.masked_fill(~rows.free, -torch.inf), gap.masked_fill(~rows.free, -torch.inf)

    def _by_bounds(self, rows: Rows, listed: Tensor) -> Tensor:
        """What splitting each of the neurons (B, K) would give, (B, K)."""
        values = []
        for column in listed.split(1, dim=1):
            sides = [self._bound(rows, column, sign) for sign in (1, -1)]
            values.append(_reduce(torch.stack(sides), rows.enough, self.branching.reduceop))
        return torch.stack(values, dim=1)

    def _bound(self, rows: Rows, column: Tensor, sign: int) -> Tensor:
        """Bounds (B,) with one more decision on the neurons (B, 1), not optimised."""
        signs = torch.cat([rows.sign, torch.full_like(column, sign, dtype=rows.sign.dtype)], dim=1)
        splits = self.neurons.splits(torch.cat([rows.neuron, column], dim=1), signs)
        relaxed = impose(rows.problem.relaxed, splits)
        problem = dataclasses.replace(rows.problem, relaxed=relaxed, splits=splits)
        beta = pad_last(rows.beta, signs.shape[1])
        if self.branching.method == "kfsb":
            linear, _ = problem.linear(problem.movable.project(rows.alpha, relaxed), beta, None, False)
        else:
            linear, _ = problem.linear(None, torch.zeros_like(beta), None, False)
        return concretize(self.weights, linear, problem.inputs, track_error=False).lower[:, 0]


def _reduce(sides: Tensor, enough: Tensor, reduceop: str) -> Tensor:
    """One number (B,) of both children's bounds (2, B); what is refuted cannot get better."""
    reached = torch.minimum(sides.double(), enough)
    worse, better = reached.min(0).values, reached.max(0).values
    # The other child decides between neurons that leave one child as it was.
    return worse + 1e-3 * better if reduceop == "min" else better + 1e-3 * worse


def _repeated(listed: Tensor) -> Tensor:
    """Mask (B, K) of entries that have occurred before in their row."""
    same = listed[:, :, None] == listed[:, None, :]
    return same.tril(-1).any(2)


def _whole(weights: Weights, source: str, own: Tensor) -> Tensor:
    return weights.whole(source, own[:, 0]).flatten(1)


def _babsr(node: RelaxedNode, A: Tensor, bias: Tensor | None) -> Tensor:
    slope = node.lines.upper_slope[:, None]
    intercept = 0 if node.lines.upper_intercept is None else node.lines.upper_intercept[:, None]
    bound = A.clamp(max=0) * intercept
    if bias is None:
        return bound.abs()
    moved = A * bias
    return (torch.maximum(moved * (slope - 1), moved * slope) + bound).abs()


def _bias(weights: Weights, source: str) -> Tensor | None:
    node = weights.graph[source]
    if classify(node) != "affine":
        return None
    with weights.visit(node) as affine:
        offset = affine.offset()
        return None if offset is None else offset.clone()  # it outlives the visit


def _gap(node: RelaxedNode, A: Tensor, z: Tensor, alpha: Tensor | None) -> Tensor:
    line = relaxed_forward(node, A, z, alpha)
    return A.abs() * (line - node.relaxation.value(node.node.attrs, z)).abs()
