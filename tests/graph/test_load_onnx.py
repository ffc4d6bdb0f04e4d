"""ONNX files: every way to store one loads; every defect is one line that names what is wrong."""

from __future__ import annotations

import gzip
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from abcrown_dist.graph.aten import unsupported
from abcrown_dist.graph.execute import execute
from abcrown_dist.graph.load_onnx import capture, check_agreement, load_onnx
from abcrown_dist.graph.onnx_file import input_ports, open_session, read_onnx, run_session
from abcrown_dist.graph.rewrite import rewrite
from abcrown_dist.util.errors import LoadError
from tests.models import OnnxBuilder, constant_output, mlp, residual_cnn, transpose_broadcast


def ops(path: Path) -> list[str]:
    """Ops of the loaded graph, in order."""
    return [node.op for node in load_onnx(path).graph]


def assert_agrees(path: Path, original: Path | None = None) -> None:
    """The loaded graph gives onnxruntime's outputs (of `original`) on points of several sizes."""
    loaded = load_onnx(path)
    model = read_onnx(original or path)
    ports = input_ports(model, path)
    session = open_session(original or path)
    random = torch.Generator().manual_seed(7)
    for scale in (0.1, 1.0, 30.0):
        point = [torch.randn(port.shape, generator=random, dtype=port.dtype) * scale for port in ports]
        for found, wanted in zip(
            execute(loaded.graph, point), run_session(session, ports, point), strict=True
        ):
            assert found.numel() == wanted.size
            error = np.abs(found.numpy().reshape(-1) - wanted.reshape(-1)).max()
            assert error <= 1e-4 * np.abs(wanted).max()


def test_mlp(tmp_path: Path) -> None:
    path = mlp(tmp_path / "m.onnx", [4, 6, 5, 3])
    loaded = load_onnx(path)
    assert loaded.input_names == ("x",)
    assert loaded.input_shapes == ((1, 4),)
    assert loaded.output_names == ("y",)
    assert loaded.output_shapes == ((1, 3),)
    assert loaded.dtype == torch.float32
    assert loaded.path == str(path)
    assert loaded.warnings == ()
    assert [node.name for node in loaded.graph] == ["x", "z0", "h0", "z1", "h1", "y"]
    assert [node.op for node in loaded.graph] == ["input", "linear", "relu", "linear", "relu", "linear"]
    assert_agrees(path)


def test_gzip(tmp_path: Path) -> None:
    plain = mlp(tmp_path / "m.onnx", [4, 6, 3])
    path = tmp_path / "m.onnx.gz"
    path.write_bytes(gzip.compress(plain.read_bytes()))
    assert_agrees(path, original=plain)


def test_external_data(tmp_path: Path) -> None:
    model = read_onnx(mlp(tmp_path / "m.onnx", [4, 64, 3]))
    path = tmp_path / "e.onnx"
    onnx.save(model, str(path), save_as_external_data=True, location="e.bin", size_threshold=16)
    assert (tmp_path / "e.bin").exists()
    assert_agrees(path)
    compressed = tmp_path / "e.onnx.gz"
    compressed.write_bytes(gzip.compress(path.read_bytes()))
    assert_agrees(compressed, original=path)
    (tmp_path / "e.bin").unlink()
    with pytest.raises(LoadError, match=r"e\.onnx: .*e\.bin"):
        load_onnx(path)


def test_initialisers_among_the_inputs(tmp_path: Path) -> None:
    build = OnnxBuilder()
    build.output(build.gemm(build.input("x", [1, 3]), 3, 2, name="y"), [1, 2])
    for tensor in build.initializers:
        build.inputs.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    path = build.save(tmp_path / "m.onnx")
    assert load_onnx(path).input_names == ("x",)
    assert_agrees(path)


def test_dynamic_axes(tmp_path: Path) -> None:
    build = OnnxBuilder()
    x = build.op("MatMul", build.input("x", ["batch", "time", 3]), build.weight(3, 2))
    build.output(build.op("ReduceSum", x, build.constant(np.array([1])), name="y"), ["batch", 1, 2])
    path = build.save(tmp_path / "m.onnx")
    assert load_onnx(path).input_shapes == ((1, 1, 3),)
    assert load_onnx(path, input_shape=[1, 7, 3]).input_shapes == ((1, 7, 3),)
    with pytest.raises(LoadError, match=r"m\.onnx: .*running the model failed"):
        load_onnx(path, input_shape=[1, 7, 4])


def test_several_inputs_and_outputs(tmp_path: Path) -> None:
    build = OnnxBuilder()
    build.input("a", [1, 2])
    build.input("b", [1, 3])
    joined = build.op("Concat", "a", "b", axis=1)
    first, second = build.gemm(joined, 5, 4, name="first"), build.op("Tanh", joined, name="second")
    build.output(second, [1, 5])
    build.output(first, [1, 4])
    path = build.save(tmp_path / "m.onnx")
    loaded = load_onnx(path)
    assert loaded.output_names == ("second", "first")
    assert loaded.output_shapes == ((1, 5), (1, 4))
    with pytest.raises(LoadError, match="has 2 inputs"):
        load_onnx(path, input_shape=[1, 5])
    assert_agrees(path)


def test_double_precision(tmp_path: Path) -> None:
    build = OnnxBuilder(dtype=np.float64)
    x = build.op("Relu", build.gemm(build.input("x", [1, 3]), 3, 4))
    build.output(build.gemm(x, 4, 2, name="y"), [1, 2])
    path = build.save(tmp_path / "m.onnx")
    loaded = load_onnx(path)
    assert loaded.dtype == torch.float64
    assert {value.dtype for value in loaded.graph.constants.values()} == {torch.float64}
    assert_agrees(path)


def test_split_and_slices(tmp_path: Path) -> None:
    build = OnnxBuilder()
    build.input("x", [1, 6])
    build.op("Split", "x", build.constant(np.array([1, 2, 3])), name="part", outputs=3, axis=1)
    middle = build.op("Sigmoid", "part_1")
    build.output(build.op("Concat", "part_2", middle, name="y", axis=1), [1, 5])
    path = build.save(tmp_path / "m.onnx")
    assert {"part_1", "part_2", "y"} - {node.name for node in load_onnx(path).graph} == {"y"}
    assert_agrees(path)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("shape", [(4, 4), (2, 4, 4)])
def test_products_with_any_constant(tmp_path: Path, left: bool, shape: tuple[int, ...]) -> None:
    """onnx2pytorch alone makes a dense layer of each of these."""
    build = OnnxBuilder()
    build.input("x", [1, 2, 4, 4])
    operands = (build.weight(*shape), "x") if left else ("x", build.weight(*shape))
    build.output(build.op("Relu", build.op("MatMul", *operands), name="y"), [1, 2, 4, 4])
    assert_agrees(build.save(tmp_path / "m.onnx"))


def test_batch_normalisation_is_folded(tmp_path: Path) -> None:
    build = OnnxBuilder()
    x = build.batch_norm(build.conv(build.input("x", [1, 2, 8, 8]), 2, 3, 3, pad=1), 3)
    x = build.op("Flatten", build.op("LeakyRelu", x, alpha=0.1))
    build.output(build.batch_norm(build.gemm(x, 192, 4), 4), [1, 4])
    path = build.save(tmp_path / "m.onnx")
    assert ops(path) == ["input", "conv", "leaky_relu", "view", "linear"]
    assert_agrees(path)


def test_normalisation_of_the_input_is_folded(tmp_path: Path) -> None:
    build = OnnxBuilder()
    x = build.op("Sub", build.input("x", [1, 1, 4, 4]), build.constant(np.float32(0.13)))
    x = build.op("Flatten", build.op("Div", x, build.constant(np.float32(0.3))))
    x = build.op("Add", build.op("MatMul", x, build.weight(16, 5)), build.weight(5))
    build.output(build.op("Relu", x, name="y"), [1, 5])
    path = build.save(tmp_path / "m.onnx")
    assert ops(path) == ["input", "view", "linear", "relu"]
    assert_agrees(path)


def test_transpose_and_broadcast(tmp_path: Path) -> None:
    path = transpose_broadcast(tmp_path / "m.onnx")
    (value,) = execute(load_onnx(path).graph, [torch.tensor([[[0.25, 0.75]]])])
    assert value.tolist() == [[[0.25, 0.25], [0.75, 0.75]]]
    assert_agrees(path)


def test_residual_cnn(tmp_path: Path) -> None:
    path = residual_cnn(tmp_path / "m.onnx")
    found = ops(path)
    assert [found.count(op) for op in ("conv", "relu", "add", "linear", "view")] == [6, 6, 2, 2, 1]
    assert len(found) == 18
    assert_agrees(path)


@pytest.mark.parametrize("value", [0.0, 5000.0])
def test_constant_network(tmp_path: Path, value: float) -> None:
    loaded = load_onnx(constant_output(tmp_path / "m.onnx", value))
    assert execute(loaded.graph, [torch.tensor([[135845.0]])])[0].tolist() == [[value]]


def test_output_that_no_input_reaches(tmp_path: Path) -> None:
    build = OnnxBuilder()
    build.input("x", [1, 3])
    build.output(build.op("Identity", build.constant(np.array([[1.5, -2.0]])), name="y"), [1, 2])
    loaded = load_onnx(build.save(tmp_path / "m.onnx"))
    assert execute(loaded.graph, [torch.ones(1, 3)])[0].tolist() == [[1.5, -2.0]]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_no_numbers_give_a_warning(tmp_path: Path, bad: float) -> None:
    build = OnnxBuilder()
    weight = np.ones((2, 3))
    weight[0, 1] = bad
    build.input("x", [1, 3])
    build.output(build.op("Gemm", "x", build.constant(weight), name="y", transB=1), [1, 2])
    loaded = load_onnx(build.save(tmp_path / "m.onnx"))
    assert "NaN or infinite at 6 of the points" in loaded.warnings[0]
    assert not torch.isfinite(execute(loaded.graph, [torch.ones(1, 3)])[0][0, 0])


def test_argmax_is_named_with_all_others(tmp_path: Path) -> None:
    build = OnnxBuilder()
    x = build.op("Erf", build.gemm(build.input("x", [1, 3]), 3, 4), name="erf")
    build.op("ArgMax", x, name="best", axis=1)
    build.output("best", [1, 1], TensorProto.INT64)
    loaded = load_onnx(build.save(tmp_path / "m.onnx"))
    assert unsupported(loaded.graph, {"relu"}) == ["erf (erf)", "argmax (best)"]


def test_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_onnx(residual_cnn(tmp_path / "m.onnx"))
    assert capfd.readouterr() == ("", "")


def _missing(folder: Path) -> Path:
    return folder / "none.onnx"


def _text(folder: Path) -> Path:
    path = folder / "m.onnx"
    path.write_text("(declare-const X_0 Real)")
    return path


def _empty(folder: Path) -> Path:
    path = folder / "m.onnx"
    path.write_bytes(b"")
    return path


def _not_gzip(folder: Path) -> Path:
    return Path(shutil.copy(mlp(folder / "m.onnx", [2, 2]), folder / "m.onnx.gz"))


def _integer_input(folder: Path) -> Path:
    build = OnnxBuilder()
    build.inputs.append(helper.make_tensor_value_info("x", TensorProto.INT64, [1, 2]))
    build.output(build.op("Cast", "x", name="y", to=TensorProto.FLOAT), [1, 2])
    return build.save(folder / "m.onnx")


def _no_input(folder: Path) -> Path:
    build = OnnxBuilder()
    build.output(build.op("Identity", build.constant(np.ones(1)), name="y"), [1])
    return build.save(folder / "m.onnx")


def _mixed_inputs(folder: Path) -> Path:
    build = OnnxBuilder()
    build.inputs.append(helper.make_tensor_value_info("d", TensorProto.DOUBLE, [1, 2]))
    cast = build.op("Cast", "d", to=TensorProto.FLOAT)
    build.output(build.op("Add", build.input("x", [1, 2]), cast, name="y"), [1, 2])
    return build.save(folder / "m.onnx")


def _foreign_op(folder: Path) -> Path:
    build = OnnxBuilder()
    first = build.op("Frobnicate", build.input("x", [1, 2]), name="a", domain="foreign")
    build.output(build.op("Frobnicate", first, name="b", domain="foreign"), [1, 2])
    graph = helper.make_graph(build.nodes, "g", build.inputs, build.outputs)
    opsets = [helper.make_opsetid("", 13), helper.make_opsetid("foreign", 1)]
    path = folder / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), str(path))
    return path


DEFECTS = {
    "missing": (_missing, r"none\.onnx: no such file"),
    "text": (_text, r"m\.onnx: not "),
    "empty": (_empty, r"m\.onnx: not an ONNX model"),
    "not_gzip": (_not_gzip, r"m\.onnx\.gz: not a readable ONNX file"),
    "integer_input": (_integer_input, r"input x has element type INT64; only FLOAT and DOUBLE"),
    "no_input": (_no_input, r"the model has no input"),
    "mixed_inputs": (_mixed_inputs, r"inputs of different floating-point types"),
    "foreign_op": (_foreign_op, r"unsupported ONNX op Frobnicate \(node_a, node_b\)"),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_defects(tmp_path: Path, name: str) -> None:
    make, message = DEFECTS[name]
    with pytest.raises(LoadError, match=message) as caught:
        load_onnx(make(tmp_path))
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 3


def test_a_wrong_capture_is_refused_with_the_first_node_that_differs(tmp_path: Path) -> None:
    path = mlp(tmp_path / "m.onnx", [3, 4, 4, 2])
    model = read_onnx(path)
    ports = input_ports(model, path)
    raw = capture(model, ports, path)
    assert check_agreement(raw, rewrite(raw, torch.float32), model, ports, path) == ()
    key = next(key for key in raw["z1"].constants() if raw.constants[key].ndim == 2)
    wrong = replace(raw, constants={**raw.constants, key: raw.constants[key] * 1.01})
    with pytest.raises(
        LoadError, match=r"differs from onnxruntime by .* first node that differs: Gemm node_z1"
    ):
        check_agreement(wrong, rewrite(wrong, torch.float32), model, ports, path)


def test_a_wrong_capture_shows_outside_a_box_of_fixed_inputs(tmp_path: Path) -> None:
    path = mlp(tmp_path / "m.onnx", [3, 4, 2])
    model = read_onnx(path)
    ports = input_ports(model, path)
    raw = capture(model, ports, path)
    point = torch.tensor([[0.5, -0.5, 0.25]])
    frozen = execute(raw, [point])[0].reshape(-1)
    # As if the input's path had been lost: the last layer ignores its input.
    key_w, key_b = (next(k for k in raw["y"].constants() if raw.constants[k].ndim == d) for d in (2, 1))
    constants = {**raw.constants, key_w: torch.zeros_like(raw.constants[key_w]), key_b: frozen}
    wrong = replace(raw, constants=constants)
    box = point.reshape(-1).double().numpy()
    with pytest.raises(LoadError, match="first node that differs: Gemm node_y"):
        check_agreement(wrong, rewrite(wrong, torch.float32), model, ports, path, box, box)


def test_capture_leaves_the_model_as_it_is(tmp_path: Path) -> None:
    """onnx2pytorch drops the nodes that it fuses from the model that it is given."""
    build = OnnxBuilder()
    product = build.op("MatMul", build.input("x", [1, 3]), build.weight(3, 2))
    build.output(build.op("Add", product, build.weight(2), name="y"), [1, 2])
    model = build.model()
    before = model.SerializeToString()
    capture(model, input_ports(model, "m"), "m")
    assert model.SerializeToString() == before
