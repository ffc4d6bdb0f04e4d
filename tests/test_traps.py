"""Small inputs of the kinds that broke other verifiers: one verdict, whatever the resources.

Each is a network of a few neurons. Only within rounding of the edge (`decided` is False) may there be no
verdict; the opposite is never allowed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from abcrown_dist.spec.property import Verdict
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.util.errors import LoadError
from tests import flow
from tests.exact import exact_minimum
from tests.models import OnnxBuilder, constant_output, identity, residual_cnn, transpose_broadcast

Build = Callable[[Path], Path]

SETTINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "tiny_memory": ("--memory_budget", "1KiB"),
    "double": ("--double_fp",),
    "one_box_at_once": ("--batch_size", "1"),
    "without_intervals": ("--compare_crown_with_ibp", "false"),
    "attack_first": ("--pgd_order", "before"),
    "no_attack": ("--pgd_order", "skip"),
    "no_attack_tiny_memory": ("--pgd_order", "skip", "--memory_budget", "1KiB"),
    "no_attack_double": ("--pgd_order", "skip", "--double_fp"),
    "no_attack_one_box": ("--pgd_order", "skip", "--batch_size", "1", "--memory_budget", "1"),
    **{
        f"{attack}_{name}": (*words, *more, "--no_incomplete")
        for attack, words in (("attack", ()), ("no_attack", ("--pgd_order", "skip")))
        for name, more in (
            ("by_neurons", ("--bab.branching.input_split.enable", "false")),
            ("by_inputs", ("--bab.branching.input_split.enable", "true")),
        )
    },
}


SEARCHES = [name for name in SETTINGS if "by_" in name]
# The other settings run with the slow tests.
EVERY_SETTING = [
    pytest.param(
        name,
        marks=() if name in ("default", "no_attack", "no_attack_double", *SEARCHES) else pytest.mark.slow,
    )
    for name in SETTINGS
]


@dataclass(frozen=True)
class Trap:
    """A network, a property, and the right verdict.

    Attributes:
        decided: whether floating point suffices for it.
        constrained: whether every disjunct has an output constraint; bounds and branching need one.
    """

    build: Build
    ranges: list[flow.Range]
    outputs: int
    assertions: tuple[str, ...]
    verdict: str
    decided: bool = True
    constrained: bool = True


def relu_minus(path: Path) -> Path:
    """y = relu(x0) - x1."""
    build = OnnxBuilder()
    x = build.input("x", [1, 2])
    first = build.op("MatMul", x, build.constant(np.array([[1.0], [0.0]])))
    second = build.op("MatMul", x, build.constant(np.array([[0.0], [1.0]])))
    build.output(build.op("Sub", build.op("Relu", first), second, name="y"), [1, 1])
    return build.save(path)


def minus_relu(path: Path) -> Path:
    """y = x1 - relu(x0), the fixed input first in the file's order of use."""
    build = OnnxBuilder()
    x = build.input("x", [1, 2])
    second = build.op("MatMul", x, build.constant(np.array([[0.0], [1.0]])))
    first = build.op("MatMul", x, build.constant(np.array([[1.0], [0.0]])))
    build.output(build.op("Sub", second, build.op("Relu", first), name="y"), [1, 1])
    return build.save(path)


def relu(size: int) -> Build:
    def build(path: Path) -> Path:
        made = OnnxBuilder()
        made.output(made.op("Relu", made.input("x", [1, size]), name="y"), [1, size])
        return made.save(path)

    return build


def scaled(factor: float) -> Build:
    """y = factor * x."""

    def build(path: Path) -> Path:
        made = OnnxBuilder()
        weight = made.constant(np.array([[factor]]))
        made.output(made.op("MatMul", made.input("x", [1, 1]), weight, name="y"), [1, 1])
        return made.save(path)

    return build


def constant(value: float) -> Build:
    return lambda path: constant_output(path, value)


def wide(size: int) -> Build:
    return lambda path: identity(path, size)


INTERVALS = [("135845", "216892", "1419"), ("224027", "247495", "2942"), ("252460", "267771", "4464")]
MAGNITUDES = "(or {})".format(
    " ".join(f"(and (>= X_0 {low}) (<= X_0 {high}) (> Y_0 {y}))" for low, high, y in INTERVALS)
)
ANYTHING: list[flow.Range] = [(-1e6, 1e6)]
UNIT: list[flow.Range] = [(0, 1), (0, 1)]
PLANE: list[flow.Range] = [(-2.6, 3.4), (-4.1, 1.9)]

TRAPS: dict[str, Trap] = {
    # 1: an input that is fixed
    "fixed_unsat": Trap(relu_minus, [(-1, 1), (0.5, 0.5)], 1, ("(<= Y_0 -0.6)",), "unsat"),
    "fixed_sat": Trap(relu_minus, [(-1, 1), (0.5, 0.5)], 1, ("(>= Y_0 0)",), "sat"),
    "fixed_edge_sat": Trap(relu_minus, [(-1, 1), (0.5, 0.5)], 1, ("(<= Y_0 -0.5)",), "sat"),
    "fixed_edge_unsat": Trap(relu_minus, [(-1, 1), (0.5, 0.5)], 1, ("(<= Y_0 -0.5001)",), "unsat"),
    "fixed_negated_unsat": Trap(minus_relu, [(-1, 1), (0.5, 0.5)], 1, ("(>= Y_0 0.6)",), "unsat"),
    "fixed_negated_sat": Trap(minus_relu, [(-1, 1), (0.5, 0.5)], 1, ("(<= Y_0 0)",), "sat"),
    "other_fixed_unsat": Trap(relu_minus, [(0.5, 0.5), (-1, 1)], 1, ("(<= Y_0 -0.6)",), "unsat"),
    "other_fixed_sat": Trap(relu_minus, [(0.5, 0.5), (-1, 1)], 1, ("(<= Y_0 -0.5)",), "sat"),
    "all_fixed_unsat": Trap(relu_minus, [(0.1, 0.1), (0.7, 0.7)], 1, ("(<= Y_0 -0.61)",), "unsat"),
    "all_fixed_sat": Trap(relu_minus, [(0.1, 0.1), (0.7, 0.7)], 1, ("(<= Y_0 -0.59)",), "sat"),
    # 3: assertions conjoin
    "conjoined_unsat": Trap(
        wide(2), [(-1, -0.5), (1, 2)], 2, ("(or (<= Y_0 0) (>= Y_0 5))", "(<= Y_1 0)"), "unsat"
    ),
    "conjoined_before_unsat": Trap(
        wide(2), [(-1, -0.5), (1, 2)], 2, ("(<= Y_1 0)", "(or (<= Y_0 0) (>= Y_0 5))"), "unsat"
    ),
    "conjoined_sat": Trap(
        wide(2), [(-1, -0.5), (1, 2)], 2, ("(or (<= Y_0 0) (>= Y_0 5))", "(<= Y_1 1)"), "sat"
    ),
    "two_ors_unsat": Trap(
        wide(2),
        [(-1, -0.5), (1, 2)],
        2,
        ("(or (>= Y_0 0) (<= Y_0 -5))", "(or (<= Y_1 3) (>= Y_1 5))"),
        "unsat",
    ),
    "contradiction_unsat": Trap(
        wide(1), [(-1, 1)], 1, ("(and (<= Y_0 -0.5) (>= Y_0 0.5))",), "unsat"
    ),
    # 4: everything fixed, and a constraint on the edge
    "edge_sat": Trap(wide(1), [(5, 5)], 1, ("(>= Y_0 5)",), "sat"),
    "edge_equal_sat": Trap(wide(1), [(5, 5)], 1, ("(= Y_0 5)",), "sat"),
    "edge_strict_unsat": Trap(wide(1), [(5, 5)], 1, ("(> Y_0 5)",), "unsat", decided=False),
    "beside_the_edge_unsat": Trap(wide(1), [(5, 5)], 1, ("(>= Y_0 5.0001)",), "unsat"),
    "decimal_edge_sat": Trap(wide(1), [("0.1", "0.1")], 1, ("(>= Y_0 0.1)",), "sat"),
    # 5: two outputs against each other, and the smallest number there is
    "comparison_sat": Trap(wide(2), PLANE, 2, ("(>= Y_0 Y_1)",), "sat"),
    "comparison_far_unsat": Trap(wide(2), PLANE, 2, ("(>= Y_0 (+ Y_1 7.6))",), "unsat"),
    "comparison_corner_sat": Trap(wide(2), PLANE, 2, ("(>= Y_0 (+ Y_1 7.4))",), "sat"),
    "denormal_difference_sat": Trap(wide(2), PLANE, 2, ("(>= (- Y_0 Y_1) -5e-324)",), "sat"),
    "denormal_sat": Trap(wide(2), PLANE, 2, ("(<= Y_0 -5e-324)",), "sat"),
    "denormal_unsat": Trap(relu(1), [(-1, 1)], 1, ("(<= Y_0 -5e-324)",), "unsat", decided=False),
    # 6: a tautology
    "tautology_sat": Trap(wide(1), [(-1, 1)], 1, ("(or (<= Y_0 0) (>= Y_0 0))",), "sat"),
    # 7: large magnitudes, boxes inside a disjunction
    "magnitudes_0_unsat": Trap(constant(0.0), ANYTHING, 1, (MAGNITUDES,), "unsat"),
    "magnitudes_5000_sat": Trap(constant(5000.0), ANYTHING, 1, (MAGNITUDES,), "sat"),
    "magnitudes_2000_sat": Trap(constant(2000.0), ANYTHING, 1, (MAGNITUDES,), "sat"),
    "magnitudes_1418_unsat": Trap(constant(1418.0), ANYTHING, 1, (MAGNITUDES,), "unsat"),
    "magnitudes_linear_unsat": Trap(scaled(0.006541), ANYTHING, 1, (MAGNITUDES,), "unsat"),
    "magnitudes_linear_sat": Trap(scaled(0.0065426), ANYTHING, 1, (MAGNITUDES,), "sat"),
    # 9: transposed and broadcast
    **{
        f"broadcast_{i}_{name}": Trap(transpose_broadcast, UNIT, 4, (text.format(i=i),), verdict)
        for i in (0, 3)
        for name, text, verdict in [
            ("low_unsat", "(<= Y_{i} -0.000001)", "unsat"),
            ("high_unsat", "(>= Y_{i} 1.000001)", "unsat"),
            ("low_sat", "(<= Y_{i} 0)", "sat"),
            ("high_sat", "(>= Y_{i} 1)", "sat"),
        ]
    },
    # the same kinds: inputs in output constraints, empty sets, no constraint at all
    "mixed_unsat": Trap(relu(1), [(-1, -0.5)], 1, ("(<= Y_0 X_0)",), "unsat"),
    "mixed_sat": Trap(relu(1), [(-1, 1)], 1, ("(<= Y_0 X_0)",), "sat"),
    "mixed_relaxed_unsat": Trap(relu(1), [(-1, 1)], 1, ("(<= Y_0 (- X_0 0.1))",), "unsat"),
    "empty_box_unsat": Trap(wide(1), [(1, -1)], 1, ("(<= Y_0 0)",), "unsat"),
    "one_box_empty_sat": Trap(
        wide(1), [(0, 1)], 1, ("(or (and (>= X_0 2) (<= Y_0 0)) (and (>= X_0 0.5) (>= Y_0 0.9)))",), "sat"
    ),
    "one_box_empty_unsat": Trap(
        wide(1), [(0, 1)], 1, ("(or (and (>= X_0 2) (<= Y_0 9)) (and (>= X_0 0.5) (<= Y_0 0.4)))",), "unsat"
    ),
    "unconstrained_sat": Trap(wide(1), [(0, 1)], 1, (), "sat", constrained=False),
    "one_unconstrained_sat": Trap(
        wide(1), [(0, 1)], 1, ("(or (<= Y_0 -3) (and (>= X_0 0.5) (<= X_0 0.6)))",), "sat", constrained=False
    ),
    "false_unsat": Trap(wide(1), [(0, 1)], 1, ("(or)",), "unsat"),
}


@pytest.fixture(params=[1, 2], ids=["thread", "threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def allowed(trap: Trap, setting: str) -> set[str]:
    """The right verdict; none where floating point does not suffice, or an attack would be needed for it."""
    if not trap.decided:
        return {trap.verdict, "unknown", "timeout"}
    return {trap.verdict} if trap.constrained or "no_attack" not in setting else {trap.verdict, "unknown"}


def solve(trap: Trap, folder: Path, *words: str) -> str:
    model = trap.build(folder / "net.onnx")
    prop = flow.write_property(folder / "prop.vnnlib", trap.ranges, trap.outputs, *trap.assertions)
    # What cannot be decided is split until time is up.
    return flow.run(model, prop, *words, deadline=Deadline(60 if trap.decided else 0.3)).verdict.value


@pytest.mark.parametrize("setting", EVERY_SETTING)
@pytest.mark.parametrize("name", TRAPS)
def test_the_verdict_is_right(tmp_path: Path, name: str, setting: str) -> None:
    assert solve(TRAPS[name], tmp_path, *SETTINGS[setting]) in allowed(TRAPS[name], setting)


def test_the_verdict_depends_on_no_number_of_threads(tmp_path: Path, threads: int) -> None:
    for name, trap in TRAPS.items():
        assert solve(trap, tmp_path) in allowed(trap, "default"), name


def test_a_sat_on_the_edge_needs_no_attack(tmp_path: Path) -> None:
    """The minimisers of bounds that fail are tried as counterexamples."""
    assert solve(TRAPS["fixed_sat"], tmp_path, "--pgd_order", "skip") == "sat"
    assert solve(TRAPS["edge_sat"], tmp_path, "--pgd_order", "skip") == "sat"


@pytest.mark.parametrize("setting", ["default", "double", "no_attack"])
def test_a_decimal_that_no_float_equals_proves_nothing(tmp_path: Path, setting: str) -> None:
    """y = x = 0.7 fulfils y >= 0.7, but 0.7 in float32 does not: neither answer can be given."""
    trap = Trap(wide(1), [("0.7", "0.7")], 1, ("(>= Y_0 0.7)",), "unknown", decided=False)
    assert solve(trap, tmp_path, *SETTINGS[setting]) in ("unknown", "timeout")


# 2: ReLU after the last layer, its negation against zero


def negated_relus(layers: list[tuple[np.ndarray, np.ndarray]]) -> Build:
    def build(path: Path) -> Path:
        made = OnnxBuilder()
        x = made.input("x", [1, 1])
        for weight, bias in layers:
            x = made.op("Relu", made.op("Gemm", x, made.constant(weight), made.constant(bias), transB=1))
        made.output(made.op("Neg", x, name="y"), [1, 1])
        return made.save(path)

    return build


def random_layers(seed: int) -> tuple[list[tuple[np.ndarray, np.ndarray]], float, float]:
    """1-6-6-1, float32 values; the exact minimum of the last pre-activation over [-1, 1], and its scale."""
    random = np.random.default_rng(seed)
    sizes = [1, 6, 6, 1]
    layers = []
    for inputs, outputs in itertools.pairwise(sizes):
        weight, bias = random.standard_normal((outputs, inputs)), random.standard_normal(outputs)
        layers.append((weight.astype(np.float32), bias.astype(np.float32)))
    weights, biases = [w for w, _ in layers], [b for _, b in layers]
    ends = np.array([-1.0]), np.array([1.0])
    low = exact_minimum(weights, biases, *ends, np.array([1.0]))
    high = -exact_minimum(weights, biases, *ends, np.array([-1.0]))
    return layers, low, max(high - low, 0.1)


@pytest.mark.parametrize("setting", ["default", "double", *SEARCHES])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shift", [-2.0, -0.01, 0.01, 0.3, 20.0])
def test_a_negated_relu_reaches_zero_or_not(tmp_path: Path, seed: int, shift: float, setting: str) -> None:
    """`shift`: the smallest last pre-activation, in units of how much it varies."""
    layers, low, scale = random_layers(seed)
    weight, bias = layers[-1]
    moved = [*layers[:-1], (weight, (bias - low + shift * scale).astype(np.float32))]
    verdict = "unsat" if shift > 0 else "sat"
    trap = Trap(negated_relus(moved), [(-1, 1)], 1, ("(>= Y_0 0)",), verdict)
    assert solve(trap, tmp_path, *SETTINGS[setting]) in allowed(trap, setting)


# 6: malformed texts


@pytest.mark.parametrize(
    ("assertion", "column", "message"),
    [
        ("(or ((and (<= Y_0 0) (<= Y_0 1))))", 13, "an operator is missing"),
        ("(or (and (>= Y_0)))", 18, "'>=' needs two operands, found 1"),
        ("(and (<= Y_0 0) (>= Y_0 ))", 25, "'>=' needs two operands, found 1"),
    ],
)
def test_a_malformed_property_is_an_error_with_its_place(
    tmp_path: Path, assertion: str, column: int, message: str
) -> None:
    model = identity(tmp_path / "net.onnx", 1)
    prop = flow.write_property(tmp_path / "p.vnnlib", [(-1, 1)], 1, assertion)
    with pytest.raises(LoadError) as caught:
        flow.run(model, prop)
    assert str(caught.value).startswith(f"{prop}:5:{column}: {message}")


# 9: exact bounds


def test_bounds_of_a_transposed_broadcast_are_exact(tmp_path: Path) -> None:
    model = transpose_broadcast(tmp_path / "net.onnx")
    clauses = " ".join(f"(<= Y_{i} -0.5) (>= Y_{i} 1.25)" for i in range(4))
    prop = flow.write_property(tmp_path / "p.vnnlib", UNIT, 4, f"(or {clauses})")
    outcome = flow.run(model, prop, "--bound_prop_method", "crown", "--pgd_order", "skip")
    assert outcome.verdict is Verdict.UNSAT
    assert [list(outcome.bounds[i].lower) for i in range(8)] == [[0.5], [0.25]] * 4


# 12: residual blocks with stride and a shortcut


@pytest.fixture(scope="module")
def residual(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray, np.ndarray]:
    """A network, an input, and its outputs there."""
    import onnxruntime

    path = residual_cnn(tmp_path_factory.mktemp("residual") / "net.onnx")
    x = np.random.default_rng(0).random((1, 3, 32, 32), dtype=np.float32)
    (y,) = onnxruntime.InferenceSession(str(path)).run(None, {"x": x})
    return path, x.ravel(), y.ravel()


@pytest.mark.parametrize("setting", ["default", "tiny_memory", "no_attack", "double"])
@pytest.mark.parametrize(("offset", "verdict"), [(-3.0, "unsat"), (-1e-4, "sat")])
def test_a_residual_network(
    tmp_path: Path,
    residual: tuple[Path, np.ndarray, np.ndarray],
    setting: str,
    offset: float,
    verdict: str,
) -> None:
    path, x, y = residual
    radius = 1e-3
    ranges: list[flow.Range] = [(f"{v - radius:.6f}", f"{v + radius:.6f}") for v in x.tolist()]
    assertion = f"(<= Y_3 {y[3] + offset:.6f})"
    prop = flow.write_property(tmp_path / "p.vnnlib", ranges, 10, assertion)
    words = SETTINGS[setting]
    if "1KiB" in words:  # one row at a time: seconds for each thousand neurons
        words = ("--memory_budget", "8MiB")
    outcome = flow.run(path, prop, *words)
    trap = Trap(lambda path: path, ranges, 10, (assertion,), verdict)
    assert outcome.verdict.value in allowed(trap, setting)


# 14: overflow, NaN, infinity


def product(*factors: float, dtype: type[np.floating] = np.float32, relu: bool = False) -> Build:
    """y = x times the factors, one after the other."""

    def build(path: Path) -> Path:
        made = OnnxBuilder(dtype=dtype)
        x = made.input("x", [1, 1])
        for factor in factors:
            x = made.op("Mul", x, made.constant(np.array([[factor]])))
        made.output(made.op("Relu" if relu else "Identity", x, name="y"), [1, 1])
        return made.save(path)

    return build


def cancelling(path: Path) -> Path:
    """y = (x * 1e38 * 10) - (x * 1e38 * 10) + 1: one in real arithmetic, NaN in float32."""
    made = OnnxBuilder()
    x = made.input("x", [1, 1])
    big = made.op("Mul", x, made.constant(np.array([[1e38]])))
    ten = made.constant(np.array([[10.0]]))
    gap = made.op("Sub", made.op("Mul", big, ten), made.op("Mul", big, ten))
    made.output(made.op("Add", gap, made.constant(np.array([[1.0]])), name="y"), [1, 1])
    return made.save(path)


def hidden_nan(path: Path) -> Path:
    """The NaN belongs to an output that the property does not mention."""
    made = OnnxBuilder()
    x = made.input("x", [1, 1])
    made.output(made.op("Mul", x, made.constant(np.array([[1.0, np.nan]])), name="y"), [1, 2])
    return made.save(path)


NOT_FINITE: dict[str, tuple[Build, list[flow.Range], int, str]] = {
    "overflow_low": (product(1e30, 1e30), [(-1, 1)], 1, "(<= Y_0 -1e35)"),
    "overflow_high": (product(1e30, 1e30), [(1, 2)], 1, "(<= Y_0 0)"),
    "overflow_relu": (product(1e30, 1e30, relu=True), [(-2, -1)], 1, "(>= Y_0 1)"),
    "overflow_and_back": (product(1e30, 1e30, 1e-30, 1e-30), [(1, 2)], 1, "(<= Y_0 0.5)"),
    "overflow_at_the_end": (product(3e38), [(1, 2)], 1, "(<= Y_0 0)"),
    "cancelling": (cancelling, [(1, 2)], 1, "(<= Y_0 0)"),
    "nan": (product(np.nan), [(1, 2)], 1, "(<= Y_0 -1)"),
    "nan_relu": (product(np.nan, relu=True), [(1, 2)], 1, "(<= Y_0 -1)"),
    "infinity": (product(np.inf), [(1, 2)], 1, "(<= Y_0 0)"),
    "infinity_times_zero": (product(np.inf), [(0, 0)], 1, "(<= Y_0 -1)"),
    "hidden_nan": (hidden_nan, [(1, 2)], 2, "(<= Y_0 0)"),
    "box_beyond_float32": (relu(1), [("-1e39", "1e39")], 1, "(<= Y_0 -5)"),
}


@pytest.mark.parametrize("setting", EVERY_SETTING)
@pytest.mark.parametrize("name", NOT_FINITE)
def test_a_network_that_is_not_finite_is_never_unsat(tmp_path: Path, name: str, setting: str) -> None:
    build, ranges, outputs, assertion = NOT_FINITE[name]
    trap = Trap(build, ranges, outputs, (assertion,), "unknown", decided=False)
    assert solve(trap, tmp_path, *SETTINGS[setting]) in ("unknown", "timeout")


def test_what_overflows_float32_may_be_finite_in_float64(tmp_path: Path) -> None:
    """A constant of 1e60 makes the whole run compute in float64, whether asked for or not."""
    trap = Trap(product(1e30, 1e30, dtype=np.float64, relu=True), [(1, 2)], 1, ("(<= Y_0 0)",), "unsat")
    assert solve(trap, tmp_path) == "unsat"
    assert solve(trap, tmp_path, "--double_fp") == "unsat"


# 15: again


def test_a_second_run_gives_the_same_answer(tmp_path: Path) -> None:
    names = ("fixed_sat", "magnitudes_linear_sat", "mixed_relaxed_unsat", "comparison_corner_sat")
    for name, setting in itertools.product(names, ["default", *SEARCHES]):
        trap, words = TRAPS[name], SETTINGS[setting]
        model = trap.build(tmp_path / "net.onnx")
        prop = flow.write_property(tmp_path / "p.vnnlib", trap.ranges, trap.outputs, *trap.assertions)
        first, second = flow.run(model, prop, *words), flow.run(model, prop, *words)
        assert (first.verdict, first.witness, first.bounds) == (second.verdict, second.witness, second.bounds)
