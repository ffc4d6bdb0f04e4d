"""Verdicts by mixed-integer programming against exact minima, and what must never be called refuted."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from abcrown_dist.exact import integer, mip
from abcrown_dist.exact.encode import Encoding, encode
from abcrown_dist.exact.highs import IntegerSolution
from abcrown_dist.exact.integer import IntegerBound, integer_minimum
from abcrown_dist.exact.mip import decide, pose
from abcrown_dist.exact.program import LinearBound, linear_minimum
from abcrown_dist.graph.load_torch import load_torch
from abcrown_dist.spec.property import Box, Disjunct
from abcrown_dist.weights.local import LocalWeights
from tests.bounds import zoo
from tests.exact import exact_minimum
from tests.lp_duals import Layers, interval_bounds, random_layers, relu_network

Array = np.ndarray

NOWHERE = Box((), ())  # `decide` takes the encoding's box


def disjunct(C: object, rhs: object, D: object | None = None) -> Disjunct:
    inputs = None if D is None else np.array(D, float, ndmin=2)
    return Disjunct(NOWHERE, np.array(C, float, ndmin=2), np.array(rhs, float, ndmin=1), inputs)


def relu_problem(seed: int, size: float = 1.0) -> tuple[Layers, Encoding, Array, float]:
    """A random network, its programme over a box, a row c, and the exact minimum of c y.

    Args:
        size: factor of the first layer (and its inverse of the second): of the big-M constants.
    """
    random = np.random.default_rng(seed)
    layers = random_layers(random, [3, 8, 6, 2])
    layers[0] = layers[0][0] * size, layers[0][1] * size
    layers[1] = layers[1][0] / size, layers[1][1]
    centre = random.standard_normal(3)
    lower, upper = centre - 0.8, centre + 0.8
    c = random.standard_normal(2)
    matrices, biases = [W for W, _ in layers], [b for _, b in layers]
    minimum = exact_minimum(matrices, biases, lower, upper, c)
    weights = relu_network(layers)
    names = [node.inputs[0] for node in weights.graph if node.op == "relu"]
    bounds = dict(zip(names, interval_bounds(layers, lower, upper), strict=True))
    return layers, encode(weights, lower, upper, bounds), c, minimum


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("seed", range(8))
def test_verdicts_equal_exact_minima(seed: int, size: float) -> None:
    _, encoding, c, minimum = relu_problem(seed, size)
    assert encoding.program.integral.any()
    for gap in (1e-4, 1e-2, 1.0):
        below = decide(encoding, disjunct(c, minimum - gap), np.ones(1))
        assert below.outcome == "refuted"
        assert below.bound <= gap + 1e-5
        above = decide(encoding, disjunct(c, minimum + gap), np.ones(1))
        assert above.outcome == "candidate"
        assert above.point is not None
        assert c @ encoding.network(above.point[None])[0] <= minimum + gap
        assert ((encoding.lower <= above.point) & (above.point <= encoding.upper)).all()


@pytest.mark.parametrize("seed", range(8))
def test_bounds_reach_the_exact_minimum_from_below(seed: int) -> None:
    _, encoding, c, minimum = relu_problem(seed)
    question = pose(encoding, disjunct(c, minimum - 1.0), np.ones(1))
    relaxation = linear_minimum(question.program, question.cost)
    assert relaxation.solution is not None
    assert question.violation(relaxation.value) <= 1.0 + 1e-6
    found = integer_minimum(question.program, question.cost)
    assert found is not None and found.optimal
    assert 1.0 - 1e-3 <= question.violation(found.value) <= 1.0 + 1e-6
    assert 0 < found.margin < 1e-3


def minimum_over_patterns(layers: Layers, lower: Array, upper: Array, c: Array) -> float:
    """Minimum of c y by trying every activation pattern of a network with one hidden layer."""
    from scipy.optimize import linprog

    (W, b), (V, d) = layers
    best = math.inf
    for pattern in itertools.product([0.0, 1.0], repeat=len(b)):
        on = np.array(pattern)
        sign = 2 * on - 1
        result = linprog(
            (c @ V * on) @ W,
            A_ub=-sign[:, None] * W,
            b_ub=sign * b,
            bounds=np.stack([lower, upper], axis=1),
        )
        if result.status == 0:
            best = min(best, result.fun + float((c @ V * on) @ b + c @ d))
    return best


@pytest.mark.parametrize("seed", range(6))
def test_verdicts_equal_enumeration(seed: int) -> None:
    random = np.random.default_rng(100 + seed)
    layers = random_layers(random, [3, 7, 2])
    lower, upper = -np.ones(3), np.ones(3)
    c = random.standard_normal(2)
    minimum = minimum_over_patterns(layers, lower, upper, c)
    encoding = encode(relu_network(layers), lower, upper, {})
    assert decide(encoding, disjunct(c, minimum - 1e-4), np.ones(1)).outcome == "refuted"
    assert decide(encoding, disjunct(c, minimum + 1e-4), np.ones(1)).outcome == "candidate"


ZOO = """
    mlp deep leaky steep_leaky cnn residual shared two_inputs_two_outputs decoder pooled sliced pass_through
    relu_output
""".split()


def minimum_on_a_line(encoding: Encoding, C: Array) -> float:
    """Least value of max_k C_k y for a box that is a line: piecewise linear, so grids in grids find it."""
    low, high = 0.0, 1.0
    best = math.inf
    cells = [(low, high)]
    for _ in range(4):
        shares = np.concatenate([np.linspace(a, b, 2001) for a, b in cells])
        x = encoding.lower + (encoding.upper - encoding.lower) * shares[:, None]
        values = (encoding.network(x) @ C.T).max(axis=1)
        best = min(best, float(values.min()))
        width = (cells[0][1] - cells[0][0]) / 2000
        cells = [(max(0.0, s - width), min(1.0, s + width)) for s in shares[np.argsort(values)[:20]]]
    return best


@pytest.mark.parametrize("name", ZOO)
def test_verdicts_on_every_kind_of_network(name: str) -> None:
    """Convolutions, residuals, concatenations, several inputs and outputs; two clauses at once."""
    weights = LocalWeights(zoo.graph(name), torch.float64)
    graph = weights.graph
    random = np.random.default_rng(7)
    centre = random.standard_normal(graph.input_size)
    lower, upper = centre.copy(), centre.copy()
    lower[-1], upper[-1] = lower[-1] - 2, upper[-1] + 2
    encoding = encode(weights, lower, upper, {})
    C = random.standard_normal((2, graph.output_size))
    minimum = minimum_on_a_line(encoding, C)
    gap = 1e-3 * max(1.0, abs(minimum))
    below = decide(encoding, disjunct(C, np.full(2, minimum - gap)), np.ones(2), time_limit=60)
    assert below.outcome == "refuted"
    above = decide(encoding, disjunct(C, np.full(2, minimum + gap)), np.ones(2), time_limit=60)
    assert above.outcome == "candidate"
    assert above.point is not None
    assert (C @ encoding.network(above.point[None])[0] <= minimum + gap + 1e-6).all()


def absolute() -> LocalWeights:
    """y = |x|, by two neurons."""
    module = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1)).double()
    with torch.no_grad():
        module[0].weight.copy_(torch.tensor([[1.0], [-1.0]]))
        module[0].bias.zero_()
        module[2].weight.fill_(1.0)
        module[2].bias.zero_()
    return LocalWeights(load_torch(module, torch.zeros(1, 1).double()).graph, torch.float64)


def test_clauses_of_a_disjunct_count_together_with_the_input() -> None:
    """|x| <= 0.5 and x >= 0.6 are each possible, but not together; |x| <= 0.5 and x >= 0.4 are."""
    encoding = encode(absolute(), -np.ones(1), np.ones(1), {})
    C, D = [[1.0], [0.0]], [[0.0], [-1.0]]
    assert decide(encoding, disjunct(C, [0.5, -0.6], D), np.ones(2)).outcome == "refuted"
    found = decide(encoding, disjunct(C, [0.5, -0.4], D), np.ones(2))
    assert found.outcome == "candidate"
    assert found.point is not None and 0.4 <= found.point[0] <= 0.5


def test_violations_are_measured_in_scales() -> None:
    """|x| >= 0 exceeds -1e-5 by 1e-5: proof at scale 1, within the tolerance at scale 100."""
    encoding = encode(absolute(), -np.ones(1), np.ones(1), {})
    item = disjunct([[1.0]], [-1e-5])
    assert decide(encoding, item, np.ones(1)).outcome == "refuted"
    assert decide(encoding, item, np.full(1, 100.0)).outcome != "refuted"


@pytest.mark.parametrize("big", [1e3, 1e6, 1e9])
def test_large_constants_never_make_a_false_proof(big: float) -> None:
    """With bounds of +-1e9 a binary at 1e-6 leaks 1000: open or candidate, but never refuted."""
    for seed in range(6):
        layers, tight, c, minimum = relu_problem(seed)
        weights = relu_network(layers)
        names = [node.inputs[0] for node in weights.graph if node.op == "relu"]
        loose = {name: (np.full(n, -big), np.full(n, big)) for name, n in zip(names, (8, 6), strict=True)}
        encoding = encode(weights, tight.lower, tight.upper, loose, as_given=True)
        for gap in (1e-5, 1e-3):
            found = decide(encoding, disjunct(c, minimum + gap), np.ones(1), time_limit=5)
            assert found.outcome != "refuted"
            found = decide(encoding, disjunct(c, minimum - gap), np.ones(1), time_limit=5)
            assert found.outcome != "refuted" or found.bound <= gap


def test_the_margin_grows_with_the_constants() -> None:
    layers, tight, c, minimum = relu_problem(0)
    weights = relu_network(layers)
    names = [node.inputs[0] for node in weights.graph if node.op == "relu"]
    margins = []
    for big in (10.0, 1e3, 1e5):
        loose = {name: (np.full(n, -big), np.full(n, big)) for name, n in zip(names, (8, 6), strict=True)}
        encoding = encode(weights, tight.lower, tight.upper, loose, as_given=True)
        question = pose(encoding, disjunct(c, minimum - 1.0), np.ones(1))
        relaxation = linear_minimum(question.program, question.cost)
        assert relaxation.solution is not None
        found = integer_minimum(question.program, question.cost)
        assert found is not None
        margins.append(found.margin)
    assert margins[0] < margins[1] / 10 < margins[2] / 100


def hard() -> tuple[Encoding, Disjunct]:
    """More binaries than can be branched on at once, and a threshold that only branching decides."""
    random = np.random.default_rng(0)
    layers = random_layers(random, [20, 60, 60, 60, 1])
    encoding = encode(relu_network(layers), -np.ones(20), np.ones(20), {})
    points = random.random((20000, 20)) * 2 - 1
    least = float(encoding.network(points).min())
    return encoding, disjunct([[1.0]], [least - 3.0])


@pytest.mark.parametrize("limit", [0.0, 0.01, 1.0])
def test_time_limits_end_in_unknown(monkeypatch: pytest.MonkeyPatch, limit: float) -> None:
    encoding, item = hard()
    granted: list[float] = []
    real = integer.solve_milp

    def watch(*args: object, time_limit: float) -> IntegerSolution | None:
        granted.append(time_limit)
        return real(*args, time_limit=time_limit)  # type: ignore[arg-type]

    monkeypatch.setattr(integer, "solve_milp", watch)
    found = decide(encoding, item, np.ones(1), time_limit=limit)
    assert found.outcome == "unknown"
    assert found.reason
    assert found.point is not None
    assert sum(granted) <= limit


@pytest.mark.parametrize(("last", "outcome"), [(2.0, "refuted"), (10.0, "unknown")])
def test_branching_is_asked_again_with_more_time(
    monkeypatch: pytest.MonkeyPatch, last: float, outcome: str
) -> None:
    """HiGHS cannot be told to stop at a bound: short slices first, their best bound is kept."""
    encoding, item = hard()
    duals = [-0.5, -0.2, -0.4, last]
    granted: list[float] = []

    def slow(program: object, cost: Array, *, time_limit: float) -> IntegerBound:
        granted.append(time_limit)
        return IntegerBound(duals[len(granted) - 1], 0.0, False, None, 1)

    monkeypatch.setattr(mip, "integer_minimum", slow)
    found = decide(encoding, item, np.ones(1), time_limit=1e6)
    assert len(granted) == len(duals)
    assert granted == sorted(granted) and granted[0] < 10
    assert found.outcome == outcome  # the least violation is about 3, so that 10 cannot be true


def test_a_bound_that_a_point_contradicts_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, encoding, c, minimum = relu_problem(1)
    item = disjunct(c, minimum - 0.1)
    assert decide(encoding, item, np.ones(1)).outcome == "refuted"
    lie = IntegerBound(1e3, 0.0, True, None, 1)
    monkeypatch.setattr(mip, "integer_minimum", lambda *_, **__: lie)
    monkeypatch.setattr(mip, "linear_minimum", _weakened)
    found = decide(encoding, item, np.ones(1))
    assert found.outcome == "unknown"
    assert "wrong" in found.reason


def test_a_bound_with_a_large_margin_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even after subtracting it: tolerances that matter make HiGHS miss by more than any estimate."""
    encoding, item = hard()
    for margin, outcome in ((1e-4, "refuted"), (1.0, "unknown")):
        answer = IntegerBound(2.0, margin, True, None, 1)
        monkeypatch.setattr(mip, "integer_minimum", lambda *_, answer=answer, **__: answer)
        assert decide(encoding, item, np.ones(1)).outcome == outcome


def _weakened(*args: object, **options: object) -> LinearBound:
    """The linear relaxation, its bound withheld, so that branching decides."""
    return replace(linear_minimum(*args, **options), value=-math.inf)  # type: ignore[arg-type]


@pytest.mark.parametrize("dual", [math.nan, math.inf, -math.inf])
def test_a_solver_without_a_finite_bound_proves_nothing(monkeypatch: pytest.MonkeyPatch, dual: float) -> None:
    _, encoding, c, minimum = relu_problem(1)
    answer = IntegerSolution(optimal=True, dual=dual, value=math.inf, x=None, nodes=0)
    monkeypatch.setattr(integer, "solve_milp", lambda *_, **__: answer)
    monkeypatch.setattr(mip, "linear_minimum", _weakened)
    assert decide(encoding, disjunct(c, minimum - 0.1), np.ones(1)).outcome == "unknown"


def test_a_solver_that_gives_up_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _, encoding, c, minimum = relu_problem(1)
    monkeypatch.setattr(integer, "solve_milp", lambda *_, **__: None)
    monkeypatch.setattr(mip, "linear_minimum", _weakened)
    assert decide(encoding, disjunct(c, minimum - 0.1), np.ones(1)).outcome == "unknown"


def test_no_clauses_make_every_point_a_candidate() -> None:
    encoding = encode(absolute(), -np.ones(1), np.ones(1), {})
    found = decide(encoding, Disjunct(NOWHERE, np.zeros((0, 1)), np.zeros(0)), np.zeros(0))
    assert found.outcome == "candidate"


@pytest.mark.parametrize("rhs", [math.nan, -math.inf])
def test_clauses_that_are_not_finite_prove_nothing(rhs: float) -> None:
    encoding = encode(absolute(), -np.ones(1), np.ones(1), {})
    assert decide(encoding, disjunct([[1.0]], [rhs]), np.ones(1)).outcome == "unknown"


def test_a_box_that_is_a_point() -> None:
    encoding = encode(absolute(), np.full(1, -0.5), np.full(1, -0.5), {})
    assert decide(encoding, disjunct([[1.0]], [0.499]), np.ones(1)).outcome == "refuted"
    assert decide(encoding, disjunct([[1.0]], [0.501]), np.ones(1)).outcome == "candidate"
    assert decide(encoding, disjunct([[1.0]], [0.5 - 1e-7]), np.ones(1)).outcome != "refuted"
