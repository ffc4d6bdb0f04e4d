"""The main flow: the right verdict by every way through it, for networks of every form."""

from __future__ import annotations

import gzip
import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import abcrown_dist.flow as flow_module
from abcrown_dist.attack.confirm import OnnxModel
from abcrown_dist.bab import root
from abcrown_dist.bab.root import Refutation
from abcrown_dist.bounds.settings import METHODS
from abcrown_dist.branching import Branching
from abcrown_dist.spec.property import Verdict
from abcrown_dist.util.errors import LoadError
from tests import flow
from tests.models import OnnxBuilder, identity, mlp

ORDERS = ("auto", "before", "middle", "after", "skip")
CHOICES = ("ibp", "crown-ibp", "crown", "forward", "forward+backward", "init-crown", "alpha-crown")
BOX: list[flow.Range] = [(-1, 1)] * 3

# Of the identity on [-1, 1]^3: four disjuncts, each refuted by its own bound.
REFUTABLE = "(or (<= Y_0 -2) (>= Y_1 2) (>= (+ Y_0 Y_1) 3) (and (<= Y_2 -3) (<= Y_0 0)))"


@pytest.fixture
def net(tmp_path: Path) -> Path:
    return identity(tmp_path / "net.onnx", 3)


@pytest.fixture
def unsat(tmp_path: Path) -> Path:
    return flow.write_property(tmp_path / "unsat.vnnlib", BOX, 3, REFUTABLE)


@pytest.fixture
def sat(tmp_path: Path) -> Path:
    """Three disjuncts of which the last one can be fulfilled."""
    return flow.write_property(tmp_path / "sat.vnnlib", BOX, 3, "(or (<= Y_0 -2) (>= Y_1 2) (>= Y_2 0.9))")


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float, float]:
    """A ReLU network, and the least and the largest of its outputs at 2000 points of [-1, 1]^3."""
    path = mlp(tmp_path_factory.mktemp("deep") / "net.onnx", [3, 16, 16, 1])
    model = OnnxModel(path)
    points = np.random.default_rng(0).uniform(-1, 1, (2000, 3)).astype(np.float32)
    values = [float(model(point)[0]) for point in points]
    return path, min(values), max(values)


# Every way through the flow


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_of_attack_and_bounds(net: Path, unsat: Path, sat: Path, order: str) -> None:
    assert flow.run(net, unsat, "--pgd_order", order).verdict is Verdict.UNSAT
    outcome = flow.run(net, sat, "--pgd_order", order)
    assert outcome.verdict is Verdict.SAT
    assert outcome.witness is not None and outcome.witness.disjunct == 2
    assert outcome.witness.outputs[2] >= 0.9
    assert 2 in outcome.open


@pytest.mark.parametrize("method", CHOICES)
@pytest.mark.parametrize("precision", [(), ("--double_fp",)], ids=["float32", "double"])
def test_every_bound_method(
    tmp_path: Path, deep: tuple[Path, float, float], method: str, precision: tuple[str, ...]
) -> None:
    model, low, high = deep
    words = ("--bound_prop_method", method, *precision)
    reach = 100 * (high - low)
    far = flow.write_property(tmp_path / "far.vnnlib", BOX, 1, f"(<= Y_0 {low - reach:.4f})")
    outcome = flow.run(model, far, *words)
    assert outcome.verdict is Verdict.UNSAT
    assert method in outcome.reason
    assert {bound.method for bound in outcome.bounds.values()} == {method}
    inside = flow.write_property(tmp_path / "inside.vnnlib", BOX, 1, f"(<= Y_0 {low:.4f})")
    assert flow.run(model, inside, *words).verdict is Verdict.SAT


def test_every_method_is_offered() -> None:
    assert set(CHOICES) == set(METHODS) - {"forward+alpha-crown"}  # that one only by choice of auto


def test_bounds_never_cut_off_a_sampled_output(tmp_path: Path, deep: tuple[Path, float, float]) -> None:
    """Thresholds right at the extreme samples: any `unsat` would be false."""
    model, low, high = deep
    for assertion in (f"(<= Y_0 {low + 1e-4:.6f})", f"(>= Y_0 {high - 1e-4:.6f})"):
        prop = flow.write_property(tmp_path / "p.vnnlib", BOX, 1, assertion)
        for words in (("--pgd_order", "skip"), ("--pgd_order", "skip", "--double_fp")):
            assert flow.run(model, prop, *words).verdict is not Verdict.UNSAT


ATTACK_ALONE = ("--no_incomplete", "--complete_verifier", "skip")


def test_the_attack_alone_never_proves(net: Path, unsat: Path, sat: Path) -> None:
    outcome = flow.run(net, unsat, *ATTACK_ALONE)
    assert (outcome.verdict, outcome.open) == (Verdict.UNKNOWN, {0, 1, 2, 3})
    assert outcome.reason == "4 of 4 disjuncts are open"
    assert outcome.bounds == {}
    assert flow.run(net, sat, *ATTACK_ALONE).verdict is Verdict.SAT


def test_nothing_to_do_is_unknown(net: Path, unsat: Path) -> None:
    assert flow.run(net, unsat, *ATTACK_ALONE, "--pgd_order", "skip").verdict is Verdict.UNKNOWN


SEARCHES: dict[str, tuple[str, ...]] = {
    "neurons": ("--bab.branching.input_split.enable", "false"),
    "inputs": ("--bab.branching.input_split.enable", "true"),
    "mip": ("--complete_verifier", "mip"),
    "refined": ("--complete_verifier", "bab-refine"),
}


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("order", ["auto", "skip"])
def test_every_complete_verifier_alone(net: Path, unsat: Path, sat: Path, name: str, order: str) -> None:
    words = (*SEARCHES[name], "--no_incomplete", "--pgd_order", order)
    assert flow.run(net, unsat, *words).verdict is Verdict.UNSAT
    outcome = flow.run(net, sat, *words)
    assert outcome.witness is not None and outcome.witness.disjunct == 2


def test_refuted_disjuncts_are_not_taken_up_again(
    tmp_path: Path, net: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is refuted by the first method; the last cannot be refuted at all, not by a search either."""
    asked: list[list[int]] = []
    searched: list[tuple[int, ...]] = []

    def refute(weights: Any, prop: Any, wanted: list[int], *rest: Any, **named: Any) -> Refutation:
        asked.append(list(wanted))
        return root.refute(weights, prop, wanted, *rest, **named)

    def explore(own: Any, splitter: Any, *rest: Any) -> None:
        searched.append(tuple(splitter.disjuncts))
        real(own, splitter, *rest)

    real = Branching._explore
    monkeypatch.setattr(flow_module, "refute", refute)
    monkeypatch.setattr(Branching, "_explore", explore)
    text = "(or (<= Y_0 -2) (and (<= Y_1 0.1) (<= Y_2 0.2) (> (+ (* 3.0 Y_1) (* 3.0 Y_2)) 0.9)))"
    prop = flow.write_property(tmp_path / "p.vnnlib", BOX, 3, text)
    outcome = flow.run(net, prop, "--bab.max_iterations", "3")
    assert outcome.verdict is Verdict.UNKNOWN
    assert outcome.open == {1}
    assert outcome.reason.startswith("1 of 2 disjuncts are open: ")
    assert asked[0] == [0, 1] and all(wanted == [1] for wanted in asked[1:])
    assert searched and all(disjuncts == (1,) for disjuncts in searched)
    assert outcome.bounds[0].refuted and not outcome.bounds[1].refuted


@pytest.mark.parametrize("assertion", ["(or)", "false", "(and (<= X_0 -3) (<= Y_0 0))"])
def test_no_possible_input_is_unsat_with_a_warning(
    tmp_path: Path, net: Path, assertion: str, caplog: pytest.LogCaptureFixture
) -> None:
    prop = flow.write_property(tmp_path / "p.vnnlib", BOX, 3, assertion)
    with caplog.at_level(logging.WARNING):
        outcome = flow.run(net, prop)
    assert (outcome.verdict, outcome.bounds) == (Verdict.UNSAT, {})
    assert outcome.reason == "no input fulfils the property's input constraints"
    assert ("empty input set" in caplog.text) == ("X_0" in assertion)


def test_a_disjunct_without_constraints_is_never_refuted(tmp_path: Path, net: Path) -> None:
    prop = flow.write_property(
        tmp_path / "p.vnnlib", BOX, 3, "(or (<= Y_0 -2) (and (>= X_0 0.5) (<= X_0 0.6)))"
    )
    assert flow.run(net, prop).verdict is Verdict.SAT
    outcome = flow.run(net, prop, "--pgd_order", "skip")
    assert (outcome.verdict, outcome.open) == (Verdict.UNKNOWN, {1})


# Ops without relaxation


@pytest.fixture
def unbounded(tmp_path: Path) -> Path:
    """y = x0 floor(sin x) + ...: ops that no bound covers."""
    build = OnnxBuilder()
    x = build.input("x", [1, 3])
    turned = build.op("Sin", x, name="turned")
    build.output(build.op("Add", build.op("Floor", turned, name="steps"), x, name="y"), [1, 3])
    return build.save(tmp_path / "unbounded.onnx")


def test_missing_relaxations_are_all_named(
    tmp_path: Path, unbounded: Path, unsat: Path, sat: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        outcome = flow.run(unbounded, flow.write_property(tmp_path / "p.vnnlib", BOX, 3, "(>= Y_0 9)"))
    assert outcome.verdict is Verdict.UNKNOWN
    for text in (outcome.reason, caplog.text):
        assert "sin (turned)" in text and "floor (steps)" in text
    assert flow.run(unbounded, sat).verdict is Verdict.SAT
    assert flow.run(unbounded, unsat, "--pgd_order", "skip").verdict is Verdict.UNKNOWN


@pytest.mark.parametrize("kind", ["Cast", "Greater", "ArgMax"])
def test_an_output_without_a_gradient_is_attacked_all_the_same(tmp_path: Path, kind: str) -> None:
    build = OnnxBuilder()
    x = build.input("x", [1, 3])
    if kind == "Greater":
        y = build.op("Greater", x, build.constant(np.zeros((1, 3))), name="y")
    elif kind == "Cast":
        y = build.op("Cast", x, name="y", to=7)
    else:
        y = build.op("ArgMax", x, name="y", axis=1)
    element = 9 if kind == "Greater" else 7
    size = 1 if kind == "ArgMax" else 3
    build.output(y, [1, size], element)
    model = build.save(tmp_path / "net.onnx")
    for mode in ("PGD", "diversed_PGD"):
        words = ("--attack_mode", mode)
        reached = flow.write_property(tmp_path / "p.vnnlib", BOX, size, "(>= Y_0 1)")
        assert flow.run(model, reached, *words).verdict is Verdict.SAT
        missed = flow.write_property(tmp_path / "q.vnnlib", BOX, size, "(>= Y_0 7)")
        assert flow.run(model, missed, *words).verdict is Verdict.UNKNOWN


# Networks of unusual form


def odd(name: str, path: Path) -> tuple[int, int]:
    """Build a network of a form that is rare; numbers of its inputs and outputs."""
    build = OnnxBuilder()
    if name == "dynamic_batch":
        build.output(build.op("Relu", build.input("x", ["N", 2]), name="y"), ["N", 2])
        sizes = (2, 2)
    elif name == "no_batch_axis":
        build.output(build.op("Relu", build.input("x", [2]), name="y"), [2])
        sizes = (2, 2)
    elif name == "batch_of_two":
        build.output(build.op("Relu", build.input("x", [2, 1]), name="y"), [2, 1])
        sizes = (2, 2)
    elif name == "five_axes":
        build.output(build.op("Relu", build.input("x", [1, 1, 1, 2, 1]), name="y"), [1, 1, 1, 2, 1])
        sizes = (2, 2)
    elif name == "names":
        inner = build.op("Relu", build.input("in put", [1, 2]), name="höher/τ:0")
        build.output(build.op("Neg", build.op("Neg", inner, name="1"), name="out put"), [1, 2])
        sizes = (2, 2)
    elif name == "initialiser_as_input":
        x = build.input("x", [1, 2])
        build.input(build.constant(np.zeros((1, 2)), "bias"), [1, 2])
        build.output(build.op("Relu", build.op("Add", x, "bias"), name="y"), [1, 2])
        sizes = (2, 2)
    elif name == "unused_input":
        build.output(build.op("Relu", build.input("x", [1, 2]), name="y"), [1, 2])
        build.input("unused", [1, 3])
        sizes = (5, 2)
    elif name == "output_twice":
        build.output(build.op("Relu", build.input("x", [1, 2]), name="y"), [1, 2])
        build.output("y", [1, 2])
        sizes = (2, 4)
    elif name == "input_as_output":
        build.output(build.op("Relu", build.input("x", [1, 2]), name="y"), [1, 2])
        build.output("x", [1, 2])
        sizes = (2, 4)
    else:  # outputs_in_odd_order
        second = build.op("Relu", build.input("b", [1, 1]), name="second")
        first = build.op("Relu", build.input("a", [1, 1]), name="first")
        build.output(first, [1, 1])
        build.output(second, [1, 1])
        sizes = (2, 2)
    model = build.model() if name != "output_twice" else _unchecked(build)
    onnx.save(model, str(path))
    return sizes


def _unchecked(build: OnnxBuilder) -> Any:
    from onnx import helper

    graph = helper.make_graph(build.nodes, "g", build.inputs, build.outputs, build.initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


@pytest.mark.parametrize(
    "name",
    [
        *("dynamic_batch", "no_batch_axis", "batch_of_two", "five_axes", "names", "initialiser_as_input"),
        *("unused_input", "output_twice", "input_as_output", "outputs_in_odd_order"),
    ],
)
def test_networks_of_unusual_form(tmp_path: Path, name: str) -> None:
    """Y_0 = relu of an input in [0.5, 1]; the other outputs lie in [-1, 1]."""
    model = tmp_path / "net.onnx"
    inputs, outputs = odd(name, model)
    ranges: list[flow.Range] = [(-1, 1)] * inputs
    ranges[1 if name == "outputs_in_odd_order" else 0] = (0.5, 1)
    for assertion, verdict in [("(<= Y_0 0.4)", "unsat"), ("(<= Y_0 0.6)", "sat"), ("(>= Y_1 1.1)", "unsat")]:
        prop = flow.write_property(tmp_path / "p.vnnlib", ranges, outputs, assertion)
        assert flow.run(model, prop).verdict.value == verdict


@pytest.mark.parametrize(("inputs", "outputs"), [(2, 3), (4, 3), (3, 2), (3, 4)])
@pytest.mark.parametrize("order", ["auto", "skip"])
def test_a_property_of_another_size(tmp_path: Path, net: Path, inputs: int, outputs: int, order: str) -> None:
    prop = flow.write_property(tmp_path / "p.vnnlib", [(-1, 1)] * inputs, outputs, "(<= Y_0 -2)")
    what = f"declares {inputs} inputs" if inputs != 3 else f"declares {outputs} outputs"
    with pytest.raises(LoadError, match=f"{what}, but the network has 3"):
        flow.run(net, prop, "--pgd_order", order)


def test_values_without_axes_are_named(tmp_path: Path) -> None:
    build = OnnxBuilder()
    build.output(build.op("Relu", build.input("x", []), name="y"), [])
    model = build.save(tmp_path / "net.onnx")
    prop = flow.write_property(tmp_path / "p.vnnlib", [(-1, 1)], 1, "(<= Y_0 -2)")
    with pytest.raises(LoadError, match=r"without axes \(scalars\) are not supported yet: x, y"):
        flow.run(model, prop)


@pytest.mark.parametrize("compressed", [False, True])
def test_weights_in_a_file_of_their_own(tmp_path: Path, compressed: bool) -> None:
    """External data lies beside the model, whether that is compressed or not; both are read twice."""
    build = OnnxBuilder()
    weight = build.constant(np.eye(3) * 2)
    build.output(build.op("MatMul", build.input("x", [1, 3]), weight, name="y"), [1, 3])
    path = tmp_path / "net.onnx"
    onnx.save(build.model(), str(path), save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert (tmp_path / "weights.bin").is_file()
    if compressed:
        content = path.read_bytes()
        path.unlink()
        path = tmp_path / "net.onnx.gz"
        path.write_bytes(gzip.compress(content))
    for assertion, verdict in [("(>= Y_2 2.1)", "unsat"), ("(>= Y_2 1.9)", "sat")]:
        prop = flow.write_property(tmp_path / "p.vnnlib", BOX, 3, assertion)
        assert flow.run(path, prop).verdict.value == verdict
