"""Confirmation: exact decimals, onnxruntime's answers, no tolerance."""

from __future__ import annotations

import gzip
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from abcrown_dist.attack.confirm import Confirmer, OnnxModel
from abcrown_dist.spec.property import Property, Witness
from abcrown_dist.spec.vnnlib1 import load_vnnlib, parse_vnnlib
from abcrown_dist.util.errors import LoadError


def prop_of(inputs: int, outputs: int, *assertions: str) -> Property:
    names = [f"X_{i}" for i in range(inputs)] + [f"Y_{i}" for i in range(outputs)]
    lines = [f"(declare-const {name} Real)" for name in names]
    return parse_vnnlib("\n".join([*lines, *(f"(assert {item})" for item in assertions)]), "p")


def confirm_identity(prop: Property, *x: float, dtype: type[np.floating[Any]] = np.float32) -> Witness | None:
    return Confirmer(prop, lambda value: value, dtype=dtype).confirm(np.array(x), 0)


def save(
    path: Path, nodes: list[onnx.NodeProto], shapes: list[list[int | str]], outputs: list[str], **extra: Any
) -> Path:
    """An ONNX file with inputs in0, in1, ... of the given shapes."""
    element = extra.get("element", TensorProto.FLOAT)
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info(f"in{i}", element, shape) for i, shape in enumerate(shapes)],
        [helper.make_tensor_value_info(name, element, None) for name in outputs],
        extra.get("weights", []),
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save_model(model, path, **extra.get("saving", {}))
    return path


def identity(path: Path, shape: list[int | str], **extra: Any) -> Path:
    return save(path, [helper.make_node("Identity", ["in0"], ["out"])], [shape], ["out"], **extra)


# Exactness


def test_a_fixed_input_on_the_threshold() -> None:
    """Trap 4: input fixed at 5, Y >= 5."""
    witness = confirm_identity(prop_of(1, 1, "(= X_0 5)", "(>= Y_0 5)"), 5.0)
    assert witness == Witness([Decimal(5)], [5.0], 0)
    assert confirm_identity(prop_of(1, 1, "(= X_0 5)", "(> Y_0 5)"), 5.0) is None


def test_no_tolerance() -> None:
    above = np.nextafter(np.float64(1), 2)
    cases: list[tuple[str, float, type[np.floating[Any]], bool]] = [
        ("(>= Y_0 1)", 1.0, np.float64, True),
        ("(>= Y_0 1.0000000000000000000001)", 1.0, np.float64, False),
        ("(<= Y_0 1)", above, np.float64, False),
        ("(< Y_0 1)", 1.0, np.float64, False),
        ("(<= Y_0 1)", above, np.float32, True),  # the model sees 1
    ]
    for assertion, x, dtype, confirmed in cases:
        witness = confirm_identity(prop_of(1, 1, "(<= 0 X_0 2)", assertion), x, dtype=dtype)
        assert (witness is not None) == confirmed, assertion


def test_sums_are_not_rounded() -> None:
    """1e20 + 1 - 1e20 is 0 in float64."""
    prop = prop_of(3, 3, "(<= 0 X_0 1e20)", "(<= 0 X_1 1)", "(<= 0 X_2 1e20)", "(>= (- (+ Y_0 Y_1) Y_2) 1)")
    assert confirm_identity(prop, 1e20, 1.0, 1e20, dtype=np.float64) is not None
    assert confirm_identity(prop, 1e20, 0.5, 1e20, dtype=np.float64) is None


def test_difference_of_the_smallest_number() -> None:
    """Trap 5, with -5e-324 on the right-hand side."""
    prop = prop_of(2, 2, "(<= -2.6 X_0 3.4)", "(<= -4.1 X_1 1.9)", "(>= Y_0 (+ Y_1 -5e-324))")
    assert confirm_identity(prop, 1.5, 1.5) is not None
    assert confirm_identity(prop, 1.5, np.nextafter(np.float32(1.5), np.float32(2))) is None


def test_all_constraints_of_the_disjunct_must_hold() -> None:
    prop = prop_of(2, 2, "(<= 0 X_0 1)", "(<= 0 X_1 1)", "(<= Y_0 0.5)", "(<= Y_1 0.5)")
    assert confirm_identity(prop, 0.25, 0.25) is not None
    assert confirm_identity(prop, 0.25, 0.75) is None
    assert confirm_identity(prop, 0.75, 0.25) is None


def test_only_the_named_disjunct_counts() -> None:
    prop = prop_of(1, 1, "(<= 0 X_0 1)", "(or (>= Y_0 5) (<= Y_0 0.5))")
    confirmer = Confirmer(prop, lambda x: x)
    assert confirmer.confirm(np.array([0.25]), 0) is None
    witness = confirmer.confirm(np.array([0.25]), 1)
    assert witness is not None
    assert witness.disjunct == 1


def test_a_disjunct_without_constraints_is_fulfilled_anywhere() -> None:
    assert confirm_identity(prop_of(1, 1, "(<= 0 X_0 1)"), 0.5) is not None


def test_input_constraints_are_judged_on_the_decimals() -> None:
    """3 X_0 <= 1: the float32 below a third is a witness, the one above is none."""
    prop = prop_of(1, 1, "(>= X_0 0)", "(<= (* 3 X_0) 1)", "(>= Y_0 0.3)")
    below = np.nextafter(np.float32(1) / np.float32(3), np.float32(0))
    assert confirm_identity(prop, float(below)) is not None
    assert confirm_identity(prop, 0.34) is None
    mixed = prop_of(1, 1, "(<= 0 X_0 1)", "(>= Y_0 X_0)")
    assert float(np.float32(0.3)) > 0.3
    assert confirm_identity(mixed, 0.3) is not None
    assert float(np.float32(0.7)) < 0.7
    assert confirm_identity(mixed, 0.7) is None


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_none_confirm_nothing(value: float) -> None:
    prop = prop_of(1, 1, "(<= 0 X_0 1)", "(<= Y_0 1e300)")
    assert confirm_identity(prop, value) is None
    assert Confirmer(prop, lambda x: np.full(1, value)).confirm(np.array([0.5]), 0) is None
    assert Confirmer(prop_of(1, 1, "(<= 0 X_0 1)"), lambda x: [value]).confirm(np.array([0.5]), 0) is None


# The decimals


def test_decimals_lie_in_the_box_as_written_and_are_what_is_tested() -> None:
    seen: list[np.ndarray] = []
    draw = np.random.default_rng(0)
    bounds = [sorted(draw.normal(size=2)) for _ in range(200)]
    assertions = [f"(<= {low:.12f} X_{i} {high:.12f})" for i, (low, high) in enumerate(bounds)]
    prop = prop_of(200, 1, *assertions)
    box = prop.disjuncts[0].box

    def model(x: np.ndarray) -> np.ndarray:
        seen.append(x.copy())
        return np.zeros(1)

    ends = np.array(bounds)
    for x in (ends[:, 0], ends[:, 1], ends.mean(axis=1), ends[:, 0] - 1, ends[:, 1] + 1):
        seen.clear()
        witness = Confirmer(prop, model).confirm(x, 0)
        assert witness is not None
        assert all(a <= value <= b for a, value, b in zip(box.lower, witness.inputs, box.upper, strict=True))
        printed = [float(str(value)) for value in witness.inputs]
        np.testing.assert_array_equal(np.array(printed).astype(np.float32), seen[0])
        inside = np.clip(x, ends[:, 0], ends[:, 1])
        np.testing.assert_allclose(printed, inside, rtol=1e-6, atol=1e-7)


def test_short_decimals_are_preferred() -> None:
    witness = confirm_identity(prop_of(2, 2, "(<= 0 X_0 1)", "(<= -1 X_1 1)"), 0.1, -0.0)
    assert witness is not None
    assert [str(value) for value in witness.inputs] == ["0.1", "0"]


def test_exact_decimals_where_the_short_one_is_outside() -> None:
    exact = Decimal(float(np.float32(0.1)))
    witness = confirm_identity(prop_of(1, 1, f"(<= {exact - Decimal('1e-12')} X_0 {exact})"), 0.1)
    assert witness is not None
    assert witness.inputs[0] == exact


def test_a_box_between_two_numbers_of_the_type() -> None:
    """Design 7.3: inputs fixed at decimals that no float32 equals."""
    text = "0.123456789012345678"
    witness = confirm_identity(prop_of(1, 1, f"(= X_0 {text})", "(<= Y_0 0.13)"), float(text))
    assert witness is not None
    assert str(witness.inputs[0]) == text
    assert witness.outputs[0] == float(np.float32(float(text)))
    far = prop_of(1, 1, "(<= 0.12345678901 X_0 0.12345678902)")
    witness = confirm_identity(far, 7.0)
    assert witness is not None
    assert Decimal("0.12345678901") <= witness.inputs[0] <= Decimal("0.12345678902")


def test_both_readings_of_a_decimal_must_be_counterexamples() -> None:
    """A decimal just above a midpoint of two float32: as float64 it is the midpoint, and rounds down."""
    low, high = np.float32(1), np.nextafter(np.float32(1), np.float32(2))
    midpoint = (Decimal(float(low)) + Decimal(float(high))) / 2
    text = f"{midpoint}0000000001"
    assert np.float32(float(text)) == low
    for assertion, confirmed in [("(<= Y_0 1)", False), ("(> Y_0 1)", False), ("(<= Y_0 2)", True)]:
        witness = confirm_identity(prop_of(1, 1, f"(= X_0 {text})", assertion), 1.0)
        assert (witness is not None) == confirmed, assertion
    tie = confirm_identity(prop_of(1, 1, f"(= X_0 {midpoint})", "(<= Y_0 1)"), 1.0)
    assert tie is not None


@pytest.mark.parametrize("x", [0.0, 1.0, -3.0, 4.0])
def test_a_candidate_on_an_open_side_moves_inside(x: float) -> None:
    witness = confirm_identity(prop_of(1, 1, "(< 0 X_0 1)"), x)
    assert witness is not None
    assert 0 < witness.inputs[0] < 1
    narrow = prop_of(1, 1, "(< 0.12345678901 X_0 0.12345678902)")
    witness = confirm_identity(narrow, x)
    assert witness is not None
    assert witness.inputs[0] == Decimal("0.123456789015")


# Models


def test_onnx_models_plain_and_compressed(tmp_path: Path) -> None:
    path = identity(tmp_path / "a net.onnx", ["batch", 2, 1])
    packed = tmp_path / "a net.onnx.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    prop = prop_of(2, 2, "(<= 0 X_0 1)", "(<= 0 X_1 1)", "(>= Y_1 Y_0)")
    for model in (path, str(path), packed):
        confirmer = Confirmer(prop, model)
        np.testing.assert_array_equal(confirmer.evaluate(np.array([0.25, 0.5])), [0.25, 0.5])
        assert confirmer.confirm(np.array([0.25, 0.5]), 0) is not None
        assert confirmer.confirm(np.array([0.5, 0.25]), 0) is None


def test_external_data(tmp_path: Path) -> None:
    weight = np.arange(4000, dtype=np.float32).reshape(2, 2000)
    path = save(
        tmp_path / "net.onnx",
        [helper.make_node("MatMul", ["in0", "w"], ["out"])],
        [[1, 2]],
        ["out"],
        weights=[numpy_helper.from_array(weight, "w")],
        saving={"save_as_external_data": True, "location": "weights.bin", "size_threshold": 0},
    )
    assert (tmp_path / "weights.bin").stat().st_size >= weight.nbytes
    np.testing.assert_array_equal(
        OnnxModel(path)(np.array([1, 2], dtype=np.float32)), weight[0] + 2 * weight[1]
    )


def test_several_inputs_and_outputs_in_order(tmp_path: Path) -> None:
    nodes = [helper.make_node("Neg", ["in1"], ["b"]), helper.make_node("Identity", ["in0"], ["a"])]
    path = save(tmp_path / "net.onnx", nodes, [[2, 2], ["n", 3]], ["a", "b"])
    model = OnnxModel(path)
    assert model.num_inputs == 7
    np.testing.assert_array_equal(model(np.arange(7, dtype=np.float32)), [0, 1, 2, 3, -4, -5, -6])


def test_shapes_can_be_given(tmp_path: Path) -> None:
    path = identity(tmp_path / "net.onnx", ["batch", "length"])
    assert OnnxModel(path, [(1, 5)]).num_inputs == 5
    with pytest.raises(LoadError, match="2 input shapes for 1 inputs"):
        OnnxModel(path, [(1, 5), (1, 5)])


def test_double_models_are_fed_doubles(tmp_path: Path) -> None:
    path = identity(tmp_path / "net.onnx", [1, 1], element=TensorProto.DOUBLE)
    prop = prop_of(1, 1, "(<= 0 X_0 1)", "(>= Y_0 0.1)")
    x = np.array([np.nextafter(0.1, 1)])
    witness = Confirmer(prop, path).confirm(x, 0)
    assert witness is not None
    assert list(witness.outputs) == x.tolist()


def test_python_models_may_return_tensors() -> None:
    layer = torch.nn.Linear(2, 3)
    confirmer = Confirmer(prop_of(2, 3, "(<= 0 X_0 1)", "(<= 0 X_1 1)"), lambda x: layer(torch.from_numpy(x)))
    assert confirmer.evaluate(np.zeros(2)).tolist() == layer.bias.tolist()


def test_models_that_cannot_be_loaded(tmp_path: Path) -> None:
    prop = prop_of(1, 1, "(<= 0 X_0 1)")
    nonsense = tmp_path / "nonsense.onnx"
    nonsense.write_bytes(b"nonsense")
    packed = tmp_path / "nonsense.onnx.gz"
    packed.write_bytes(b"nonsense")
    integers = identity(tmp_path / "integers.onnx", [1], element=TensorProto.INT64)
    for path, message in [
        (nonsense, "nonsense.onnx: onnxruntime cannot load the model: "),
        (packed, "nonsense.onnx.gz: cannot read the model: Not a gzipped file"),
        (tmp_path / "none.onnx", "none.onnx: onnxruntime cannot load the model: .*(exist|No such)"),
        (tmp_path / "none.onnx.gz", "none.onnx.gz: cannot read the model: No such file"),
        (integers, r"'in0' has type tensor\(int64\), not a floating-point one"),
    ]:
        with pytest.raises(LoadError, match=message) as caught:
            Confirmer(prop, path)
        assert "\n" not in str(caught.value)


def test_models_that_do_not_fit(tmp_path: Path) -> None:
    path = identity(tmp_path / "net.onnx", [1, 3])
    with pytest.raises(LoadError, match="declares 1 inputs, but the network has 3"):
        Confirmer(prop_of(1, 1, "(<= 0 X_0 1)"), path)
    confirmer = Confirmer(prop_of(3, 1, *(f"(<= 0 X_{i} 1)" for i in range(3))), path)
    with pytest.raises(LoadError, match="declares 1 outputs, but the network has 3"):
        confirmer.confirm(np.zeros(3), 0)


def test_a_model_that_fails_when_run(tmp_path: Path) -> None:
    nodes = [helper.make_node("Reshape", ["in0", "shape"], ["out"])]
    shape = numpy_helper.from_array(np.array([5], dtype=np.int64), "shape")
    path = save(tmp_path / "net.onnx", nodes, [["n", 1]], ["out"], weights=[shape])
    with pytest.raises(LoadError, match="onnxruntime cannot run the model: "):
        OnnxModel(path)(np.zeros(1, dtype=np.float32))


def test_a_real_counterexample(bench: Path) -> None:
    """ACAS Xu property 2 on network 3-7 is `sat`; its counterexamples are found by random search."""
    prop = load_vnnlib(bench / "acasxu" / "prop_2.vnnlib")
    confirmer = Confirmer(prop, bench / "acasxu" / "ACASXU_run2a_3_7_batch_2000.onnx")
    low, high = prop.disjuncts[0].box.outward()
    draw = np.random.default_rng(0)
    points = draw.uniform(low, high, size=(3000, len(low)))
    answers = np.array([confirmer.evaluate(x) for x in points])
    false = (answers[:, :1] >= answers[:, 1:]).all(axis=1)
    assert 0 < false.sum() < len(points)
    confirmed = [confirmer.confirm(x, 0) is not None for x in points]
    np.testing.assert_array_equal(confirmed, false)
