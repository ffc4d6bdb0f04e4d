"""Small networks for tests: ONNX files built node by node, and PyTorch modules."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn


class OnnxBuilder:
    """Builds an ONNX graph with random weights; every method adds a node and returns its output's name.

    Args:
        seed: of the weights.
        dtype: of inputs, outputs and weights.
    """

    def __init__(self, seed: int = 0, dtype: type[np.floating[Any]] = np.float32) -> None:
        self.random = np.random.default_rng(seed)
        self.dtype = np.dtype(dtype)
        self.kind = helper.np_dtype_to_tensor_dtype(self.dtype)
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.initializers: list[onnx.TensorProto] = []

    def input(self, name: str, shape: Sequence[int | str]) -> str:
        """Declare an input; a string extent is a dynamic axis."""
        self.inputs.append(helper.make_tensor_value_info(name, self.kind, shape))
        return name

    def output(self, name: str, shape: Sequence[int | str], kind: int | None = None) -> str:
        """Declare a value as output."""
        self.outputs.append(helper.make_tensor_value_info(name, kind or self.kind, shape))
        return name

    def constant(self, value: Any, name: str | None = None) -> str:
        """An initialiser; floating values in the builder's type."""
        array = np.asarray(value)
        if array.dtype.kind == "f":
            array = array.astype(self.dtype)
        name = name or f"c{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def op(
        self, kind: str, *inputs: str, name: str | None = None, outputs: int = 1, **attributes: Any
    ) -> str:
        """Any node. With several outputs they are called `name_0`, `name_1`, ..."""
        name = name or f"{kind.lower()}_{len(self.nodes)}"
        names = [name] if outputs == 1 else [f"{name}_{index}" for index in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, name=f"node_{name}", **attributes))
        return name

    def weight(self, *shape: int) -> str:
        """A random initialiser of the usual scale."""
        fan_in = int(np.prod(shape[1:])) or 1
        return self.constant(self.random.standard_normal(shape) / np.sqrt(fan_in))

    def gemm(self, x: str, inputs: int, outputs: int, name: str | None = None) -> str:
        """Dense layer, (n, inputs) to (n, outputs)."""
        return self.op("Gemm", x, self.weight(outputs, inputs), self.weight(outputs), name=name, transB=1)

    def conv(self, x: str, inputs: int, outputs: int, kernel: int, stride: int = 1, pad: int = 0) -> str:
        """Square 2-d convolution with bias."""
        weights = self.weight(outputs, inputs, kernel, kernel), self.weight(outputs)
        return self.op("Conv", x, *weights, strides=[stride] * 2, pads=[pad] * 4)

    def batch_norm(self, x: str, channels: int) -> str:
        """Batch normalisation with random statistics."""
        scale, shift = self.random.uniform(0.5, 2, channels), self.random.standard_normal(channels)
        mean, variance = self.random.standard_normal(channels), self.random.uniform(0.5, 2, channels)
        constants = [self.constant(value) for value in (scale, shift, mean, variance)]
        return self.op("BatchNormalization", x, *constants)

    def model(self, opset: int = 13) -> onnx.ModelProto:
        """The checked model."""
        graph = helper.make_graph(self.nodes, "g", self.inputs, self.outputs, self.initializers)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
        onnx.checker.check_model(model)
        return model

    def save(self, path: Path, opset: int = 13) -> Path:
        """Write the model and return the path."""
        onnx.save(self.model(opset), str(path))
        return path


def mlp(path: Path, sizes: Sequence[int], seed: int = 0, activation: str = "Relu") -> Path:
    """Fully connected network: input `x` (1, sizes[0]), output `y` (1, sizes[-1])."""
    build = OnnxBuilder(seed)
    x = build.input("x", [1, sizes[0]])
    for index, (inputs, outputs) in enumerate(pairwise(sizes[:-1])):
        x = build.op(activation, build.gemm(x, inputs, outputs, name=f"z{index}"), name=f"h{index}")
    build.output(build.gemm(x, sizes[-2], sizes[-1], name="y"), [1, sizes[-1]])
    return build.save(path)


def identity(path: Path, size: int) -> Path:
    """y = x, (1, size)."""
    build = OnnxBuilder()
    build.input("x", [1, size])
    build.output(build.op("Identity", "x", name="y"), [1, size])
    return build.save(path)


def constant_output(path: Path, value: float, inputs: int = 1) -> Path:
    """A network that answers `value` whatever its input (1, inputs) is."""
    build = OnnxBuilder()
    build.input("x", [1, inputs])
    weight, bias = build.constant(np.zeros((inputs, 1))), build.constant(np.array([value]))
    build.output(build.op("Add", build.op("MatMul", "x", weight), bias, name="y"), [1, 1])
    return build.save(path)


def transpose_broadcast(path: Path) -> Path:
    """(1, 1, 2) transposed to (1, 2, 1), times ones (1, 1, 2): all four outputs repeat an input."""
    build = OnnxBuilder()
    build.input("x", [1, 1, 2])
    turned = build.op("Transpose", "x", perm=[0, 2, 1])
    build.output(build.op("Mul", turned, build.constant(np.ones((1, 1, 2))), name="y"), [1, 2, 2])
    return build.save(path)


def residual_cnn(path: Path, seed: int = 0) -> Path:
    """3x32x32: convolution 3->8, residual block 8->16 with stride and 1x1 shortcut, identity block 16->16,
    1024-100-10."""
    build = OnnxBuilder(seed)
    x = build.op("Relu", build.conv(build.input("x", [1, 3, 32, 32]), 3, 8, 3, 2, 1))
    y = build.conv(build.op("Relu", build.conv(x, 8, 16, 3, 2, 1)), 16, 16, 3, 1, 1)
    x = build.op("Relu", build.op("Add", y, build.conv(x, 8, 16, 1, 2)))
    y = build.conv(build.op("Relu", build.conv(x, 16, 16, 3, 1, 1)), 16, 16, 3, 1, 1)
    x = build.op("Flatten", build.op("Relu", build.op("Add", y, x)))
    x = build.op("Relu", build.gemm(x, 1024, 100))
    build.output(build.gemm(x, 100, 10, name="y"), [1, 10])
    return build.save(path)


class Residual(nn.Module):
    """A convolutional block with batch normalisation whose input is added to its output."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.body(x))


def randomize(module: nn.Module, seed: int = 0) -> nn.Module:
    """Random parameters and statistics (so that no batch normalisation is the identity); eval mode."""
    random = torch.Generator().manual_seed(seed)
    for name, value in module.state_dict().items():
        if value.is_floating_point():
            noise = torch.rand(value.shape, generator=random)
            value.copy_(noise + 0.5 if name.endswith("var") else (noise - 0.5) * 0.8)
    return module.eval()


__all__ = [
    "OnnxBuilder",
    "Residual",
    "TensorProto",
    "constant_output",
    "identity",
    "mlp",
    "randomize",
    "residual_cnn",
    "transpose_broadcast",
]
