"""Write a stand-in for VNN-COMP's CIFAR100_resnet_large, whose weights are no small download.

    python examples/cifar100_resnet_large.py [FOLDER]

writes `cifar100_resnet_large_standin.onnx` (5 MB) and `.vnnlib` into FOLDER, by default
`examples/cifar100`. The network has the competition network's architecture with batch
normalisation merged, and random weights from a fixed seed; the property asks whether some image within
`DISTANCE` of a random one, in the maximum norm and in [0, 1], is put into another of the 100 classes
than that image. Untrained logits hardly differ between images, so that the distance which bounds can
prove is smaller than the 1/255 of the competition.

Convolution 3 -> 64 (3 x 3, stride 2, no padding), ReLU; two stages of two residual blocks each, 128
planes, the first block of a stage with stride 2 and a 1 x 1 convolution as its shortcut; every block is
convolution, ReLU, convolution, sum, ReLU; linear 2048 -> 100, ReLU, linear 100 -> 100.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

NAME = "cifar100_resnet_large_standin"
FOLDER = Path(__file__).resolve().parent / "cifar100"
SHAPE = (3, 32, 32)
PLANES = 128
CLASSES = 100
SEED = 42
DISTANCE = Decimal("0.0005")  # about an eighth of 1/255
PIXEL_STEP = 1 / 256  # pixels are multiples of it: their decimals, and distances from them, are exact


class _Builder:
    """ONNX nodes in a chain, with seeded weights."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.stored: list[onnx.TensorProto] = []
        self._random = torch.Generator().manual_seed(SEED)

    def conv(self, source: str, into: int, out: int, size: int, stride: int, gain: float) -> str:
        """Convolution with padding size // 2, but none on the image itself."""
        padding = 0 if source == "image" else size // 2
        weights = self._weights((out, into, size, size), into * size * size, gain)
        return self._node(
            "Conv", [source, *weights], kernel_shape=[size] * 2, strides=[stride] * 2, pads=[padding] * 4
        )

    def linear(self, source: str, into: int, out: int, gain: float) -> str:
        return self._node("Gemm", [source, *self._weights((out, into), into, gain)], transB=1)

    def relu(self, source: str) -> str:
        return self._node("Relu", [source])

    def add(self, first: str, second: str) -> str:
        return self._node("Add", [first, second])

    def flatten(self, source: str) -> str:
        return self._node("Flatten", [source])

    def block(self, source: str, into: int, stride: int) -> str:
        """A basic residual block. Halving the variance of each branch keeps that of the sum."""
        inner = self.relu(self.conv(source, into, PLANES, 3, stride, gain=2))
        branch = self.conv(inner, PLANES, PLANES, 3, 1, gain=1)
        shortcut = source if stride == 1 else self.conv(source, into, PLANES, 1, stride, gain=1)
        return self.relu(self.add(branch, shortcut))

    def _weights(self, shape: Sequence[int], fan_in: int, gain: float) -> list[str]:
        """Normal weights of variance gain / fan_in (He et al., 2015: 2 before a ReLU) and small biases."""
        weight = torch.randn(*shape, generator=self._random) * math.sqrt(gain / fan_in)
        bias = torch.randn(shape[0], generator=self._random) * 0.1
        names = []
        for kind, value in (("weight", weight), ("bias", bias)):
            names.append(f"{kind}_{len(self.nodes)}")
            self.stored.append(numpy_helper.from_array(value.numpy(), names[-1]))
        return names

    def _node(self, kind: str, inputs: Sequence[str], **attributes: Any) -> str:
        name = f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], name, **attributes))
        return name


def build_model() -> onnx.ModelProto:
    """The network, for one image of `SHAPE` at a time."""
    net = _Builder()
    value = net.relu(net.conv("image", SHAPE[0], 64, 3, 2, gain=2))
    value = net.block(net.block(value, 64, 2), PLANES, 1)
    value = net.block(net.block(value, PLANES, 2), PLANES, 1)
    value = net.relu(net.linear(net.flatten(value), PLANES * 16, CLASSES, gain=2))
    logits = net.linear(value, CLASSES, CLASSES, gain=1)
    graph = helper.make_graph(
        net.nodes,
        NAME,
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, *SHAPE])],
        [helper.make_tensor_value_info(logits, TensorProto.FLOAT, [1, CLASSES])],
        net.stored,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def make_image() -> Tensor:
    """The image (1, *SHAPE) in the middle of the property: noise in steps of `PIXEL_STEP`."""
    steps = round(1 / PIXEL_STEP)
    random = torch.Generator().manual_seed(SEED + 1)
    return torch.randint(0, steps + 1, (1, *SHAPE), generator=random) * PIXEL_STEP


def classify(model: onnx.ModelProto, image: Tensor) -> int:
    """The image's class by onnxruntime."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return int(np.argmax(session.run(None, {"image": image.numpy()})[0]))


def to_vnnlib(image: Tensor, label: int, distance: Decimal) -> str:
    """VNN-LIB 1.0 text whose counterexamples are the images near `image` that are not of class `label`."""
    pixels = [Decimal(pixel) for pixel in image.flatten().tolist()]
    lines = [f"; {NAME}: is every image within {distance} of class {label}?", ""]
    lines += [f"(declare-const X_{i} Real)" for i in range(len(pixels))]
    lines += [f"(declare-const Y_{j} Real)" for j in range(CLASSES)]
    for i, pixel in enumerate(pixels):
        lower, upper = max(pixel - distance, Decimal(0)), min(pixel + distance, Decimal(1))
        lines += [f"(assert (>= X_{i} {lower:f}))", f"(assert (<= X_{i} {upper:f}))"]
    others = (f"(and (>= Y_{j} Y_{label}))" for j in range(CLASSES) if j != label)
    return "\n".join([*lines, "(assert (or", *(f"    {other}" for other in others), "))", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the stand-in for CIFAR100_resnet_large.")
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    model, image = build_model(), make_image()
    label = classify(model, image)
    onnx.save(model, str(folder / f"{NAME}.onnx"))
    (folder / f"{NAME}.vnnlib").write_text(to_vnnlib(image, label, DISTANCE))
    print(f"{folder}/{NAME}.onnx and .vnnlib: class {label}, within {DISTANCE}")


if __name__ == "__main__":
    main()
