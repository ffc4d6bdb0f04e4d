"""Gradients without sympy: the same values and errors, and torch's own module for whoever asks for more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import flow
from tests.models import OnnxBuilder

ROOT = Path(__file__).resolve().parent.parent.parent
SETUP = """
import sys
import torch
from abcrown_dist.util.light_autograd import _NAME, plain_shapes
x = torch.arange(3.0, requires_grad=True)
A = torch.tensor([[1.0, -2.0, 0.5], [0.0, 3.0, 1.0]])
def gradients():
    return torch.autograd.grad(x * x, x, A, is_grads_batched=True)[0]
assert _NAME not in sys.modules
"""


def run(code: str) -> str:
    """What a fresh process prints: this one may have imported everything already."""
    result = subprocess.run(
        [sys.executable, "-c", SETUP + code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_gradients_are_the_same_with_and_without() -> None:
    code = """
with plain_shapes():
    light = gradients()
print(_NAME in sys.modules, "sympy" in sys.modules, end=" ")
plain = gradients()
print(torch.equal(light, plain), torch.equal(light, 2 * x.detach() * A), "sympy" in sys.modules)
with plain_shapes():
    assert torch.equal(gradients(), plain)
print(sys.modules[_NAME].__file__ is not None)
"""
    assert run(code).split() == ["False", "False", "True", "True", "True", "True"]


def test_a_wrong_shape_is_still_refused() -> None:
    code = """
A = A[:, :2]
with plain_shapes():
    try:
        gradients()
    except RuntimeError as error:
        print("mismatch" in str(error), end=" ")
print(_NAME in sys.modules)
"""
    assert run(code).split() == ["True", "False"]


def test_other_names_come_from_the_real_module() -> None:
    code = """
with plain_shapes():
    from torch.fx.experimental.symbolic_shapes import ShapeEnv, sym_eq
    gradients()
import torch.fx.experimental.symbolic_shapes as real
print(ShapeEnv is real.ShapeEnv, hasattr(real, "_sympy_cast_symbool_to_symint_guardless"))
"""
    assert run(code).startswith("True")


@pytest.mark.parametrize("method", ["crown", "alpha-crown"])
def test_a_run_with_derived_rules_imports_no_sympy(tmp_path: Path, method: str) -> None:
    build = OnnxBuilder()
    x = build.op("Relu", build.conv(build.input("x", [1, 1, 6, 6]), 1, 2, 3))
    pooled = build.op("AveragePool", x, kernel_shape=[2, 2], strides=[2, 2])
    build.output(build.gemm(build.op("Flatten", pooled), 8, 3, name="y"), [1, 3])
    net = build.save(tmp_path / "net.onnx")
    prop = flow.write_property(tmp_path / "p.vnnlib", [(-1, 1)] * 36, 3, "(<= Y_0 -1000)", "(<= Y_1 -1000)")
    words = ["--onnx_path", str(net), "--vnnlib_path", str(prop), "--results_file", str(tmp_path / "out.txt")]
    words += ["--bound_prop_method", method, "--device", "cpu"]
    code = f"from abcrown_dist.cli import main; print(main({words!r}), 'sympy' in sys.modules)"
    assert run(code).splitlines()[-1] == "0 False"
    assert (tmp_path / "out.txt").read_text() == "unsat\n"
