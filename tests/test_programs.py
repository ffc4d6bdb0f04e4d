"""Mixed-integer programs through the main flow: `mip` decides disjuncts, `bab-refine` tightens roots first.

Answers are compared with the module's own exact minimum (`tests/piecewise.py`) and with `tests/exact.py`,
on both sides of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from abcrown_dist import programs
from abcrown_dist.bab.clauses import batches
from abcrown_dist.bab.root import OneBox, Root
from abcrown_dist.bounds.propagate import bound_intermediate
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.bounds.types import preactivations
from abcrown_dist.boxes import Boxes
from abcrown_dist.graph.execute import execute_all
from abcrown_dist.parallel.group import Group
from abcrown_dist.spec.property import Verdict
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.util.errors import ConfigError
from abcrown_dist.weights.local import LocalWeights
from tests import flow
from tests.exact import exact_minimum
from tests.models import OnnxBuilder
from tests.parallel.jobs import Mode
from tests.parallel.pool import Pool
from tests.parallel.ranks import launch
from tests.searches import FAMILIES, Case, draw, search

Pools = Callable[[int], Pool]

BARE: dict[str, Any] = {
    "attack.pgd_order": "skip",
    "general.enable_incomplete_verification": False,
    "solver.bound_prop_method": "crown",
}
KINDS = ["mip", "bab-refine"]


@cache
def small_case(family: str, seed: int) -> Case:
    return draw(family, seed, rows=2, disjuncts=2, most=8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_exact_answer(family: str, kind: str) -> None:
    """By nothing but programs (and branching after refinement), LeakyReLU and residual networks included."""
    options = {**BARE, "general.complete_verifier": kind}
    for seed in (1, 2, 3):
        case = small_case(family, seed)
        margins = [-0.01] * len(case.disjuncts)
        outcome = search(case, case.property(margins), options)
        assert outcome.verdict is Verdict.UNSAT, outcome.reason
        if kind == "mip":
            assert outcome.reason == "refuted by mip"
            assert (outcome.domains, outcome.rounds) == (0, [])
        margins[seed % len(margins)] = 0.01
        outcome = search(case, case.property(margins), options)
        assert outcome.verdict is Verdict.SAT, outcome.reason
        assert outcome.witness is not None and outcome.witness.disjunct == seed % len(margins)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["ibp", "crown-ibp", "forward", "alpha-crown"])
def test_every_bound_method_prepares_the_programs(method: str, kind: str) -> None:
    case = small_case("convolutional", 1)
    options = {**BARE, "general.complete_verifier": kind, "solver.bound_prop_method": method}
    for margin, verdict in ((-0.01, Verdict.UNSAT), (0.01, Verdict.SAT)):
        prop = case.property([margin] * len(case.disjuncts))
        assert search(case, prop, options).verdict is verdict


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", [False, True], ids=["float32", "float64"])
def test_thresholds_beside_the_exact_minimum(tmp_path: Path, kind: str, precision: bool) -> None:
    """Files, the usual bound methods, no attack; the minimum by an encoding that shares nothing with ours."""
    random = np.random.default_rng(5)
    sizes = [3, 5, 4, 2]
    weights = [random.standard_normal((o, i)).astype("f4") for i, o in itertools.pairwise(sizes)]
    biases = [random.standard_normal(o).astype("f4") for o in sizes[1:]]
    build = OnnxBuilder()
    x = build.input("x", [1, 3])
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        x = build.op("Gemm", x, build.constant(weight), build.constant(bias), transB=1)
        x = build.op("Relu", x) if index < 2 else x
    build.output(x, [1, 2])
    model = build.save(tmp_path / "net.onnx")
    c, ones = np.array([1.0, -1.0]), np.ones(3)
    least = exact_minimum(weights, biases, -ones, ones, c)
    unit = 1e-3 * (-exact_minimum(weights, biases, -ones, ones, -c) - least)
    words = ("--complete_verifier", kind, "--pgd_order", "skip", "--double_fp", str(precision).lower())
    for threshold, verdict in ((least - unit, Verdict.UNSAT), (least + unit, Verdict.SAT)):
        text = f"(<= (- Y_0 Y_1) {threshold:.9f})"
        prop = flow.write_property(tmp_path / "p.vnnlib", [(-1, 1)] * 3, 2, text)
        assert flow.run(model, prop, *words).verdict is verdict


def root_of(case: Case, weights: LocalWeights, method: str = "crown-ibp") -> OneBox:
    prop = case.property([0.0] * len(case.disjuncts))
    clauses = next(iter(batches(prop, weights, [0], 1, torch.float32)))
    with torch.no_grad():
        relaxed = bound_intermediate(weights, clauses.box, BoundSettings(method), Deadline(60))
    return next(iter(OneBox.each(Root(clauses, relaxed), {0})))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_refined_root_is_tighter_and_holds(family: str, dtype: torch.dtype) -> None:
    """Each pre-activation against its values at points of the box; refinement must gain somewhere."""
    gained = 0.0
    for seed in (1, 2):
        case = small_case(family, seed)
        weights = LocalWeights(case.model.graph, dtype, torch.device("cpu"))
        box = root_of(case, weights)
        root, found = programs.refined(weights, box, BoundSettings("crown-ibp"), Deadline(60), 10.0, 1.0)
        assert found.tried > 0
        for name in preactivations(weights.graph):
            before, after = box.root.relaxed.intervals[name], root.relaxed.intervals[name]
            width = (before.upper - before.lower).flatten()
            slack = 1e-5 * (1 + before.magnitude.flatten())
            assert (after.lower.flatten() >= before.lower.flatten() - slack).all()
            assert (after.upper.flatten() <= before.upper.flatten() + slack).all()
            gained = max(gained, float((width - (after.upper - after.lower).flatten()).max()))
        assert_contains(case, root)
    assert gained > 1e-3


def assert_contains(case: Case, root: Root) -> None:
    """Every node with bounds contains what the network computes at sampled points and at corners."""
    graph = case.model.graph
    item, random = case.disjuncts[0], np.random.default_rng(0)
    points = random.uniform(item.lower, item.upper, (300, len(item.lower)))
    corners = np.where(random.random(points.shape) < 0.5, item.lower, item.upper)
    for x in np.concatenate([points, corners[:50]]):
        values = execute_all(graph, [torch.from_numpy(x).float().reshape(1, *case.shape)])
        for name in preactivations(graph):
            interval, value = root.relaxed.intervals[name], values[name].double().flatten()
            slack = 1e-5 * (1 + interval.magnitude.flatten().double())
            assert (interval.lower.flatten().double() - slack <= value).all(), name
            assert (value <= interval.upper.flatten().double() + slack).all(), name


def test_the_search_begins_with_the_refined_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that were tightened would be lost if the search computed its own."""
    refined: list[Root] = []
    begun: list[Root] = []

    def tighten(*arguments: Any) -> Any:
        root, found = real(*arguments)
        refined.append(root)
        return root, found

    def boxes(own: Boxes, settings: BoundSettings, wanted: set[int]) -> Any:
        for box in original(own, settings, wanted):
            begun.append(box.root)
            yield box

    real, original = programs.refined, Boxes.open
    monkeypatch.setattr(programs, "refined", tighten)
    monkeypatch.setattr(Boxes, "open", boxes)
    case = small_case("mlp", 1)
    prop = case.property([-0.01] * len(case.disjuncts))
    search(case, prop, {**BARE, "general.complete_verifier": "bab-refine"})
    assert refined
    searched = [box.relaxed.intervals for box in begun[len(refined) :]]
    for root in refined:
        for name, interval in root.relaxed.intervals.items():
            assert any(torch.equal(interval.lower, other[name].lower) for other in searched)


def test_no_time_is_a_timeout() -> None:
    case = small_case("mlp", 1)
    prop = case.property([-0.01] * len(case.disjuncts))
    for kind in KINDS:
        outcome = search(case, prop, {**BARE, "general.complete_verifier": kind}, seconds=1e-6)
        assert outcome.verdict is Verdict.TIMEOUT


def refusal(group: Group, name: str, mode: Mode) -> str:
    with pytest.raises(ConfigError) as caught:
        programs.whole_in_float64(mode.place(name, group))
    return str(caught.value)


@pytest.mark.parametrize("mode", [Mode("fsdp"), Mode("tp")], ids=str)
def test_weights_that_ranks_share_are_refused(pools: Pools, mode: Mode) -> None:
    answers = pools(2).run(refusal, "depth_3", mode)
    assert answers == ["general.complete_verifier: mip and bab-refine need whole weights in one process"] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_program_on_two_ranks_says_so(tmp_path: Path, kind: str) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    build = OnnxBuilder()
    build.output(build.op("Relu", build.input("x", [1, 2]), name="y"), [1, 2])
    build.save(folders[0] / "net.onnx")
    flow.write_property(folders[0] / "p.vnnlib", [(-1, 1)] * 2, 2, "(<= Y_0 -1)")
    words = ["--onnx_path", "net.onnx", "--vnnlib_path", "p.vnnlib", "--parallel.mode", "fsdp"]
    ended = launch(folders, [*words, "--complete_verifier", kind, "--no_incomplete", "--pgd_order", "skip"])
    assert [rank.code for rank in ended] == [2, 2], ended
    assert f"general.complete_verifier: {kind} runs in one process, not on 2 ranks" in ended[0].err
    assert len(ended[0].err.splitlines()) == 1
