"""Refutation at the root: never of what can be fulfilled, whatever the magnitudes and margins."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from abcrown_dist.bab import root
from abcrown_dist.bab.clauses import Clauses, batches
from abcrown_dist.bounds.settings import METHODS
from abcrown_dist.spec.property import Disjunct
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.util.errors import DeadlineExceeded
from abcrown_dist.weights.evaluate import flat_network
from tests.bab.problems import Constant, Identity, box, disjunct, network, problem, run
from tests.bounds import zoo
from tests.exact import exact_minimum

DTYPES = [torch.float32, torch.float64]
PROVERS = ["ibp", "crown-ibp", "crown", "forward", "forward+alpha-crown", "alpha-crown"]


def layers_of(module: nn.Module) -> tuple[list[np.ndarray], list[np.ndarray]]:
    linear = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    return [x.weight.detach().numpy().astype(float) for x in linear], [
        x.bias.detach().numpy().astype(float) for x in linear
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("seed", range(8))
def test_never_refutes_what_can_be_fulfilled(seed: int, dtype: torch.dtype) -> None:
    """One constraint each, right-hand sides around the exact minimum: 14 x 16 properties per method."""
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    module = zoo.Mlp(2, 5, 4, 2)
    weights, biases = layers_of(module)
    gaps = [1.0, 0.1, 1e-2, 1e-4, 2e-6, 0.0, -1e-4, -1e-2, -0.1, -0.5, -1.0, -2.0, -4.0, -8.0]
    items: list[Disjunct] = []
    truth: list[float] = []
    for _ in range(4):
        low = random.normal(size=2)
        where = box(low.tolist(), (low + random.uniform(0, 1, 2)).tolist())
        for _ in range(2):
            c = random.normal(size=2)
            ends = where.outward()
            minimum = exact_minimum(weights, biases, *ends, c)
            for gap in gaps:
                items.append(disjunct(where, c, minimum + gap))
                truth.append(gap)
    prop, net = problem(*items), network(module, 2, dtype)
    strength = {}
    for method in PROVERS:
        result = run(net, prop, method, batch_size=3)
        assert not {i for i in result.refuted if truth[i] > 1e-5}
        assert not result.refuted & result.doubtful
        strength[method] = len(result.refuted)
    possible = sum(gap < 0 for gap in truth)
    assert 0 < strength["ibp"] < strength["crown"] <= strength["alpha-crown"] <= possible
    assert strength["alpha-crown"] > 0.5 * possible, "a prover that proves nothing passes for nothing"


@pytest.mark.parametrize("method", PROVERS)
def test_conjunctions_are_refuted_by_one_row_and_never_with_a_witness(method: str) -> None:
    """Random conjunctions, some with inputs: none that a sampled point fulfils is refuted."""
    torch.manual_seed(3)
    random = np.random.default_rng(3)
    module = zoo.Mlp(3, 6, 5, 3)
    net = network(module, 3, torch.float32)
    evaluate = flat_network(net.graph, net.to(torch.float64))
    items = []
    for _ in range(12):
        low = random.normal(size=3)
        where = box(low.tolist(), (low + random.uniform(0, 0.6, 3) * (random.uniform(size=3) < 0.8)).tolist())
        for _ in range(20):
            rows = int(random.integers(1, 5))
            D = random.normal(size=(rows, 3)) if random.uniform() < 0.4 else None
            items.append(disjunct(where, random.normal(size=(rows, 3)), random.normal(size=rows) * 0.7, D))
    prop = problem(*items)
    refuted = run(net, prop, method, batch_size=5).refuted
    assert 20 <= len(refuted) <= 230
    for index in refuted:
        item = prop.disjuncts[index]
        low, high = item.box.outward()
        x = torch.from_numpy(low + (high - low) * random.uniform(size=(3000, 3)))
        values = evaluate(x).numpy() @ item.C.T + (0 if item.D is None else x.numpy() @ item.D.T)
        assert not (values <= item.rhs - 1e-9).all(1).any()


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_batches_do_not_change_the_answer(batch_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    random = np.random.default_rng(1)
    net = network(zoo.Mlp(2, 8, 8, 2), 2, dtype)
    items = []
    for k in range(5):
        low = random.normal(size=2)
        where = box(low.tolist(), (low + 0.5).tolist())
        items += [
            disjunct(where, random.normal(size=(k + 1, 2)), random.normal(size=k + 1)) for _ in range(k + 1)
        ]
    prop = problem(*items)
    for method in ("crown", "crown-ibp", "forward"):
        whole, cut = run(net, prop, method), run(net, prop, method, batch_size=batch_size)
        assert (whole.refuted, whole.doubtful) == (cut.refuted, cut.doubtful)
        for index in range(len(items)):
            np.testing.assert_allclose(cut.margins[index], whole.margins[index], rtol=1e-4, atol=1e-5)


def test_optimisation_goes_on_until_the_proof_is_complete() -> None:
    """The search may stop only where the final judgement, with all its errors, will be content."""
    torch.manual_seed(0)
    module = zoo.Mlp(4, 16, 16, 1)
    net = network(module, 4)
    where = box([-1.0] * 4, [1.0] * 4)
    last = run(net, problem(disjunct(where, 0.1, 0.0)), "init-crown").margins[0][0]
    first = run(net, problem(disjunct(where, 0.1, 0.0)), "crown").margins[0][0]
    assert last > first + 1e-3
    middle = (first + last) / 2
    result = run(net, problem(disjunct(where, 0.1, middle)), "init-crown")
    assert result.refuted == {0}
    assert result.margins[0][0] < last - middle, "it stopped early"


class Affine(nn.Module):
    """y = 3 x0 - 2 x1 + 1/8: bounded without any error but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        with torch.no_grad():
            self.layer.weight.copy_(torch.tensor([[3.0, -2.0]]))
            self.layer.bias.fill_(0.125)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("gap", [0.0, 1e-7, -1e-7, 1e-3, -1e-3])
def test_margins_near_zero(gap: float, method: str) -> None:
    """Within its rounding a bound proves nothing, but says that more digits would decide."""
    where = box([-1.0, -0.5], [1.0, 2.0])  # minimum -3 - 4 + 1/8
    prop = problem(disjunct(where, 1.0, -6.875 - gap))  # y <= minimum - gap: false for a positive gap
    single = run(network(Affine(), 2, torch.float32), prop, method)
    double = run(network(Affine(), 2, torch.float64), prop, method)
    # Intervals are moved outward by their own rounding: what that costs shows in the margin.
    assert single.margins[0][0] == pytest.approx(gap, abs=1e-5 if method == "ibp" else 2e-6)
    assert (single.refuted == {0}) == (gap == 1e-3)
    assert (single.doubtful == {0}) == (abs(gap) < 1e-5 and method != "ibp")
    assert (double.refuted == {0}) == (gap > 0)
    assert (double.doubtful == {0}) == (gap == 0 and method != "ibp")


def test_rounded_coefficients_count() -> None:
    """0.1 is no float32: over inputs near 1e6 the loss exceeds a margin that looks proven."""
    where = box([1e6], [1e6])
    net = network(Identity(), 1, torch.float32)
    exact = 0.1 * 1e6
    lower = float(np.float32(0.1)) * 1e6
    assert lower > exact
    result = run(net, problem(disjunct(where, 0.1, exact), disjunct(where, 0.1, exact - 1)))
    assert result.refuted == {1} and result.doubtful == {0}


def test_what_coefficients_lost_counts_against_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss as large as the margin, per unit of the output, leaves nothing proven."""
    prop = problem(disjunct(box([1.0], [2.0]), 1.0, 0.5))  # y <= 1/2 on the identity over [1, 2]
    net = network(Identity(), 1)
    assert run(net, prop).refuted == {0}

    def losing(*args: Any) -> Iterator[Clauses]:
        for clauses in batches(*args):
            lost = {name: part + 0.26 for name, part in clauses.lost.items()}  # times |y| <= 2
            yield dataclasses.replace(clauses, lost=lost)

    monkeypatch.setattr(root, "batches", losing)
    result = run(net, prop)
    assert result.refuted == set() and result.doubtful == {0}


RANGES = [("135845", "216892", 1419.0), ("224027", "247495", 2942.0), ("252460", "267771", 4464.0)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("value", "expected"), [(0.0, {0, 1, 2}), (5000.0, set()), (2942.0, {2})])
def test_large_magnitudes(value: float, expected: set[int], dtype: torch.dtype, method: str) -> None:
    """Trap 7: an OR of input intervals with y >= t; the constant network 2942 meets the second exactly."""
    items = [disjunct(box([low], [high]), -1.0, -threshold) for low, high, threshold in RANGES]
    for batch_size in (1, 3):
        result = run(network(Constant(value), 1, dtype), problem(*items), method, batch_size=batch_size)
        assert result.refuted == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_assertions_conjoin(method: str, dtype: torch.dtype) -> None:
    """Trap 3: (Y0 <= 0 or Y0 >= 5) and Y1 <= 0 on the identity, Y1 in [1, 2]."""
    where = box([-1.0, 1.0], [-0.5, 2.0])
    prop = problem(
        disjunct(where, [[1, 0], [0, 1]], [0, 0]),
        disjunct(where, [[-1, 0], [0, 1]], [-5, 0]),
        disjunct(where, [[1, 0]], [0]),
    )
    assert run(network(Identity(), 2, dtype), prop, method).refuted == {0, 1}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_fixed_inputs_and_the_smallest_number(method: str, dtype: torch.dtype) -> None:
    """Traps 4 and 5: a constraint that holds with equality, and a right-hand side of -5e-324."""
    at_five = problem(disjunct(box([5.0], [5.0]), -1.0, -5.0))
    assert run(network(Identity(), 1, dtype), at_five, method).refuted == set()
    where = box(["-2.6", "-4.1"], ["3.4", "1.9"])
    for rhs in (0.0, -5e-324):
        greater = problem(disjunct(where, [[-1.0, 1.0]], rhs))
        assert run(network(Identity(), 2, dtype), greater, method).refuted == set()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_networks_that_overflow_prove_nothing(method: str, dtype: torch.dtype) -> None:
    """Trap 14: in float32 the network answers NaN or infinity, whatever real arithmetic says."""
    torch.manual_seed(0)
    module = zoo.Mlp(2, 4, 4, 4, 1)
    with torch.no_grad():
        for layer in module:
            if isinstance(layer, nn.Linear):
                layer.weight.fill_(1e16)
                layer.bias.zero_()
        last = module[-1]
        assert isinstance(last, nn.Linear)
        last.weight.fill_(1e-30)
    prop = problem(disjunct(box([0.5, 0.5], [1.0, 1.0]), 1.0, 0.0))  # y <= 0, while y is positive
    result = run(network(module, 2, dtype), prop, method)
    assert result.refuted == set()
    if dtype == torch.float64:
        assert run(network(module, 2, dtype), prop, method, largest=1e300).refuted == {0}, (
            "only overflow forbids it"
        )


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("method", METHODS)
def test_weights_that_are_no_numbers_prove_nothing(method: str, place: int, value: float) -> None:
    torch.manual_seed(0)
    module = zoo.Mlp(2, 4, 4, 2)
    with torch.no_grad():
        [layer for layer in module if isinstance(layer, nn.Linear)][place].weight[0, 0] = value
    where = box([0.5, 0.5], [1.0, 1.0])
    prop = problem(
        disjunct(where, [[1.0, 0.0]], -1e6),
        disjunct(where, [[0.0, 1.0]], -1e6),
        disjunct(where, [[1.0, 1.0]], -1e6),
    )
    result = run(network(module, 2), prop, method)
    assert result.refuted == set() and result.doubtful == set()


def test_a_row_over_inputs_and_outputs_needs_both_at_once() -> None:
    """relu(x) - x <= -0.1 has no solution; forgetting that x is one variable loses the proof."""
    prop = problem(
        disjunct(box([-1.0], [1.0]), 1.0, -0.1, -1.0), disjunct(box([-1.0], [1.0]), 1.0, 0.1, -1.0)
    )

    class Kink(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.relu()

    net = network(Kink(), 1)
    assert run(net, prop, "ibp").refuted == set()
    assert run(net, prop, "alpha-crown").refuted == {0}


def test_without_constraints_nothing_is_refuted() -> None:
    where = box([0.0], [1.0])
    empty = Disjunct(where, np.zeros((0, 1)), np.zeros(0))
    result = run(network(Identity(), 1), problem(empty, disjunct(where, 1.0, -1.0)))
    assert result.refuted == {1}
    assert 0 not in result.margins


def test_margins_and_suspects() -> None:
    """Margins are the bounds; suspects lie in their boxes and fulfil what the network can fulfil."""
    torch.manual_seed(2)
    random = np.random.default_rng(2)
    module = zoo.Mlp(3, 8, 2)
    net = network(module, 3)
    items = []
    for _ in range(6):
        low = random.normal(size=3)
        where = box(low.tolist(), (low + 0.2).tolist())
        items += [disjunct(where, random.normal(size=(2, 2)), random.normal(size=2)) for _ in range(3)]
    prop = problem(*items)
    result = run(net, prop, "crown")
    assert set(result.margins) == set(range(18))
    assert result.refuted == {i for i, margins in result.margins.items() if max(margins) > 1e-4}
    owners = {index for index, _ in result.suspects}
    assert owners == set(range(18)) - result.refuted
    evaluate = flat_network(net.graph, net.to(torch.float64))
    fulfilled = 0
    for index, point in result.suspects:
        assert point.shape == (3,) and point.dtype == np.float64
        low, high = prop.disjuncts[index].box.outward()
        assert (point >= low - 1e-6).all() and (point <= high + 1e-6).all()
        value = evaluate(torch.from_numpy(point)[None])[0].numpy()
        fulfilled += bool((prop.disjuncts[index].C @ value <= prop.disjuncts[index].rhs).all())
    assert fulfilled > 0


def test_a_deadline_ends_the_work() -> None:
    prop = problem(disjunct(box([0.0], [1.0]), 1.0, -1.0))
    with pytest.raises(DeadlineExceeded):
        run(network(Identity(), 1), prop, deadline=Deadline(0.0))


def test_absorbing_keeps_what_was_found_before() -> None:
    where = box([0.0, 0.0], [1.0, 1.0])
    prop = problem(
        disjunct(where, [[1, 0]], -1), disjunct(where, [[1, -1]], -0.5), disjunct(where, [[1, 0]], 0.0)
    )
    net = network(Identity(), 2)
    first = run(net, prop, "ibp")
    assert first.refuted == {0} and first.doubtful == {2}
    second = run(net.to(torch.float64), prop, "ibp", wanted=[2])
    first.absorb(second)
    assert first.refuted == {0} and set(first.margins) == {0, 1, 2}
