"""The shipped example is what it says: an accurate classifier, and properties of three kinds."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from abcrown_dist.attack.confirm import Confirmer
from abcrown_dist.attack.pgd import Settings, find_counterexamples
from abcrown_dist.bounds.alpha import AlphaSettings
from abcrown_dist.bounds.concretize import Box
from abcrown_dist.bounds.propagate import bound_intermediate, bound_rows
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.config.load import load_config
from abcrown_dist.config.paths import locate, locate_model, locate_property
from abcrown_dist.graph.load_onnx import load_onnx
from abcrown_dist.spec.property import Property
from abcrown_dist.spec.vnnlib1 import load_vnnlib
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.weights.local import LocalWeights
from tests.exact import exact_minimum

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "digits"
MODEL = FOLDER / "digits_mlp.onnx"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    pytest.importorskip("sklearn")
    spec = importlib.util.spec_from_file_location("train_digits", ROOT / "examples" / "train_digits.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_digits"] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def layers() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Weights and biases of the committed network, read off the file."""
    stored = {item.name: numpy_helper.to_array(item) for item in onnx.load(str(MODEL)).graph.initializer}
    gemms = [node for node in onnx.load(str(MODEL)).graph.node if node.op_type == "Gemm"]
    return [stored[node.input[1]] for node in gemms], [stored[node.input[2]] for node in gemms]


def spec_of(kind: str) -> Property:
    return load_vnnlib(FOLDER / f"digits_mlp_{kind}.vnnlib")


def forward(layers: tuple[list[np.ndarray], list[np.ndarray]], x: torch.Tensor) -> torch.Tensor:
    for index, (weight, bias) in enumerate(zip(*layers, strict=True)):
        x = x @ torch.tensor(weight, dtype=x.dtype).T + torch.tensor(bias, dtype=x.dtype)
        x = x if index == len(layers[0]) - 1 else x.relu()
    return x


def lowest(what: Property, method: str) -> float:
    """The least lower bound over the disjuncts; positive is a proof."""
    loaded = load_onnx(MODEL)
    graph = loaded.graph
    (entry,), (exit_,) = graph.inputs, graph.outputs
    low, high = what.disjuncts[0].box.outward()
    shape = graph[entry].shape
    inputs = Box(
        {entry: torch.from_numpy(low).reshape(1, *shape)}, {entry: torch.from_numpy(high).reshape(1, *shape)}
    )
    weights = LocalWeights(graph, torch.float64)
    settings = BoundSettings(method=method, alpha=AlphaSettings(iteration=100))
    rows = torch.from_numpy(np.concatenate([d.C for d in what.disjuncts]))
    relaxed = bound_intermediate(weights, inputs, settings)
    start = {exit_: rows.reshape(1, len(rows), *graph[exit_].shape)}
    bounds = bound_rows(weights, inputs, relaxed, start, settings)
    limits = torch.from_numpy(np.concatenate([d.rhs for d in what.disjuncts]))
    return (bounds.lower[0] - limits).min().item()


def exact(what: Property, layers: tuple[list[np.ndarray], list[np.ndarray]]) -> float:
    low, high = what.disjuncts[0].box.outward()
    return min(exact_minimum(*layers, low, high, d.C[0], -d.rhs[0]) for d in what.disjuncts)


def test_training_again_reaches_the_same_accuracy(script: ModuleType) -> None:
    training, test = script.load_data()
    assert len(test.labels) == 360 and len(training.labels) == 1437
    again = script.accuracy(script.train(training), test)
    assert 0.93 <= again <= 0.99
    judge = Confirmer(spec_of("crown"), MODEL)
    answers = [int(judge.evaluate(image.flatten().numpy()).argmax()) for image in test.images]
    committed = float(np.mean(np.array(answers) == test.labels.numpy()))
    assert abs(committed - again) <= 0.02


def test_script_writes_the_committed_properties(script: ModuleType, tmp_path: Path) -> None:
    _, test = script.load_data()
    script.write_properties(tmp_path, test)
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == sorted(path.name for path in FOLDER.iterdir() if path.suffix != ".onnx")
    for name in written:
        assert (tmp_path / name).read_text() == (FOLDER / name).read_text()


def test_exported_model_computes_what_was_trained(script: ModuleType, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = script.build_model().eval()
    onnx.save(script.to_onnx(model), str(tmp_path / "model.onnx"))
    judge = Confirmer(spec_of("crown"), tmp_path / "model.onnx")
    image = torch.rand(1, 1, 8, 8)
    np.testing.assert_allclose(judge.evaluate(image.flatten().numpy()), model(image)[0].detach(), atol=1e-5)


@pytest.mark.parametrize("kind", ["crown", "branching", "false"])
def test_property_is_a_ball_around_a_test_image_in_the_unit_cube(kind: str, script: ModuleType) -> None:
    what = spec_of(kind)
    (chosen,) = [p for p in script.PROPERTIES if p.name.endswith(kind)]
    low, high = what.disjuncts[0].box.outward()
    image = script.load_data()[1].images[chosen.image].flatten().double().numpy()
    np.testing.assert_allclose(low, np.clip(image - float(chosen.distance), 0, 1), atol=1e-12)
    np.testing.assert_allclose(high, np.clip(image + float(chosen.distance), 0, 1), atol=1e-12)
    assert len(what.disjuncts) == 9 and len(what.boxes()) == 1


def test_crown_proves_the_first() -> None:
    assert lowest(spec_of("crown"), "crown") > 1.0


def test_neither_crown_nor_alpha_crown_proves_the_second_which_is_true(
    layers: tuple[list[np.ndarray], list[np.ndarray]],
) -> None:
    what = spec_of("branching")
    crown, alpha = lowest(what, "crown"), lowest(what, "alpha-crown")
    minimum = exact(what, layers)
    assert crown <= alpha + 1e-6 and alpha < -0.1
    assert minimum > 0.5


def test_the_third_is_false(layers: tuple[list[np.ndarray], list[np.ndarray]]) -> None:
    what = spec_of("false")

    def network(x: torch.Tensor) -> torch.Tensor:
        return forward(layers, x)

    stream = find_counterexamples(
        network, what, Settings(), seed=0, device="cpu", dtype=torch.float32, deadline=Deadline(60)
    )
    judge = Confirmer(what, MODEL)
    assert any(judge.confirm(candidate.x, candidate.disjunct) for candidate in stream)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_shipped_configurations_name_the_files_from_any_folder(elsewhere: Path) -> None:
    single = load_config(["--config", "digits_mlp.yaml"])
    assert single.model.onnx_path and single.specification.vnnlib_path
    assert locate_model(single, single.model.onnx_path).resolve() == MODEL
    found = locate_property(single, single.specification.vnnlib_path).resolve()
    assert found == FOLDER / "digits_mlp_crown.vnnlib"
    batch = load_config(["--config", "digits_batch.yaml"])
    assert batch.general.csv_name
    listed = locate(batch, batch.general.csv_name).resolve()
    rows = [line.split(",") for line in listed.read_text().splitlines()]
    assert len(rows) == 3
    for model, what, seconds in rows:
        assert locate_model(batch, model, listed.parent).resolve() == MODEL
        assert locate_property(batch, what, listed.parent).is_file()
        assert float(seconds) == 60
