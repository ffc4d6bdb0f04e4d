"""Bounds over domains that signs cut out: sound at any multipliers, and as tight as linear programming."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from abcrown_dist.bounds.backward import Start
from abcrown_dist.bounds.beta import (
    BetaSettings,
    Optimised,
    Problem,
    Split,
    Splits,
    cut_interval,
    evaluate,
    gradients,
    impose,
    maximise,
)
from abcrown_dist.bounds.concretize import Box
from abcrown_dist.bounds.propagate import bound_intermediate
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.bounds.slopes import Movable
from abcrown_dist.bounds.types import Interval, Relaxed, RowBounds
from abcrown_dist.graph.execute import cast, execute_all
from abcrown_dist.graph.ir import Graph
from abcrown_dist.graph.load_torch import load_torch
from abcrown_dist.weights.local import LocalWeights
from tests import lp_duals
from tests.bounds import zoo
from tests.bounds.sampling import sample_inputs

DOUBLE = torch.float64
PATIENT = 10**9
NETS = ["mlp", "deep", "leaky", "steep_leaky", "cnn", "residual", "shared", "sliced", "relu_output"]
SMOOTH = ["mlp", "leaky", "cnn", "residual", "shared", "sliced", "relu_output"]


class Setting:
    """Domains of one box of a network of the zoo, each cut out by the signs at one of its points.

    Attributes:
        loose: neurons of the box that may be split, by pre-activation.
        values: of all nodes at points of the box, (points, *shape) by name, in float64.
        splits: of `count` domains, each of which holds at least one of the points.
    """

    def __init__(
        self,
        graph: Graph,
        count: int = 4,
        decisions: int = 5,
        rows: int = 3,
        seed: int = 0,
        dtype: torch.dtype = DOUBLE,
        radius: float = 1.5,
    ) -> None:
        self.graph, self.weights = graph, LocalWeights(graph, dtype)
        while True:  # not every box leaves something to split
            self.box: Box = zoo.boxes(graph, 1, dtype, radius=radius, seed=seed)
            with torch.no_grad():
                self.relaxed: Relaxed = bound_intermediate(self.weights, self.box, BoundSettings())
            self.loose = self._loose()
            if len(self.loose) >= 4:
                break
            seed += 100
        points = sample_inputs(self.box, 0, 2000, seed)
        exact = cast(graph, DOUBLE)
        self.values = torch.func.vmap(lambda *xs: execute_all(exact, xs))(
            *(points[name] for name in graph.inputs)
        )
        self.random = torch.Generator().manual_seed(seed)
        self.splits = self._signs_at_points(count, decisions)
        output = graph.outputs[0]
        shape = (1, rows, *graph[output].shape)
        self.start: Start = {output: torch.randn(shape, generator=self.random, dtype=DOUBLE).to(dtype)}
        self.count, self.rows, self.decisions = count, rows, decisions

    def _loose(self) -> list[tuple[str, int]]:
        loose = []
        for node in self.relaxed.nodes.values():
            source = node.node.inputs[0]
            interval = self.relaxed.intervals[source]
            for index in torch.nonzero(((interval.lower < 0) & (interval.upper > 0)).flatten()).flatten():
                loose.append((source, int(index)))
        return list(dict.fromkeys(loose))

    def _signs_at_points(self, count: int, decisions: int) -> dict[str, Split]:
        loose = self.loose
        sources = list(dict.fromkeys(name for name, _ in loose))
        index = {name: torch.zeros(count, decisions, dtype=torch.int64) for name in sources}
        sign = {name: torch.zeros(count, decisions, dtype=self.weights.dtype) for name in sources}
        for b in range(count):
            at = int(torch.randint(2000, (), generator=self.random))
            # Fewer in later domains: their last columns are empty.
            for d in range(max(1, decisions - b)):
                name, i = loose[int(torch.randint(len(loose), (), generator=self.random))]
                index[name][b, d] = i
                sign[name][b, d] = 1 if self.values[name].flatten(1)[at, i] >= 0 else -1
        return {name: Split(index[name], sign[name]) for name in sources}

    @property
    def problem(self) -> Problem:
        relaxed = impose(self.relaxed, self.splits)
        return Problem(self.weights, self.start, relaxed, self.box, self.splits, Movable.of(self.relaxed))

    def parameters(self, size: float = 1.0) -> tuple[Tensor, Tensor]:
        """Random sound slopes and multipliers, away from their limits."""
        lower, upper = self.problem.movable.limits(self.problem.relaxed, self.count)
        lower, upper = (side.expand(-1, self.rows, -1) for side in (lower, upper))
        share = 0.1 + 0.8 * torch.rand(lower.shape, generator=self.random, dtype=DOUBLE).to(lower)
        shape = (self.count, self.rows, self.decisions)
        beta = size * (0.05 + torch.rand(shape, generator=self.random, dtype=DOUBLE)).to(lower)
        return lower + share * (upper - lower), beta

    def inside(self, domain: int) -> Tensor:
        """Mask of the points that have the signs of a domain."""
        mask = torch.ones(2000, dtype=torch.bool)
        for name, split in self.splits.items():
            z = self.values[name].flatten(1)[:, split.index[domain]]
            mask &= (z * split.sign[domain] >= 0).all(1)
        return mask

    def least(self, domain: int) -> Tensor:
        """Least value (R,) of every row at the points of a domain."""
        ((name, rows),) = self.start.items()
        assert isinstance(rows, Tensor)
        y = self.values[name][self.inside(domain)].flatten(1)
        return (y @ rows[0].double().flatten(1).T).amin(0)

    def optimum(self, **options: float | None) -> Optimised:
        alpha, beta = self.problem.movable.default(self.relaxed, self.rows, self.count), self.parameters()[1]
        chosen = {"iteration": 20, "early_stop_patience": PATIENT, **options}
        with torch.no_grad():
            return maximise(self.problem, alpha, 0 * beta, BetaSettings(**chosen), never)  # type: ignore[arg-type]


def never(bounds: RowBounds, index: Tensor) -> Tensor:
    """No domain is ever decided."""
    return torch.zeros(len(index), dtype=torch.bool)


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_agree_with_finite_differences(name: str) -> None:
    setting = Setting(zoo.graph(name))
    alpha, beta = setting.parameters()
    bounds, by_alpha, by_beta = gradients(setting.problem, alpha, beta)
    step = 1e-6
    checked = 0
    for values, slopes in ((alpha, by_alpha), (beta, by_beta)):
        assert slopes.shape == values.shape
        for k in torch.randperm(values.shape[2], generator=setting.random)[:12].tolist():
            ends = []
            for sign in (1, -1):
                values[:, :, k] += sign * step
                ends.append(evaluate(setting.problem, alpha, beta)[0].lower)
                values[:, :, k] -= sign * step
            # One-sided slopes differ at a kink of the bound, which is no fault of the gradient.
            right, left = (ends[0] - bounds.lower) / step, (bounds.lower - ends[1]) / step
            smooth = (right - left).abs() < 1e-5
            assert smooth.float().mean() > 0.8
            gap = ((right + left) / 2 - slopes[:, :, k])[smooth]
            assert gap.abs().max() < 2e-5 * max(1.0, float(slopes.abs().max()))
            checked += int((slopes[:, :, k].abs() > 1e-6).sum())
    assert checked > 10


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("size", [0.0, 0.1, 10.0])
def test_any_multipliers_and_slopes_give_a_bound(name: str, size: float) -> None:
    for seed in range(3):
        setting = Setting(zoo.graph(name), seed=seed)
        bounds = evaluate(setting.problem, *setting.parameters(size))[0]
        for b in range(setting.count):
            assert setting.inside(b).any()
            scale = setting.least(b).abs().max() + 1
            assert (bounds.lower[b] <= setting.least(b) + 1e-9 * scale).all()


@pytest.mark.parametrize("name", NETS)
def test_optimised_bounds_are_bounds_and_better_than_crown(name: str) -> None:
    gains = []
    for seed in range(2):
        setting = Setting(zoo.graph(name), seed=seed)
        best = setting.optimum(iteration=40, lr_alpha=0.1, lr_beta=0.1)
        assert (best.beta >= 0).all()
        lower, upper = setting.problem.movable.limits(setting.problem.relaxed, setting.count)
        assert (best.alpha >= lower).all() and (best.alpha <= upper).all()
        plain = evaluate(
            dataclasses.replace(setting.problem, splits={}),
            setting.problem.movable.project(
                setting.problem.movable.default(setting.relaxed, setting.rows, setting.count),
                setting.problem.relaxed,
            ),
            torch.zeros_like(best.beta),
        )[0]
        assert (best.bounds.lower >= plain.lower).all()
        gains.append(float((best.bounds.lower - plain.lower).mean()))
        for b in range(setting.count):
            scale = setting.least(b).abs().max() + 1
            assert (best.bounds.lower[b] <= setting.least(b) + 1e-9 * scale).all()
    assert max(gains) > 1e-4


@pytest.mark.parametrize("name", NETS)
def test_rounding_in_float32_is_within_the_error(name: str) -> None:
    """The bound minus its error lies below the same bound in float64, and below what is sampled."""
    graph = zoo.graph(name)
    for size in (0.1, 30.0):
        single, double = Setting(graph, dtype=torch.float32), Setting(graph)
        splits = {k: Split(s.index, s.sign.double()) for k, s in single.splits.items()}
        double.splits, double.start = splits, {k: v.double() for k, v in single.start.items()}  # type: ignore[union-attr]
        problem = dataclasses.replace(double.problem, movable=single.problem.movable)
        alpha, beta = single.parameters(size)
        exact = evaluate(problem, problem.movable.project(alpha.double(), problem.relaxed), beta.double())[0]
        rounded = evaluate(single.problem, alpha, beta)[0]
        assert (rounded.error > 0).all()
        assert (rounded.error < 1e-3 * (1 + size) * (1 + exact.lower.abs())).all()
        # Root bounds of float32 are wider, so that its bounds are lower.
        assert (rounded.lower.double() - rounded.error <= exact.lower + exact.error).all()
        for b in range(single.count):
            assert (rounded.lower[b].double() - rounded.error[b] <= single.least(b)).all()


# Against linear programming


class TriangleSetting:
    """A random ReLU network with intermediate bounds by intervals, and splits that some point has."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.layers = lp_duals.random_layers(random, [3, *random.integers(4, 8, 2).tolist(), 2])
        self.lower, self.upper = -np.ones(3), np.ones(3)
        self.bounds = lp_duals.interval_bounds(self.layers, self.lower, self.upper)
        self.c = random.standard_normal(2)
        self.signs = self._signs(random)
        weights = lp_duals.relu_network(self.layers)
        (entry,) = weights.graph.inputs
        sides = [
            torch.from_numpy(side).reshape(1, *weights.graph[entry].shape)
            for side in (self.lower, self.upper)
        ]
        box = Box({entry: sides[0]}, {entry: sides[1]})
        relaxed = bound_intermediate(weights, box, BoundSettings(method="crown-ibp"))
        names = [node.node.inputs[0] for node in relaxed.nodes.values()]
        splits: dict[str, Split] = {}
        for layer, name in enumerate(names):
            here = [sign if k == layer else 0 for (k, _), sign in self.signs.items()]
            index = [i if k == layer else 0 for k, i in self.signs]
            splits[name] = Split(torch.tensor([index]), torch.tensor([here], dtype=DOUBLE))
        output = weights.graph.outputs[0]
        start: Start = {output: torch.from_numpy(self.c).reshape(1, 1, *weights.graph[output].shape)}
        self.relaxed = relaxed
        self.problem = Problem(weights, start, impose(relaxed, splits), box, splits, Movable.of(relaxed))

    def _signs(self, random: np.random.Generator) -> dict[tuple[int, int], int]:
        a, found = random.uniform(self.lower, self.upper), {}
        for k, (W, b) in enumerate(self.layers[:-1]):
            z = W @ a + b
            low, high = self.bounds[k]
            loose = np.nonzero((low < 0) & (high > 0))[0]
            for i in random.permutation(loose)[:2].tolist():
                found[k, i] = 1 if z[i] >= 0 else -1
            a = np.maximum(z, 0)
        return found

    @property
    def optimum(self) -> lp_duals.TriangleDual:
        return lp_duals.solve_triangle(self.layers, self.lower, self.upper, self.bounds, self.c, self.signs)

    def beta(self, betas: dict[tuple[int, int], float]) -> Tensor:
        return torch.tensor([[[betas[key] for key in self.signs]]], dtype=DOUBLE)

    def alpha(self, alphas: list[np.ndarray]) -> Tensor:
        parts = [
            torch.from_numpy(alphas[layer])[index]
            for layer, index in enumerate(self.problem.movable.index.values())
        ]
        return torch.cat(parts)[None, None]


@pytest.mark.parametrize("seed", range(12))
def test_the_duals_of_the_linear_program_give_its_value(seed: int) -> None:
    setting = TriangleSetting(seed)
    optimum = setting.optimum
    alpha = setting.problem.movable.project(setting.alpha(optimum.alphas), setting.problem.relaxed)
    bounds = evaluate(setting.problem, alpha, setting.beta(optimum.betas))[0]
    assert float(bounds.lower) == pytest.approx(optimum.value, abs=1e-6 * (1 + abs(optimum.value)))


def test_the_multipliers_of_the_linear_program_matter() -> None:
    """Without them the bound is worse, in most of these settings: else the test above shows nothing."""
    worse = 0
    for seed in range(12):
        setting = TriangleSetting(seed)
        optimum = setting.optimum
        alpha = setting.problem.movable.project(setting.alpha(optimum.alphas), setting.problem.relaxed)
        bounds = evaluate(setting.problem, alpha, 0 * setting.beta(optimum.betas))[0]
        worse += float(bounds.lower) < optimum.value - 1e-3
    assert worse >= 6


@pytest.mark.parametrize("seed", range(12))
def test_many_steps_reach_the_linear_program(seed: int) -> None:
    setting = TriangleSetting(seed)
    value = setting.optimum.value
    alpha = setting.problem.movable.default(setting.relaxed, 1)
    beta = 0 * setting.beta(dict.fromkeys(setting.signs, 0.0))
    settings = BetaSettings(
        iteration=500, lr_alpha=0.1, lr_beta=0.1, lr_decay=0.99, early_stop_patience=PATIENT
    )
    best = maximise(setting.problem, alpha, beta, settings, never)
    crown = evaluate(dataclasses.replace(setting.problem, relaxed=setting.relaxed, splits={}), alpha, beta)[0]
    gap = max(value - float(crown.lower), 1e-2 * (1 + abs(value)))
    assert float(best.bounds.lower) <= value + 1e-7 * (1 + abs(value))
    assert value - float(best.bounds.lower) <= 0.01 * gap


# What leaves an optimisation, and what does not


@pytest.mark.parametrize("share", [0.01, 0.2, 1.0])
def test_leaving_early_changes_no_verdict(share: float) -> None:
    setting = Setting(zoo.graph("mlp"), count=8, seed=1)
    everything = setting.optimum(iteration=30)
    # Rows count as refuted above what the optimisation reaches in the middle of its course.
    goal = setting.optimum(iteration=8).bounds.lower

    def decided(bounds: RowBounds, index: Tensor) -> Tensor:
        return (bounds.lower > goal[index] - 1e-3).any(1)

    alpha = setting.problem.movable.default(setting.relaxed, setting.rows, setting.count)
    beta = torch.zeros(setting.count, setting.rows, setting.decisions, dtype=DOUBLE)
    found = {}
    for prune in (None, share):
        settings = BetaSettings(iteration=30, early_stop_patience=PATIENT, prune=prune)
        found[prune] = maximise(setting.problem, alpha, beta, settings, decided)
        again = evaluate(setting.problem, found[prune].alpha, found[prune].beta)[0]
        assert torch.equal(again.lower, found[prune].bounds.lower)
        assert (found[prune].bounds.lower <= everything.bounds.lower + 1e-2).all()
    every = torch.arange(setting.count)
    verdicts = [decided(found[prune].bounds, every).tolist() for prune in (None, share)]
    assert verdicts[0] == verdicts[1]
    assert any(verdicts[0])


def test_a_domain_is_bounded_the_same_whatever_comes_with_it() -> None:
    """Up to the last digits; the trace of an optimisation leaves no mark on its neighbours."""
    setting = Setting(zoo.graph("mlp"), count=6)
    together = setting.optimum(prune=0.01)
    alpha = setting.problem.movable.default(setting.relaxed, setting.rows, 2)
    beta = torch.zeros(2, setting.rows, setting.decisions, dtype=DOUBLE)
    part = torch.tensor([4, 1])
    alone = maximise(
        setting.problem.select(part), alpha, beta, BetaSettings(20, early_stop_patience=PATIENT), never
    )
    assert torch.allclose(alone.bounds.lower, together.bounds.lower[part], rtol=0, atol=1e-9)


def test_a_sign_narrows_the_interval_on_its_side_only() -> None:
    known = Interval(torch.tensor([[-1.0, -2.0, 3.0]]), torch.tensor([[4.0, 5.0, 6.0]]))
    split = Split(torch.tensor([[0, 1], [1, 0], [0, 0]]), torch.tensor([[1.0, -1.0], [1.0, 0.0], [0.0, 0.0]]))
    cut = cut_interval(known, split)
    assert cut.lower.tolist() == [[0, -2, 3], [-1, 0, 3], [-1, -2, 3]]
    assert cut.upper.tolist() == [[4, 0, 6], [4, 5, 6], [4, 5, 6]]


def test_a_network_that_is_not_finite_has_no_bound() -> None:
    setting = Setting(zoo.graph("mlp"))
    alpha, beta = setting.parameters()
    beta[0, 0, 0] = torch.nan
    bounds = evaluate(setting.problem, alpha, beta)[0]
    assert bounds.lower[0, 0].isnan()
    assert bounds.lower[1:].isfinite().all()


def test_splits_of_no_neuron_change_nothing() -> None:
    setting = Setting(zoo.graph("mlp"))
    nothing: Splits = {k: Split(s.index, 0 * s.sign) for k, s in setting.splits.items()}
    setting.splits = dict(nothing)
    alpha, beta = setting.parameters()
    with_splits = evaluate(setting.problem, alpha, beta)[0]
    setting.splits = {}
    without = evaluate(setting.problem, alpha, 0 * beta)[0]
    assert torch.allclose(with_splits.lower, without.lower, rtol=0, atol=1e-12)


class TwoBranches(torch.nn.Module):
    """Two outputs, each with a ReLU of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = (torch.nn.Linear(*shape) for shape in ((3, 4), (3, 5), (4, 2)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.last(self.a(x).relu()), self.b(x).relu()


def test_slopes_that_no_row_depends_on_stay_where_they_are() -> None:
    torch.manual_seed(0)
    module = TwoBranches()
    with torch.no_grad():
        module.a.bias.zero_()
        module.b.bias.zero_()  # around zero every neuron is loose
    graph = load_torch(module, torch.zeros(1, 3)).graph
    weights = LocalWeights(graph)
    ends = torch.ones(1, *graph[graph.inputs[0]].shape)
    box = Box({graph.inputs[0]: -ends}, {graph.inputs[0]: ends})
    with torch.no_grad():
        relaxed = bound_intermediate(weights, box, BoundSettings())
        start: Start = {graph.outputs[0]: torch.eye(2).reshape(1, 2, *graph[graph.outputs[0]].shape)}
        movable = Movable.of(relaxed)
        problem = Problem(weights, start, relaxed, box, {}, movable)
        alpha = movable.default(relaxed, 2)
        _, by_alpha, _ = gradients(problem, alpha, torch.zeros(1, 2, 0))
    sizes = [len(index) for index in movable.index.values()]
    assert min(sizes) > 0 and by_alpha.shape == alpha.shape
    parts = by_alpha.split(sizes, dim=2)
    assert sorted(bool((part == 0).all()) for part in parts) == [False, True]
