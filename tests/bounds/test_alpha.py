"""Optimised slopes: right gradients, strict gains, and the optimum that linear programming knows."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor, nn

from abcrown_dist.bounds.alpha import AlphaSettings, gradients, initial_alphas, maximise
from abcrown_dist.bounds.backward import Start, back_substitute, concretize, lower_bound
from abcrown_dist.bounds.concretize import Box
from abcrown_dist.bounds.propagate import bound_intermediate, bound_outputs
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.bounds.types import OneHot, Relaxed, RowBounds
from abcrown_dist.graph.ir import Graph
from abcrown_dist.weights.local import LocalWeights
from tests.bounds import zoo
from tests.bounds.sampling import sample_outputs
from tests.weights.laws import captured

DOUBLE = torch.float64
PATIENT = 10**9


class Problem:
    """A network with relaxed nonlinearities over some boxes, and rows over its first output."""

    def __init__(
        self, graph: Graph, count: int = 2, rows: int = 3, seed: int = 0, radius: float = 0.6
    ) -> None:
        self.weights = LocalWeights(graph, DOUBLE)
        self.box: Box = zoo.boxes(graph, count, DOUBLE, radius=radius, seed=seed)
        with torch.no_grad():
            self.relaxed: Relaxed = bound_intermediate(
                self.weights, self.box, BoundSettings(compare_with_ibp=False)
            )
        random = torch.Generator().manual_seed(seed)
        name = graph.outputs[0]
        self.start: Start = {name: torch.randn(1, rows, *graph[name].shape, generator=random, dtype=DOUBLE)}

    def value(self, alphas: Mapping[str, Tensor]) -> Tensor:
        return self.gradients(alphas)[0].lower

    def gradients(self, alphas: Mapping[str, Tensor]) -> tuple[RowBounds, dict[str, Tensor]]:
        with torch.no_grad():
            return gradients(self.weights, self.start, self.relaxed, self.box, alphas)

    def initial(self) -> dict[str, Tensor]:
        return initial_alphas(self.start, self.relaxed, self.weights)

    def optimum(self, iteration: int, **options: float) -> RowBounds:
        settings = AlphaSettings(iteration=iteration, early_stop_patience=PATIENT, **options)
        with torch.no_grad():
            return maximise(self.weights, self.start, self.relaxed, self.box, settings).bounds


GRADIENT_NETS = ["mlp", "leaky", "cnn", "sliced", "shared", "residual", "decoder"]


@pytest.mark.parametrize("at", ["crown", "random"])
@pytest.mark.parametrize("name", GRADIENT_NETS)
def test_closed_form_equals_differences(name: str, at: str) -> None:
    """One-sided differences agree with the derivative, or enclose it where a slope sits on a kink."""
    problem = Problem(zoo.graph(name))
    alphas = problem.initial()
    assert alphas
    random = torch.Generator().manual_seed(1)
    if at == "random":
        for key, alpha in alphas.items():
            low, high = _range(problem, key)
            alphas[key] = low + (high - low) * torch.rand(alpha.shape, generator=random, dtype=DOUBLE)
    here, slopes = problem.gradients(alphas)
    step, smooth, total, largest = 1e-6, 0, 0, 0.0
    for key, alpha in alphas.items():
        assert slopes[key].shape == alpha.shape
        largest = max(largest, float(slopes[key].abs().max()))
        low, high = _range(problem, key)
        free = (low < high).any(0).flatten().nonzero().flatten()
        for neuron in free[torch.randperm(len(free), generator=random)[:12]].tolist():
            sides = []
            for change in (step, -step):
                moved = alpha.flatten(2).clone()
                moved[:, :, neuron] += change
                value = problem.value({**alphas, key: moved.reshape(alpha.shape)})
                sides.append((value - here.lower) / change)
            slope = slopes[key].flatten(2)[:, :, neuron]
            least, most = torch.minimum(*sides), torch.maximum(*sides)
            tolerance = 1e-6 * (1 + slope.abs())
            assert (least - tolerance <= slope).all() and (slope <= most + tolerance).all()
            smooth += int((most - least <= tolerance).sum())
            total += slope.numel()
    assert total >= 18 and smooth >= 0.9 * total, "differences say little on kinks"
    assert largest > 1e-3, "a gradient that vanishes at the start moves no slope"


def _range(problem: Problem, name: str) -> tuple[Tensor, Tensor]:
    span = problem.relaxed.nodes[name].lines.alpha_range
    assert span is not None
    return span[0][:, None], span[1][:, None]


@pytest.mark.parametrize("name", GRADIENT_NETS)
def test_optimising_gains_and_never_loses(name: str) -> None:
    """Bounds of single rows never fall, and rise where slopes matter, but not above sampled values."""
    problem = Problem(zoo.graph(name), radius=1.0, rows=6)
    with torch.no_grad():
        before = lower_bound(problem.weights, problem.start, problem.relaxed, problem.box).lower
    after = problem.optimum(20).lower
    assert (after >= before).all()
    assert (after > before + 1e-3).any()
    assert problem.optimum(0).lower.equal(before)
    ((key, rows),) = problem.start.items()
    assert isinstance(rows, Tensor)
    for domain in range(2):
        outputs = sample_outputs(problem.weights.graph, problem.box, domain, 2000)[key]
        assert (after[domain] <= (outputs.flatten(1) @ rows[0].flatten(1).T).amin(0) + 1e-12).all()


class Turned(nn.Module):
    """Permutations between the nonlinearities: coefficients reach them in memory that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 5, 2), nn.Linear(5, 5)
        self.last = nn.Linear(45, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu().permute(0, 2, 3, 1)  # channels last
        return self.last(self.second(h).relu().permute(0, 3, 1, 2).flatten(1))


class Straight(Turned):
    """The same function without a permutation between activation and dense layer."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.second.weight[:, :, None, None]
        h = nn.functional.conv2d(self.first(x).relu(), weight, self.second.bias)
        return self.last(h.relu().flatten(1))


def test_layout_in_memory_does_not_matter() -> None:
    """An optimiser that pairs slopes and gradients by their place in memory fails here."""
    found, gains = [], []
    for kind in (Turned, Straight):
        torch.manual_seed(3)
        graph = captured(kind().double(), [(1, 2, 4, 4)])
        problem = Problem(graph, count=1, rows=4)
        tape: dict[str, Tensor] = {}
        with torch.no_grad():
            back_substitute(problem.weights, problem.start, problem.relaxed, tape=tape)
            start = lower_bound(problem.weights, problem.start, problem.relaxed, problem.box).lower
        if kind is Turned:
            assert any(not A.is_contiguous() for A in tape.values()), "nothing is put to the test"
        found.append(problem.optimum(15).lower)
        gains.append(found[-1] - start)
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)
    assert (gains[0] > 1e-3).all()


def test_kept_slopes_give_the_bounds_that_come_with_them() -> None:
    problem = Problem(zoo.graph("cnn"))
    settings = AlphaSettings(iteration=12, early_stop_patience=PATIENT)
    with torch.no_grad():
        result = maximise(
            problem.weights, problem.start, problem.relaxed, problem.box, settings, keep_alphas=True
        )
    torch.testing.assert_close(problem.value(result.alphas), result.bounds.lower, rtol=1e-11, atol=1e-11)
    for key, alpha in result.alphas.items():
        low, high = _range(problem, key)
        assert (alpha >= low).all() and (alpha <= high).all()


def test_the_callback_ends_the_search_with_the_best_so_far() -> None:
    problem = Problem(zoo.graph("mlp"))
    seen: list[Tensor] = []

    def stop(best: RowBounds) -> bool:
        seen.append(best.lower.clone())
        return len(seen) == 3

    settings = AlphaSettings(iteration=50, early_stop_patience=PATIENT)
    with torch.no_grad():
        result = maximise(problem.weights, problem.start, problem.relaxed, problem.box, settings, stop=stop)
    assert len(seen) == 3
    assert torch.equal(result.bounds.lower, seen[-1])
    assert all((late >= early).all() for early, late in pairwise(seen))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("sizes", [(3, 8, 2), (2, 6, 6, 2), (4, 7, 7, 7, 3)])
def test_many_iterations_reach_the_linear_programme(sizes: tuple[int, ...], seed: int) -> None:
    """With pre-activation bounds fixed, the best slopes give the triangle relaxation's optimum."""
    torch.manual_seed(seed)
    module = zoo.Mlp(*sizes).double()
    problem = Problem(captured(module, [(1, sizes[0])]), count=1, rows=3, seed=seed, radius=1.5)
    start = problem.initial()
    if not start:
        pytest.skip("no nonlinearity")
    crown = problem.value(start)[0].numpy()
    best = problem.optimum(300, lr_alpha=0.1, lr_decay=0.985).lower[0].numpy()
    (rows,) = problem.start.values()
    assert isinstance(rows, Tensor)
    for row, value, plain in zip(rows[0].flatten(1).numpy(), best, crown, strict=True):
        optimum = triangle_optimum(module, problem, row)
        assert value <= optimum + 1e-6
        assert plain <= value + 1e-12
        assert optimum - value <= 0.02 * (optimum - plain) + 1e-3 * abs(optimum)


def triangle_optimum(module: nn.Sequential, problem: Problem, row: np.ndarray) -> float:
    """min row y over the triangle relaxation (Ehlers, 2017) with the problem's pre-activation bounds."""
    layers = [layer for layer in module if isinstance(layer, nn.Linear)]
    (low,), (high,) = problem.box.lower.values(), problem.box.upper.values()
    names = [node.node.inputs[0] for node in problem.relaxed.nodes.values()]
    widths = [low.numel(), *(layer.out_features for layer in layers[:-1])]
    offsets = np.cumsum([0, *widths])
    limits: list[tuple[float | None, float | None]] = list(
        zip(low.flatten().tolist(), high.flatten().tolist(), strict=True)
    )
    A_ub, b_ub = [], []
    for k, (layer, name) in enumerate(zip(layers[:-1], names, strict=True)):
        W, b = layer.weight.detach().numpy(), layer.bias.detach().numpy()
        lower, upper = (
            side.flatten().numpy()
            for side in (problem.relaxed.intervals[name].lower, problem.relaxed.intervals[name].upper)
        )
        for i, (w, c, lo, up) in enumerate(zip(W, b, lower, upper, strict=True)):
            z = np.zeros(offsets[-1])
            z[offsets[k] : offsets[k + 1]] = w
            a = np.zeros(offsets[-1])
            a[offsets[k + 1] + i] = 1
            slope = 1.0 if lo >= 0 else 0.0 if up <= 0 else up / (up - lo)
            shift = 0.0 if lo >= 0 or up <= 0 else -slope * lo
            if not up <= 0:
                A_ub.append(z - a)  # a >= z
                b_ub.append(-c)
            A_ub.append(a - slope * z)  # a <= slope z + shift
            b_ub.append(slope * c + shift)
            limits.append((None, None) if lo >= 0 else (0, None))
    last = layers[-1]
    cost = np.zeros(offsets[-1])
    cost[offsets[-2] :] = row @ last.weight.detach().numpy()
    result = linprog(cost, A_ub=np.array(A_ub), b_ub=np.array(b_ub), bounds=limits, method="highs")
    assert result.status == 0, result.message
    return float(result.fun + row @ last.bias.detach().numpy())


def test_layers_are_optimised_one_after_the_other() -> None:
    """alpha-CROWN tightens pre-activations too: no wider than slopes optimised at the end alone."""
    for name in ("deep", "cnn", "residual"):
        graph = zoo.graph(name)
        weights, box = LocalWeights(graph, DOUBLE), zoo.boxes(graph, 2, DOUBLE, radius=0.6)
        widths = {}
        for method in ("crown", "init-crown", "alpha-crown"):
            with torch.no_grad():
                bounds = bound_outputs(weights, box, BoundSettings(method=method))
            widths[method] = float(sum((x.upper - x.lower).mean() for x in bounds.values()))
        assert widths["alpha-crown"] < 0.999 * widths["init-crown"] < 0.999 * widths["crown"]


def test_one_hot_starts_equal_written_out_rows() -> None:
    graph = zoo.graph("residual")
    problem = Problem(graph)
    for node in problem.relaxed.nodes.values():
        name = node.node.inputs[0]
        size = graph[name].size
        hot = OneHot(torch.arange(size).flip(0), torch.tensor([1.0, -1.0]).repeat(size)[:size])
        with torch.no_grad():
            short = lower_bound(problem.weights, {name: hot}, problem.relaxed, problem.box)
            dense = {name: hot.dense(graph[name].shape, DOUBLE)}
            long = lower_bound(problem.weights, dense, problem.relaxed, problem.box)
        torch.testing.assert_close(short.lower, long.lower, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(short.error, long.error, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["mlp", "deep", "cnn", "residual"])
def test_the_error_is_that_of_the_best_slopes(name: str) -> None:
    """Not that of the first ones or the last ones, which may be less."""
    problem = Problem(zoo.graph(name))
    with torch.no_grad():
        found = maximise(
            problem.weights, problem.start, problem.relaxed, problem.box,
            AlphaSettings(iteration=25, lr_alpha=0.5), keep_alphas=True,
        )  # fmt: skip
        linear = back_substitute(problem.weights, problem.start, problem.relaxed, alphas=found.alphas)
        again = concretize(problem.weights, linear, problem.box)
    torch.testing.assert_close(again.lower, found.bounds.lower, rtol=1e-9, atol=1e-9)
    assert (again.error <= found.bounds.error * (1 + 1e-9)).all()
