"""The attack: finds what is there, offers nothing that is not, and stays inside its box, batch and time."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from abcrown_dist.attack import starts
from abcrown_dist.attack.confirm import Confirmer
from abcrown_dist.attack.descent import Demand, Descent, Schedule, refine
from abcrown_dist.attack.objective import Objective
from abcrown_dist.attack.pgd import Candidate, Settings, find_counterexamples
from abcrown_dist.attack.starts import Region
from abcrown_dist.attack.surrogate import SurrogateGradients
from abcrown_dist.spec.property import Box, Disjunct, Property
from abcrown_dist.spec.vnnlib1 import load_vnnlib
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.util.errors import ConfigError

CPU = torch.device("cpu")
Network = Callable[[torch.Tensor], torch.Tensor]


def box(*intervals: tuple[str | float, str | float]) -> Box:
    return Box(tuple(Decimal(str(a)) for a, _ in intervals), tuple(Decimal(str(b)) for _, b in intervals))


def disjunct(where: Box, C: list[list[float]], rhs: list[float], **more: object) -> Disjunct:
    return Disjunct(where, np.array(C, dtype=float), np.array(rhs, dtype=float), **more)  # type: ignore[arg-type]


def prop(outputs: int, *disjuncts: Disjunct) -> Property:
    return Property(len(disjuncts[0].box.lower), outputs, disjuncts)


def search(
    network: Network,
    what: Property,
    how: Settings = Settings(),  # noqa: B008
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    deadline: Deadline | None = None,
    most: int = 1,
) -> list[Candidate]:
    found = []
    stream = find_counterexamples(
        network, what, how, seed=seed, device=CPU, dtype=dtype, deadline=deadline or Deadline()
    )
    for candidate in stream:
        found.append(candidate)
        if len(found) == most:
            break
    return found


def identity(x: torch.Tensor) -> torch.Tensor:
    return x


def mlp(sizes: list[int], seed: int = 0) -> Network:
    generator = torch.Generator().manual_seed(seed)
    layers = [
        (torch.randn(o, i, generator=generator) / math.sqrt(i), torch.randn(o, generator=generator) / 10)
        for i, o in itertools.pairwise(sizes)
    ]

    def network(x: torch.Tensor) -> torch.Tensor:
        for k, (weight, bias) in enumerate(layers):
            x = x @ weight.to(x.dtype).T + bias.to(x.dtype)
            if k < len(layers) - 1:
                x = x.relu()
        return x

    return network


def relu_minus(x: torch.Tensor) -> torch.Tensor:
    return x[:, :1].relu() - x[:, 1:2]


# --- what is there is found, what is not there is not -------------------------------------------


def test_fixed_input_and_both_verdicts() -> None:
    where = box((-1, 1), ("0.5", "0.5"))
    assert search(relu_minus, prop(1, disjunct(where, [[1]], [-0.6]))) == []
    (found,) = search(relu_minus, prop(1, disjunct(where, [[-1]], [0])))
    assert found.x[1] == 0.5
    assert max(found.x[0], 0) - 0.5 >= 0


def test_point_box_on_the_border_fulfils_closed_constraints_only() -> None:
    at_least_5 = disjunct(box((5, 5)), [[-1]], [-5])
    more_than_5 = disjunct(box((5, 5)), [[-1]], [-5], strict=np.array([True]))
    assert search(identity, prop(1, at_least_5))[0].margin == 0
    assert search(identity, prop(1, more_than_5)) == []


def test_input_fixed_where_no_float_lies_stays_at_the_nearest_float() -> None:
    (found,) = search(identity, prop(2, disjunct(box(("0.1", "0.1"), (0, 1)), [[0, -1]], [-0.9])))
    assert found.x[0] == float(np.float32("0.1"))


def test_every_disjunct_has_its_own_box_and_magnitude() -> None:
    intervals = [(135845, 216892, 1419), (224027, 247495, 2942), (252460, 267771, 4464)]
    what = prop(1, *(disjunct(box((a, b)), [[-1]], [-c]) for a, b, c in intervals))
    assert search(lambda x: 0 * x, what) == []
    assert search(lambda x: 0 * x + 5000, what)[0].margin == 5000 - 1419
    assert search(lambda x: 0 * x + 1000 + x / 100, what)[0].disjunct in (0, 1)


def test_single_sat_disjunct_among_thousands_within_the_batch_size() -> None:
    largest = 0

    def network(x: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, len(x))
        return (x - 0.37).abs()

    # The smallest value in box i is i - 0.37; only the box at 1234 asks for no less.
    disjuncts = [disjunct(box((i, i + 0.5)), [[1]], [i - (0.36 if i == 1234 else 2)]) for i in range(2000)]
    what = prop(1, *disjuncts)
    (found,) = search(network, what, Settings(batch_size=100, restarts=3, steps=10))
    assert found.disjunct == 1234
    assert largest == 100


def test_constraints_of_unequal_number_and_scale() -> None:
    where = box((-1, 1), (-1, 1))
    one = disjunct(where, [[1, 0]], [-2])
    three = disjunct(where, [[1e6, 0], [0, 1e-3], [-1, -1]], [-0.9e6, 0, 1.75])
    (found,) = search(identity, prop(2, one, three))
    assert found.disjunct == 1
    assert found.x[0] <= -0.9 and found.x[1] <= 0 and -found.x.sum() <= 1.75


def test_constraint_on_inputs_and_outputs_together() -> None:
    where = box((0, 1), (0, 1))
    mixed = disjunct(where, [[1]], [-0.999], D=np.array([[-1.0, -1.0]]))  # x0 x1 - x0 - x1 <= -0.999
    (found,) = search(lambda x: x[:, :1] * x[:, 1:], prop(1, mixed, disjunct(where, [[1]], [-1])))
    assert found.disjunct == 0
    assert found.x[0] * found.x[1] - found.x.sum() <= -0.999 + 1e-6


@pytest.mark.parametrize("mode", ["PGD", "diversed_PGD"])
@pytest.mark.parametrize("seed", range(3))
def test_narrow_band_in_a_curved_landscape(mode: str, seed: int) -> None:
    """Four constraints at once, met by about one point in a hundred thousand."""

    def network(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(x**2).sum(-1), torch.sin(5 * x[:, 0]) * x[:, 1]], -1)

    band: list[list[float]] = [[1, 0], [-1, 0], [0, 1], [0, -1]]
    where = box(*[(-2, 2)] * 5)
    what = prop(2, disjunct(where, band, [3.01, -2.99, 1.21, -1.19]))
    (found,) = search(network, what, Settings(mode=mode), seed=seed, dtype=torch.float64)
    y = network(torch.from_numpy(found.x)[None])[0]
    assert abs(y[0] - 3) <= 0.01 and abs(y[1] - 1.2) <= 0.01


def test_descent_beats_sampling_in_many_dimensions() -> None:
    """The linear minimum over [0,1]^200, less 2 % of the range: out of reach of random points."""
    weight = torch.randn(1, 200, generator=torch.Generator().manual_seed(1))
    lowest, highest = weight.clamp(max=0).sum().item(), weight.clamp(min=0).sum().item()
    goal = lowest + 0.02 * (highest - lowest)
    what = prop(1, disjunct(box(*[(0, 1)] * 200), [[1]], [goal]))
    assert search(lambda x: x @ weight.T, what, Settings(restarts=0)) == []
    (found,) = search(lambda x: x @ weight.T, what)
    assert found.x @ weight[0].double().numpy() <= goal + 1e-4


def test_alpha_in_input_units() -> None:
    what = prop(1, disjunct(box((0, 100)), [[1], [-1]], [33.05, -33.0]))
    tiny = Settings(alpha=1e-6, steps=10, restarts=2)
    assert search(identity, what, tiny) == []
    assert search(identity, what, Settings(alpha=2.0, restarts=8))


def test_step_functions_have_useful_gradients() -> None:
    """A binarised network: all 40 hidden units must agree, which no random point achieves."""
    weight = torch.randn(40, 400, generator=torch.Generator().manual_seed(0))
    what = prop(1, disjunct(box(*[(-1, 1)] * 400), [[-1]], [-40]))
    assert search(lambda x: torch.sign(x @ weight.T).sum(-1, keepdim=True), what)


def test_steps_without_any_gradient_are_climbed_at_random() -> None:
    def stairs(x: torch.Tensor) -> torch.Tensor:
        return (10 * (x - 0.6).detach().abs()).floor().sum(-1, keepdim=True) + 0 * x[:, :1]

    what = prop(1, disjunct(box(*[(0, 1)] * 8), [[1]], [4]))  # random points: 21 on average
    assert search(stairs, what, Settings(restarts=0)) == []
    assert search(stairs, what)


# --- what is offered is sound ---------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.tuples(st.floats(-3, 3), st.floats(0, 2)), min_size=2, max_size=4))
def test_candidates_lie_in_the_box_and_fulfil_the_constraints(
    seed: int, raw: list[tuple[float, float]]
) -> None:
    where = box(*[(f"{low:.5f}", f"{low + width:.5f}") for low, width in raw])
    network = mlp([len(raw), 16, 3], seed)
    rng = np.random.default_rng(seed)
    what = prop(
        3, *(disjunct(where, rng.normal(size=(2, 3)).tolist(), rng.normal(size=2).tolist()) for _ in range(3))
    )
    for found in search(network, what, Settings(restarts=4, steps=20), seed, most=3):
        target = what.disjuncts[found.disjunct]
        for value, low, high in zip(found.x, where.lower, where.upper, strict=True):
            as_float = {float(np.float32(str(low))), float(np.float32(str(high)))}
            assert low <= Decimal(value) <= high or float(value) in as_float
        y = network(torch.from_numpy(found.x).float()[None])[0].double().numpy()
        assert (target.C @ y <= target.rhs + 1e-6).all()


@settings(max_examples=50, deadline=None)
@given(st.decimals(-100, 100, places=12), st.decimals(0, 1, places=12), st.booleans())
def test_region_is_inside_the_box_and_as_large_as_floats_allow(
    low: Decimal, width: Decimal, wide: bool
) -> None:
    dtype = torch.float64 if wide else torch.float32
    region = Region.of([Box((low,), (low + width,))], CPU, dtype)
    lower, upper = region.lower[0], region.upper[0]
    assert lower <= upper
    below = torch.nextafter(lower, torch.full_like(lower, -math.inf))
    above = torch.nextafter(upper, torch.full_like(upper, math.inf))
    if Decimal(lower.item()) >= low and Decimal(upper.item()) <= low + width:
        assert Decimal(below.item()) < low and Decimal(above.item()) > low + width
    else:  # no float between the bounds
        assert lower == upper == torch.tensor(float(low), dtype=torch.float64).to(dtype)
        assert not low <= Decimal(lower.item()) <= low + width


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_undefined_outputs_are_never_candidates(bad: float) -> None:
    where = box((-1, 1), (-1, 1))
    what = prop(1, disjunct(where, [[1]], [1e9]), disjunct(where, [[-1]], [1e9]))

    def one_side(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x[:, :1] < 0.9, bad, x[:, 1:])

    assert search(lambda x: x[:, :1] * 0 + bad, what, Settings(restarts=4, steps=20)) == []
    for found in search(one_side, what, most=5):
        assert found.x[0] >= 0.9


def test_rejected_candidates_are_followed_by_safer_ones_until_none_is_left() -> None:
    """The largest possible margin is 1: one that grows tenfold has to run out."""
    how = Settings(restarts=8, steps=60)
    what = prop(1, disjunct(box((-1, 1)), [[1], [1]], [0, 1]))
    found = search(identity, what, how, most=10_000)
    relative = np.array([c.margin / abs(c.x[0]) for c in found if c.margin > 0])
    assert 3 <= len(found) < 20
    assert all(candidate.x[0] <= 0 for candidate in found)
    assert relative[-1] >= 1e-3  # the demands have grown past float32's rounding


def test_rejection_leads_away_from_the_border() -> None:
    """A judge with a threshold of its own, slightly inside ours."""
    network = mlp([6, 30, 1], seed=3)
    where = box(*[(-1, 1)] * 6)
    values = network(torch.rand(4000, 6, generator=torch.Generator().manual_seed(0)) * 2 - 1)
    level = values.min().item()
    what = prop(1, disjunct(where, [[1]], [level]))
    stream = find_counterexamples(
        network, what, Settings(), seed=0, device=CPU, dtype=torch.float32, deadline=Deadline()
    )
    judged = (network(torch.from_numpy(c.x).float()[None]).item() <= level - 1e-3 for c in stream)
    assert any(judged)


def test_no_constraints_means_any_point() -> None:
    empty = np.zeros((0, 1))
    what = prop(1, disjunct(box((2, 4)), [[1]], [-9]), Disjunct(box((2, 4)), empty, np.zeros(0)))
    found = search(identity, what, most=10)
    assert [(c.disjunct, c.x[0], c.margin) for c in found] == [(1, 3.0, math.inf)]


def test_empty_boxes_are_skipped() -> None:
    nowhere, somewhere = box((1, 0)), box((0, 1))
    assert search(identity, prop(1, disjunct(nowhere, [[1]], [5]))) == []
    both = prop(1, disjunct(nowhere, [[1]], [5]), disjunct(somewhere, [[1]], [5]))
    assert search(identity, both)[0].disjunct == 1
    assert search(identity, Property(1, 1, ())) == []


def test_only_the_disjuncts_asked_for() -> None:
    where = box((0, 1))
    what = prop(1, *(disjunct(where, [[1]], [level]) for level in (5, 5, -1, 5)))
    for only in ([1], [2], [2, 3], []):
        stream = find_counterexamples(
            identity,
            what,
            Settings(restarts=4),
            seed=0,
            device=CPU,
            dtype=torch.float32,
            deadline=Deadline(),
            only=only,
        )
        assert {c.disjunct for c in itertools.islice(stream, 5)} == set(only) - {2}


# --- time, order, seeds ---------------------------------------------------------------------------


class _Countdown(Deadline):
    """Expires after a number of questions instead of seconds."""

    def __init__(self, questions: int) -> None:
        super().__init__()
        self.left = questions

    def expired(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_deadline_ends_the_search_at_any_step() -> None:
    calls = 0

    def network(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return x

    what = prop(2, disjunct(box((0, 1), (0, 1)), [[1, 1]], [-1]))
    full = Settings(restarts=4)
    counts = []
    for questions in range(40):
        calls = 0
        assert search(network, what, full, deadline=_Countdown(questions)) == []
        counts.append(calls)
    assert counts[0] == 0
    assert max(b - a for a, b in itertools.pairwise(counts)) <= 12  # no long unwatched stretch
    assert counts == sorted(counts)


def test_same_seed_same_candidate() -> None:
    network = mlp([5, 20, 2], seed=1)
    what = prop(2, disjunct(box(*[(-1, 1)] * 5), [[1, -1]], [-0.5]))
    first, again, other = (search(network, what, seed=seed)[0] for seed in (7, 7, 8))
    assert (first.x == again.x).all() and first.margin == again.margin
    assert (first.x != other.x).any()


def test_without_early_stop_the_candidate_is_deeper() -> None:
    weight = torch.randn(1, 60, generator=torch.Generator().manual_seed(1))
    level = -0.5 * weight.abs().sum().item()
    what = prop(1, disjunct(box(*[(-1, 1)] * 60), [[1]], [level]))
    soon = search(lambda x: x @ weight.T, what)[0]
    late = search(lambda x: x @ weight.T, what, Settings(early_stop=False))[0]
    assert late.margin > 1.2 * soon.margin > 0


def test_racing_gives_up_on_the_hopeless_alone() -> None:
    where = box(*[(-1, 1)] * 3)
    near, far = disjunct(where, [[1]], [-2.9]), disjunct(where, [[1]], [-1000])
    objective = Objective.of([near, far], CPU)
    region = Region.of([where, where], CPU, torch.float32)
    generator = torch.Generator().manual_seed(0)
    x = torch.zeros(2, 8, 3) + 0.9
    descent = Descent(lambda x: x.sum(-1, keepdim=True), objective, region, x, Schedule(50), generator)
    found = next(descent.run(Demand(torch.float32, 10.0), Deadline()))
    assert found.row == 0 and found.x.sum() <= -2.9
    for _ in descent.run(Demand(torch.float32, 10.0), Deadline(), early_stop=False):
        break
    assert 1 not in descent.rows.tolist()


# --- parts ----------------------------------------------------------------------------------------


def test_refine_descends_from_the_given_points_in_their_own_boxes() -> None:
    boxes = [box((0, 1), (0, 1)), box((2, 3), (-1, -1))]
    region = Region.of(boxes, CPU, torch.float64)
    objective = Objective.of([disjunct(b, [[1, 1]], [0]) for b in boxes], CPU)
    begin = torch.tensor([[[0.7, 0.4], [0.2, 0.9]], [[2.5, -1.0], [9.0, 9.0]]], dtype=torch.float64)
    before = objective.violations(region.project(begin), region.project(begin)).amax(-1)
    points, worst = refine(identity, objective, region, begin, Schedule(60), seed=0, deadline=Deadline())
    assert points.shape == begin.shape and (worst < before).all()
    torch.testing.assert_close(points, region.lower[:, None].expand_as(points), atol=1e-3, rtol=0)
    torch.testing.assert_close(worst, objective.violations(points, points).amax(-1))
    _, unreached = refine(identity, objective, region, begin, Schedule(60), seed=0, deadline=Deadline(0))
    assert unreached.isinf().all()


def test_violations_are_distances_padded_to_the_same_height() -> None:
    where = box((-1, 1), (-1, 1))
    steep = disjunct(where, [[3, 4]], [10], D=np.array([[0.0, 12.0]]))
    objective = Objective.of([steep, disjunct(where, [[1, 0], [0, 2]], [1, 1])], CPU)
    x = torch.tensor([[[0.0, 1.0]], [[0.0, 0.0]]])
    y = torch.tensor([[[2.0, 1.0]], [[3.0, -1.0]]])
    expected = torch.tensor([[[12 / 13, -math.inf]], [[2.0, -1.5]]], dtype=torch.float64)
    torch.testing.assert_close(objective.violations(x, y), expected)
    sizes = torch.tensor([[[32 / 13, 0.0]], [[4.0, 1.5]]], dtype=torch.float64)
    torch.testing.assert_close(objective.magnitude(x, y), sizes)
    part = objective.select(torch.tensor([1]))
    torch.testing.assert_close(part.violations(x[1:], y[1:]), expected[1:])


def test_points_move_by_sign_every_third_in_proportion() -> None:
    where = box((0, 1), (0, 10), (4, 4))
    begin = torch.tensor([0.5, 5.0, 4.0]).expand(1, 3, 3)
    objective = Objective.of([disjunct(where, [[1]], [-99])], CPU)
    region = Region.of([where], CPU, torch.float32)
    slope = torch.tensor([[1.0, -0.05, 7.0]])  # per width: 1, -0.5, 0
    descent = Descent(
        lambda x: x @ slope.T,
        objective,
        region,
        begin,
        Schedule(1, decay=1.0, racing=False),
        torch.Generator(),
    )
    for _ in descent.steps(Demand(torch.float32, 10.0), Deadline()):
        pass
    moved = (descent.x - begin)[0] / (region.width + (region.width == 0))
    eighth = torch.tensor([[-1, 1, 0], [-1, 1, 0], [-1, 0.5, 0]]) / 8
    torch.testing.assert_close(moved, eighth)


def test_vertices_are_enumerated_where_they_fit() -> None:
    region = Region.of([box((0, 1), (5, 5), (2, 3), (-1, 0)), box(*[(0, 1)] * 4)], CPU, torch.float32)
    corners = starts.vertices(region, 8, torch.Generator().manual_seed(0))
    assert {tuple(p) for p in corners[0].tolist()} == {
        (a, 5.0, b, c) for a in (0.0, 1.0) for b in (2.0, 3.0) for c in (-1.0, 0.0)
    }
    assert ((corners[1] == 0) | (corners[1] == 1)).all()
    assert starts.vertices(region, 0, torch.Generator()).shape == (2, 0, 4)


@pytest.mark.parametrize(
    "step", [torch.sign, torch.Tensor.sign, torch.ops.aten.sign.default, torch.round, torch.floor]
)
def test_surrogates_change_gradients_not_values(step: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = (torch.randn(50, generator=torch.Generator().manual_seed(0)) * 3).requires_grad_()
    with SurrogateGradients():
        y = step(x)
        batched = torch.func.vmap(step)(x)
    assert torch.equal(y, step(x.detach())) and torch.equal(batched, y)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert (gradient > 0).all()
    assert torch.autograd.grad(step(x).sum(), x)[0].eq(0).all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": -1}, "steps and restarts must be at least 0"),
        ({"batch_size": 0}, "the batch size at least 1"),
        ({"alpha": 0.0}, 'alpha must be "auto" or positive, not 0'),
        ({"lr_decay": 1.5}, "decay of the step must be in"),
        ({"demand_growth": 1.0}, "must grow by more than 1"),
        ({"mode": "GAMA"}, "unknown mode 'GAMA', use one of PGD, diversed_PGD"),
    ],
)
def test_impossible_settings(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings(**wrong)  # type: ignore[arg-type]


# --- real instances -------------------------------------------------------------------------------


def _network(path: Path) -> Network:
    onnx = pytest.importorskip("onnx")
    onnx2pytorch = pytest.importorskip("onnx2pytorch")
    model = onnx.load(str(path))
    stored = {item.name for item in model.graph.initializer}
    (entry,) = [item for item in model.graph.input if item.name not in stored]
    shape = [max(axis.dim_value, 1) for axis in entry.type.tensor_type.shape.dim]
    module = onnx2pytorch.ConvertModel(model, experimental=True).eval().requires_grad_(False)
    return torch.func.vmap(lambda x: module(x.reshape(shape)).flatten())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "family",
    "acasxu eran mnist_fc oval21 collins_rul_cnn reach_prob_density rl_benchmarks sri_resnet_a "
    "traffic_signs_recognition".split(),
)
def test_every_sat_instance_is_found_and_confirmed(bench: Path, family: str) -> None:
    rows = list(csv.DictReader((bench / "instances.csv").read_text().splitlines()))
    (row,) = [row for row in rows if row["benchmark"] == family and row["expected"] == "sat"]
    what = load_vnnlib(bench / row["vnnlib"])
    judge = Confirmer(what, bench / row["onnx"])
    stream = find_counterexamples(
        _network(bench / row["onnx"]), what, Settings(), seed=0, device=CPU, dtype=torch.float32,
        deadline=Deadline(120),
    )  # fmt: skip
    assert any(judge.confirm(candidate.x, candidate.disjunct) for candidate in stream)
