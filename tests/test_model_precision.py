"""The network that is bounded is the one that onnxruntime runs: casts, overflow, fused constants, boxes.

Each case once gave a proof of something that onnxruntime refutes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from abcrown_dist.bounds.concretize import Box
from abcrown_dist.bounds.propagate import bound_outputs
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.graph.load_onnx import load_onnx
from abcrown_dist.graph.load_torch import load_torch
from abcrown_dist.parallel.group import ALONE
from abcrown_dist.spec.property import Verdict
from abcrown_dist.weights.local import LocalWeights
from abcrown_dist.weights.tensor_parallel import TensorParallelWeights
from tests.flow import run, write_property
from tests.models import OnnxBuilder, identity

LIMITED = ("--bab.max_iterations", "20")  # no search can end where all values may overflow
SETTINGS = [
    LIMITED,
    ("--pgd_order", "skip", *LIMITED),
    ("--pgd_order", "skip", *LIMITED, "--general.double_fp", "true"),
    ("--pgd_order", "skip", *LIMITED, "--bab.branching.input_split.enable", "false"),
    ("--pgd_order", "skip", *LIMITED, "--complete_verifier", "bab-refine"),
    ("--pgd_order", "skip", "--complete_verifier", "mip"),
]


@pytest.mark.parametrize("words", SETTINGS)
def test_a_cast_to_half_precision_is_no_identity(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Y_0 = half(x) - x is not zero, however large the other output is."""
    build = OnnxBuilder()
    x = build.input("x", [1, 1])
    half = build.op("Cast", x, to=onnx.TensorProto.FLOAT16)
    back = build.op("Cast", half, to=onnx.TensorProto.FLOAT)
    large = build.op("Mul", x, build.constant([1000.0]))
    build.output(build.op("Concat", build.op("Sub", back, x), large, axis=1), [1, 2])
    model = build.save(tmp_path / "cast.onnx")
    prop = write_property(tmp_path / "p.vnnlib", [("0.3", "0.4")], 2, "(>= Y_0 1e-5)")
    assert run(model, prop, *words).verdict is not Verdict.UNSAT


@pytest.mark.parametrize("words", SETTINGS)
def test_an_overflow_on_the_way_is_not_fused_away(tmp_path: Path, words: tuple[str, ...]) -> None:
    """A narrow bump at 0.5 overflows to infinity between factors whose product is tiny."""
    build = OnnxBuilder()
    x = build.input("x", [1, 1])
    bump = build.op("Gemm", x, build.constant([[1000.0] * 3]), build.constant([-499.0, -500.0, -501.0]))
    bump = build.op("Gemm", build.op("Relu", bump), build.constant([[1e13], [-2e13], [1e13]]),
                    build.constant([-0.5e13]))  # fmt: skip
    value = build.op("Gemm", build.op("Relu", bump), build.constant([[1e13]]), build.constant([0.0]))
    for factor in (1e14, 1e-20, 1e-20, 1e-3, -1.0):
        value = build.op("Mul", value, build.constant([factor]))
    build.output(build.op("Relu", build.op("Add", value, build.constant([5.0]))), [1, 1])
    model = build.save(tmp_path / "bump.onnx")
    prop = write_property(tmp_path / "p.vnnlib", [("0.47", "0.53")], 1, "(<= Y_0 1.0)")
    assert run(model, prop, *words).verdict is not Verdict.UNSAT


@pytest.mark.parametrize("words", SETTINGS)
def test_fused_constants_keep_their_digits(tmp_path: Path, words: tuple[str, ...]) -> None:
    """(x - 1000.1) / 0.003 * 1.7 cancels: rounding the fused weight moved the output by 0.03."""
    build = OnnxBuilder()
    x = build.input("x", [1, 1])
    scaled = build.op("Div", build.op("Sub", x, build.constant([1000.1])), build.constant([0.003]))
    build.output(build.op("Gemm", scaled, build.constant([[1.7]]), build.constant([0.0])), [1, 1])
    model = build.save(tmp_path / "norm.onnx")
    prop = write_property(
        tmp_path / "p.vnnlib", [("1000.20001220703125", "1000.20001220703125")], 1, "(<= Y_0 56.70)"
    )
    assert run(model, prop, *words).verdict is Verdict.SAT


@pytest.mark.parametrize("low", ["0", "0.1"])
@pytest.mark.parametrize("words", SETTINGS)
def test_the_box_holds_the_points_that_the_model_is_given(
    tmp_path: Path, low: str, words: tuple[str, ...]
) -> None:
    """0.1 reaches a float32 model as 0.10000000149, in whatever type bounds are computed."""
    model = identity(tmp_path / "id.onnx", 1)
    prop = write_property(tmp_path / "p.vnnlib", [(low, "0.1")], 1, "(>= Y_0 0.1000000014)")
    assert run(model, prop, *words).verdict is not Verdict.UNSAT


@pytest.mark.parametrize("words", SETTINGS)
def test_tiny_coefficients_do_not_vanish(tmp_path: Path, words: tuple[str, ...]) -> None:
    model = identity(tmp_path / "id.onnx", 2)
    row = "(<= (- (* 1e-50 Y_0) (* 1e-50 Y_1)) -1e-60)"
    prop = write_property(tmp_path / "p.vnnlib", [("0", "1"), ("0", "1")], 2, row)
    assert run(model, prop, *words).verdict is Verdict.SAT


@pytest.mark.parametrize("method", ["ibp", "crown", "forward", "init-crown"])
def test_tiny_errors_do_not_vanish(tmp_path: Path, method: str) -> None:
    """relu(x + 1000) 1.37e-22 - 1.37e-19 cancels at x = 0; squares of such errors underflow in float32."""
    build = OnnxBuilder()
    x = build.input("x", [1, 1])
    hidden = build.op("Relu", build.op("Add", x, build.constant([1000.0])))
    build.output(build.op("Gemm", hidden, build.constant([[1.37e-22]]), build.constant([-1.37e-19])), [1, 1])
    graph = load_onnx(build.save(tmp_path / "tiny.onnx")).graph
    found = {}
    for dtype in (torch.float32, torch.float64):
        point = {graph.inputs[0]: torch.zeros(1, 1, 1, dtype=dtype)}
        weights = LocalWeights(graph, dtype)
        with torch.no_grad():
            found[dtype] = bound_outputs(weights, Box(point, point), BoundSettings(method=method))
    rough, exact = (found[dtype][graph.outputs[0]] for dtype in (torch.float32, torch.float64))
    assert rough.lower < exact.lower <= exact.upper < rough.upper


@pytest.mark.parametrize("words", SETTINGS)
def test_coefficients_that_vanish_count_with_large_inputs(tmp_path: Path, words: tuple[str, ...]) -> None:
    """2e-38 x times 1e-10 over x near 1e38: the coefficient of x is no float32, what it does is 4e-10."""
    build = OnnxBuilder()
    hidden = build.op("Relu", build.op("MatMul", build.input("x", [1, 1]), build.constant([[2e-38]])))
    build.output(build.op("MatMul", hidden, build.constant([[1e-10]])), [1, 1])
    model = build.save(tmp_path / "vanishing.onnx")
    prop = write_property(tmp_path / "p.vnnlib", [("1e38", "2e38")], 1, "(>= Y_0 3e-10)")
    assert run(model, prop, *words).verdict is not Verdict.UNSAT


class Scaled(torch.nn.Module):
    """A convolution scaled by a constant that has as many axes as the image, in a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(1, 2, 3, padding=1), torch.nn.Conv2d(2, 2, 3, padding=1)
        self.register_buffer("scale", torch.full((1, 1, 1, 1), 0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).relu()
        return (self.second(y * self.scale) + y).relu().flatten(1)


def test_a_scalar_with_axes_under_tensor_parallelism() -> None:
    torch.manual_seed(0)
    graph = load_torch(Scaled(), torch.zeros(1, 1, 4, 4)).graph
    weights = TensorParallelWeights(graph, ALONE)
    centre = torch.rand(2, 16)
    (name,) = graph.inputs
    box = Box({name: centre - 0.1}, {name: centre + 0.1})
    with torch.no_grad():
        found = bound_outputs(weights, box, BoundSettings(method="crown"))[graph.outputs[0]]
    assert found.lower.shape == (2, 32)
    assert bool((found.lower <= found.upper).all())


@pytest.mark.parametrize("words", SETTINGS)
def test_an_overflow_in_a_corner_proves_nothing(tmp_path: Path, words: tuple[str, ...]) -> None:
    """A neuron reaches infinity where all 12 inputs are near 1; in real numbers the output is large."""
    build = OnnxBuilder()
    x = build.input("x", [1, 12])
    first = np.concatenate([np.full((12, 1), 3e37), np.eye(12)], axis=1)
    hidden = build.op("Relu", build.op("Gemm", x, build.constant(first), build.constant(np.zeros(13))))
    second = np.concatenate([[[-1e-38]], np.full((12, 1), 10.0)])
    value = build.op("Relu", build.op("Gemm", hidden, build.constant(second), build.constant([1.0])))
    build.output(build.op("Gemm", value, build.constant([[1.0]]), build.constant([0.0])), [1, 1])
    model = build.save(tmp_path / "corner.onnx")
    prop = write_property(tmp_path / "p.vnnlib", [("0.1", "1.0")] * 12, 1, "(<= Y_0 0.5)")
    assert run(model, prop, *words).verdict is not Verdict.UNSAT


@pytest.mark.parametrize("words", SETTINGS)
@pytest.mark.parametrize(("weight", "threshold"), [(1e-46, "1.0"), (2e-45, "1.9")])
def test_constants_that_float32_cannot_hold_are_bounded_in_float64(
    tmp_path: Path, words: tuple[str, ...], weight: float, threshold: str
) -> None:
    """A model in float64 whose tiny weight is zero, or 30 % off, in float32: its output is far above."""
    build = OnnxBuilder(dtype=np.float64)
    x = build.input("x", [1, 1])
    hidden = build.op("Relu", build.op("Gemm", x, build.constant([[weight]]), build.constant([0.0])))
    gain = 1e18 if weight < 1e-45 else 1e15
    build.output(build.op("Gemm", hidden, build.constant([[gain]]), build.constant([0.0])), [1, 1])
    model = build.save(tmp_path / "tiny.onnx")
    prop = write_property(tmp_path / "p.vnnlib", [("1.0e30", "2.0e30")], 1, f"(>= Y_0 {threshold})")
    assert run(model, prop, *words).verdict is not Verdict.UNSAT


@pytest.mark.parametrize("complete", ["mip", "bab-refine"])
def test_numbers_that_programs_cannot_hold_leave_the_answer_open(tmp_path: Path, complete: str) -> None:
    build = OnnxBuilder(dtype=np.float64)
    value = build.input("x", [1, 1])
    for gain in (1e200, 1e200):
        value = build.op("Relu", build.op("Gemm", value, build.constant([[gain]]), build.constant([0.0])))
    build.output(build.op("Gemm", value, build.constant([[1.0]]), build.constant([0.0])), [1, 1])
    model = build.save(tmp_path / "huge.onnx")
    prop = write_property(tmp_path / "p.vnnlib", [("0.0", "1.0")], 1, "(<= Y_0 -1.0)")
    words = ("--complete_verifier", complete, "--pgd_order", "skip", *LIMITED)
    assert run(model, prop, *words).verdict is Verdict.UNKNOWN


def test_layers_in_half_precision_are_not_fused() -> None:
    """60000 x overflows between two layers whose product is harmless."""
    first, second = nn.Linear(1, 2, dtype=torch.float16), nn.Linear(2, 1, dtype=torch.float16)
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[60000.0], [1.0]]))
        second.weight.copy_(torch.tensor([[-1e-4, 20.0]]))
    graph = load_torch(nn.Sequential(first, second), torch.ones(1, 1, dtype=torch.float16)).graph
    assert sum(node.op == "linear" for node in graph) == 2
