"""The random modules of `tests.searches` as ONNX files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from tests.models import OnnxBuilder
from tests.searches import Block


def save(module: nn.Module, shape: Sequence[int], outputs: int, path: Path) -> Path:
    """Write a module of FAMILIES: input `x` (1, *shape), output `y` (1, outputs).

    Raises:
        TypeError: it contains what none of them does.
    """
    build = OnnxBuilder()
    y = _add(build, module, build.input("x", [1, *shape]))
    build.output(build.op("Identity", y, name="y"), [1, outputs])
    return build.save(path)


def _add(build: OnnxBuilder, module: nn.Module, x: str) -> str:
    """Append the nodes of a module; returns the name of its output."""
    match module:
        case nn.Sequential():
            for part in module:
                x = _add(build, part, x)
            return x
        case Block():
            inner = _add(build, module.inner, _add(build, module.first, x))
            return _add(build, module.outer, build.op("Add", x, _add(build, module.second, inner)))
        case nn.Linear():
            weight, bias = (build.constant(value.detach().numpy()) for value in (module.weight, module.bias))
            return build.op("Gemm", x, weight, bias, transB=1)
        case nn.Conv1d():
            assert module.bias is not None and isinstance(module.padding[0], int)
            weight, bias = (build.constant(value.detach().numpy()) for value in (module.weight, module.bias))
            return build.op("Conv", x, weight, bias, pads=[module.padding[0]] * 2)
        case nn.LeakyReLU():
            return build.op("LeakyRelu", x, alpha=module.negative_slope)
        case nn.ReLU():
            return build.op("Relu", x)
        case nn.Flatten():
            return build.op("Flatten", x)
    raise TypeError(f"no node for {type(module).__name__}")
