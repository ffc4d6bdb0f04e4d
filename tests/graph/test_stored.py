"""The file that a converted network is kept in: every bit comes back, and no damaged bit is believed."""

from __future__ import annotations

import hashlib
import io
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from abcrown_dist.graph.ir import Arg, Const, Graph, Node
from abcrown_dist.graph.load_onnx import LoadedModel, load_onnx
from abcrown_dist.graph.stored import MAGIC, Stored, Unstorable, Unusable, read_model, write_model
from tests.models import OnnxBuilder, constant_output, mlp, residual_cnn, transpose_broadcast


def network(
    constants: Mapping[str, torch.Tensor], args: tuple[Any, ...] = (), **kwargs: Any
) -> LoadedModel:
    """A network of one ATen call that reads the constants, with further arguments."""
    call = Node(
        *("y", "some", ("x",), (1, 2)),
        args=(Arg(0), *map(Const, constants), *args),
        kwargs=kwargs,
        target="aten.some.default",
        output=1,
    )
    graph = Graph((Node("x", "input", (), (1, 2)), call), ("x",), ("y",), constants)
    return LoadedModel(graph, ("x",), ((1, 2),), ("y",), ((1, 2),), torch.float32)


def write(path: Path, model: LoadedModel) -> Path:
    with open(path, "wb") as stream:
        write_model(stream, model, {"key": "k"})
    return path


def read(path: Path) -> Stored:
    with open(path, "rb") as stream:
        return read_model(stream)


def bits(value: torch.Tensor) -> tuple[Any, ...]:
    """All that a kernel could tell of a tensor."""
    values = value.contiguous().reshape(-1).view(torch.uint8).tolist() if value.numel() else []
    return value.dtype, tuple(value.shape), value.stride(), values


def assert_same(found: LoadedModel, expected: LoadedModel) -> None:
    """Same structure, same bits of every constant, in the same order."""
    assert found.graph.nodes == expected.graph.nodes
    assert (found.graph.inputs, found.graph.outputs) == (expected.graph.inputs, expected.graph.outputs)
    assert list(found.graph.constants) == list(expected.graph.constants)
    for key, value in expected.graph.constants.items():
        assert bits(found.graph.constants[key]) == bits(value), key
    for name in ("input_names", "input_shapes", "output_names", "output_shapes", "dtype"):
        assert getattr(found, name) == getattr(expected, name)


SPECIAL = [0.0, -0.0, 1.0, -1 / 3, math.inf, -math.inf, math.nan, 5e-324, 1e-45, 6e-8, 65504.0, 1.8e308]
CONSTANTS = {
    "float64": torch.tensor(SPECIAL, dtype=torch.float64),
    "float32": torch.tensor(SPECIAL, dtype=torch.float64).float(),
    "float16": torch.tensor(SPECIAL, dtype=torch.float64).half(),
    "bfloat16": torch.tensor(SPECIAL, dtype=torch.float64).bfloat16(),
    "a NaN with a payload": torch.tensor([0x7FF0_0000_DEAD_BEEF, -1]).view(torch.float64),
    "bool": torch.tensor([True, False, True]),
    "int64": torch.tensor([-(2**63), 2**63 - 1, 0, -1]),
    "int32": torch.tensor([[-(2**31)], [2**31 - 1]], dtype=torch.int32),
    "int8": torch.tensor([-128, 127], dtype=torch.int8),
    "uint8": torch.tensor([0, 255], dtype=torch.uint8),
    "complex64": torch.tensor([1 - 2j, complex(0.0, -0.0)]),
    "a number": torch.tensor(-0.0),
    "empty": torch.empty(2, 0, 3),
}
LAYOUTS = {
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": torch.rand(3, 1).expand(3, 5),
    "a column": torch.rand(4, 5)[:, 2],
    "every other row": torch.rand(6, 5)[1::2],
    "a parameter": torch.nn.Parameter(torch.rand(2, 2)),
}


@pytest.mark.parametrize("constants", [CONSTANTS, LAYOUTS], ids=["types", "layouts"])
def test_constants_come_back_bit_for_bit(tmp_path: Path, constants: dict[str, torch.Tensor]) -> None:
    model = network(constants)
    stored = read(write(tmp_path / "g", model))
    assert_same(stored.model, model)
    assert stored.extra == {"key": "k"}
    assert not any(value.requires_grad for value in stored.model.graph.constants.values())
    memory = [value.untyped_storage().data_ptr() for value in stored.model.graph.constants.values()]
    assert all(address % 64 == 0 for address in memory)  # as torch allocates: kernels may look at it


def test_of_a_view_only_its_own_stretch_is_written(tmp_path: Path) -> None:
    whole = torch.rand(100_000)
    assert write(tmp_path / "g", network({"few": whole[7:9]})).stat().st_size < 2000


KINDS = (torch.float64, torch.device("cpu"), torch.device("cuda:1"), torch.strided, torch.channels_last)


def test_sorts_of_arguments(tmp_path: Path) -> None:
    args = (None, True, 1, 1.0, -0.0, math.inf, 2**63, "mean", *KINDS, [1, [2, (3,)]], ((), ((1,), Arg(0))))
    model = network({"c": torch.zeros(1)}, args, dtype=torch.int64, memory_format=torch.preserve_format)
    stored = read(write(tmp_path / "g", model))
    assert_same(stored.model, model)
    found = stored.model.graph["y"].args[2:]
    assert [type(value) for value in found] == [type(value) for value in args]  # 1 == 1.0 == True
    assert math.copysign(1, found[4]) == -1


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@settings(deadline=None)
@given(st.recursive(plain, lambda inner: st.lists(inner) | st.lists(inner).map(tuple), max_leaves=10))
def test_any_nesting_of_plain_arguments(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    path = write(tmp_path_factory.mktemp("nested") / "g", network({}, (value,)))
    assert repr(read(path).model.graph["y"].args[1]) == repr(value)


@pytest.mark.parametrize("make", [residual_cnn, transpose_broadcast, lambda path: mlp(path, [3, 5, 2])])
def test_real_graphs(tmp_path: Path, make: Any) -> None:
    model = load_onnx(make(tmp_path / "m.onnx"))
    assert_same(read(write(tmp_path / "g", model)).model, model)


def test_fused_digits_stay(tmp_path: Path) -> None:
    """Rewriting keeps float64 constants in float32 networks (decision 10)."""
    build = OnnxBuilder()
    x = build.batch_norm(build.conv(build.input("x", [1, 2, 4, 4]), 2, 3, 3), 3)
    build.output(build.gemm(build.op("Flatten", x), 12, 2, name="y"), [1, 2])
    model = load_onnx(build.save(tmp_path / "m.onnx"))
    assert torch.float64 in {value.dtype for value in model.graph.constants.values()}
    assert_same(read(write(tmp_path / "g", model)).model, model)


@pytest.mark.parametrize(
    ("constants", "args", "message"),
    [
        ({}, (object(),), "argument of type object"),
        ({}, (1j,), "argument of type complex"),
        ({"c": torch.eye(2).to_sparse()}, (), "constant c is no plain tensor"),
        ({"c": torch.zeros(2, device="meta")}, (), "constant c is no plain tensor"),
        ({"c": torch.ones(2, dtype=torch.complex64).conj()}, (), "constant c is no plain tensor"),
    ],
)
def test_what_has_no_form_is_refused_before_anything_is_written(
    constants: dict[str, torch.Tensor], args: tuple[Any, ...], message: str
) -> None:
    stream = io.BytesIO()
    with pytest.raises(Unstorable, match=message):
        write_model(stream, network(constants, args), {})
    assert stream.getvalue() == b""


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("stored")
    return write(folder / "g", load_onnx(constant_output(folder / "m.onnx", 3.0))).read_bytes()


def refused(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(Unusable) as caught:
        read(path)
    return str(caught.value)


def test_no_flipped_bit_is_believed(tmp_path: Path, content: bytes) -> None:
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        refused(tmp_path / "g", bytes(damaged))


def test_no_part_and_no_more_than_the_whole_is_believed(tmp_path: Path, content: bytes) -> None:
    for length in range(len(content)):
        refused(tmp_path / "g", content[:length])
    assert "something follows" in refused(tmp_path / "g", content + b"\0")
    (tmp_path / "g").write_bytes(content)
    read(tmp_path / "g")


def test_a_length_beyond_all_memory(tmp_path: Path, content: bytes) -> None:
    start = len(MAGIC) + 32
    damaged = content[:start] + struct.pack("<Q", 2**63 + 5) + content[start + 8 :]
    assert "cut off" in refused(tmp_path / "g", damaged)


def _without_nodes(structure: dict[str, Any]) -> None:
    del structure["nodes"]


def _unknown_input(structure: dict[str, Any]) -> None:
    structure["nodes"][-1][2] = ["nowhere"]


def _node_twice(structure: dict[str, Any]) -> None:
    structure["nodes"].append(structure["nodes"][-1])


def _unknown_type(structure: dict[str, Any]) -> None:
    structure["dtype"] = "strided"


def _unknown_tag(structure: dict[str, Any]) -> None:
    structure["nodes"][-1][6]["weight"] = {"pickle": "gASV"}


def _larger_shape(structure: dict[str, Any]) -> None:
    next(iter(structure["constants"].values()))["shape"] = [10**6]


def _reaching_beyond(structure: dict[str, Any]) -> None:
    for entry in structure["constants"].values():
        entry["shape"], entry["stride"] = [2], [-1]


@pytest.mark.parametrize(
    "change",
    [
        *(_without_nodes, _unknown_input, _node_twice, _unknown_type),
        *(_unknown_tag, _larger_shape, _reaching_beyond),
    ],
)
def test_a_structure_of_another_making(tmp_path: Path, content: bytes, change: Any) -> None:
    """With right digests: from another version, or another program."""
    start = len(MAGIC) + 32
    length = int.from_bytes(content[start : start + 8], "little")
    structure = json.loads(content[start + 8 : start + 8 + length])
    change(structure)
    text = json.dumps(structure).encode()
    head = MAGIC + hashlib.sha256(text).digest() + struct.pack("<Q", len(text))
    refused(tmp_path / "g", head + text + content[start + 8 + length :])
