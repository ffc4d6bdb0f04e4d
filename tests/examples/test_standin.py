"""The stand-in for CIFAR100_resnet_large is what it says, and its configurations find their files."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from abcrown_dist.cli import main
from abcrown_dist.config.load import load_config
from abcrown_dist.config.paths import locate_model, locate_property
from abcrown_dist.spec.vnnlib1 import load_vnnlib

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    name = "cifar100_resnet_large"
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(script: ModuleType) -> onnx.ModelProto:
    return script.build_model()


def shapes(model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    inferred = onnx.shape_inference.infer_shapes(model)
    values = [*inferred.graph.value_info, *inferred.graph.output]
    return {v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim) for v in values}


def test_architecture(model: onnx.ModelProto) -> None:
    """Layer by layer as in the competition: stem, two stages of two blocks, two linear layers."""
    kinds = [node.op_type for node in model.graph.node]
    plain = ["Conv", "Relu", "Conv", "Add", "Relu"]
    strided = ["Conv", "Relu", "Conv", "Conv", "Add", "Relu"]
    stage = strided + plain
    assert kinds == ["Conv", "Relu", *stage, *stage, "Flatten", "Gemm", "Relu", "Gemm"]
    sizes = shapes(model)
    convolutions = [sizes[node.output[0]] for node in model.graph.node if node.op_type == "Conv"]
    first, second = (1, 128, 8, 8), (1, 128, 4, 4)
    assert convolutions == [(1, 64, 15, 15), *[first] * 5, *[second] * 5]
    linear = [sizes[node.output[0]] for node in model.graph.node if node.op_type == "Gemm"]
    assert linear == [(1, 100), (1, 100)]
    stored = {item.name: tuple(item.dims) for item in model.graph.initializer}
    assert [stored[node.input[1]] for node in model.graph.node if node.op_type == "Gemm"] == [
        (100, 2048),
        (100, 100),
    ]


def test_same_weights_every_time(script: ModuleType, model: onnx.ModelProto) -> None:
    again = script.build_model()
    for first, second in zip(model.graph.initializer, again.graph.initializer, strict=True):
        assert np.array_equal(numpy_helper.to_array(first), numpy_helper.to_array(second))


def test_activations_keep_their_scale(script: ModuleType, model: onnx.ModelProto) -> None:
    """Neither vanishing nor growing with depth, so that the network is no harder than a trained one."""
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    names = [node.output[0] for node in model.graph.node if node.op_type in ("Conv", "Add", "Gemm")]
    del probe.graph.output[:]
    probe.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = onnxruntime.InferenceSession(probe.SerializeToString(), providers=["CPUExecutionProvider"])
    values = session.run(names, {"image": script.make_image().numpy()})
    assert all(0.1 < value.std() < 10 for value in values), [value.std() for value in values]


def test_property(script: ModuleType, model: onnx.ModelProto, tmp_path: Path) -> None:
    """The box is the image's neighbourhood in [0, 1]; each other class is one disjunct."""
    image, distance = script.make_image(), Decimal("0.25")
    label = script.classify(model, image)
    path = tmp_path / "property.vnnlib"
    path.write_text(script.to_vnnlib(image, label, distance))
    prop = load_vnnlib(path)
    assert (prop.num_inputs, prop.num_outputs) == (3072, 100)
    box, members = next(iter(prop.boxes()))
    assert len(members) == len(prop.disjuncts) == 99
    pixels = image.flatten().double().numpy()
    lower, upper = box.outward()
    assert np.array_equal(lower, np.maximum(pixels - 0.25, 0))
    assert np.array_equal(upper, np.minimum(pixels + 0.25, 1))


def test_script_writes_what_the_configuration_reads(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(["--config", str(CONFIGS / "cifar100_resnet_large_standin.yaml")])
    assert config.parallel.mode == "fsdp" and config.attack.pgd_order == "skip"
    moved = replace(config, source=str(tmp_path / "configs" / "standin.yaml"))
    folder = tmp_path / "examples" / script.FOLDER.name
    (tmp_path / "configs").mkdir()
    monkeypatch.setattr(sys, "argv", ["script", str(folder)])
    script.main()
    assert locate_model(moved, str(config.model.onnx_path)).is_file()
    assert locate_property(moved, str(config.specification.vnnlib_path)).is_file()


def test_competition_configuration_names_the_missing_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main(["--config", "cifar100_resnet_large.yaml", "--general.root_path", str(tmp_path)])
    assert code == 3
    message = capsys.readouterr().err
    assert "examples/cifar100/CIFAR100_resnet_large" in message
