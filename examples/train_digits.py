"""Train the shipped example: a classifier of scikit-learn's 8 x 8 digits, and three properties of it.

    python examples/train_digits.py [FOLDER]

writes `digits_mlp.onnx` (64-32-32-10, ReLU), three VNN-LIB properties and `instances.csv` into FOLDER, by
default `examples/digits`. Each property asks whether some image within a distance of a test image, in the
maximum norm and in [0, 1], is taken for another digit. Needs scikit-learn (the package's `test` extra).
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits
from torch import Tensor, nn

WIDTHS = (64, 32, 32, 10)
SEED = 0
EPOCHS = 40
TEST_IMAGES = 360  # of 1797
TIMEOUT = 60  # seconds, for each instance


@dataclass(frozen=True)
class Robustness:
    """No image within `distance` of test image `image` is taken for another digit."""

    name: str
    image: int
    distance: Decimal


# Chosen for the committed network, whose image 0 has its nearest counterexample between 0.125 and 0.13:
# CROWN proves the first, neither CROWN nor alpha-CROWN the second, which is true, and the third is false.
PROPERTIES = (
    Robustness("digits_mlp_crown", 0, Decimal("0.08")),
    Robustness("digits_mlp_branching", 0, Decimal("0.12")),
    Robustness("digits_mlp_false", 0, Decimal("0.14")),
)


@dataclass(frozen=True)
class Digits:
    """Images (count, 1, 8, 8) in steps of 1/16 from 0 to 1, and their labels (count,)."""

    images: Tensor
    labels: Tensor


def load_data() -> tuple[Digits, Digits]:
    """Training and test images, split by a fixed permutation."""
    raw = load_digits()
    images = torch.tensor(raw.images / 16, dtype=torch.float32)[:, None]
    labels = torch.tensor(raw.target, dtype=torch.int64)
    order = torch.from_numpy(np.random.RandomState(SEED).permutation(len(labels)))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return Digits(images[train], labels[train]), Digits(images[test], labels[test])


def build_model() -> nn.Sequential:
    """Flatten, then linear layers with a ReLU between any two, randomly initialised."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(WIDTHS):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def train(data: Digits) -> nn.Sequential:
    """A model trained on `data` by Adam with a falling step; the same one for the same torch."""
    torch.manual_seed(SEED)
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(data.labels)).split(64):
            loss = nn.functional.cross_entropy(model(data.images[batch]), data.labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, data: Digits) -> float:
    """Share of images whose largest output is the label's."""
    return (model(data.images).argmax(-1) == data.labels).float().mean().item()


def to_onnx(model: nn.Sequential) -> onnx.ModelProto:
    """The model as an ONNX graph of Flatten, Gemm and Relu, one image at a time.

    Built by hand: PyTorch's exporters come and go, and need packages of their own.
    """
    nodes, stored, current = [], [], "image"
    for index, layer in enumerate(model):
        result = "logits" if index == len(model) - 1 else f"value_{index}"
        if isinstance(layer, nn.Linear):
            for kind, value in (("weight", layer.weight), ("bias", layer.bias)):
                stored.append(numpy_helper.from_array(value.detach().numpy(), f"{kind}_{index}"))
            names = [current, f"weight_{index}", f"bias_{index}"]
            nodes.append(helper.make_node("Gemm", names, [result], f"linear_{index}", transB=1))
        else:
            kind = {"Flatten": "Flatten", "ReLU": "Relu"}[type(layer).__name__]
            nodes.append(helper.make_node(kind, [current], [result], f"{kind.lower()}_{index}"))
        current = result
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 1, 8, 8])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, WIDTHS[-1]])
    graph = helper.make_graph(nodes, "digits_mlp", [image], [logits], stored)
    model_proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(model_proto, full_check=True)
    return model_proto


def to_vnnlib(image: Tensor, label: int, distance: Decimal, title: str) -> str:
    """VNN-LIB 1.0 text whose counterexamples are the images that are not taken for `label`."""
    lines = [f"; {title}", ""]
    lines += [f"(declare-const X_{i} Real)" for i in range(WIDTHS[0])]
    lines += [f"(declare-const Y_{j} Real)" for j in range(WIDTHS[-1])]
    for i, pixel in enumerate(image.flatten().tolist()):
        exact = Decimal(pixel)  # a multiple of 1/16
        lower, upper = max(exact - distance, Decimal(0)), min(exact + distance, Decimal(1))
        lines += [f"(assert (>= X_{i} {lower:f}))", f"(assert (<= X_{i} {upper:f}))"]
    others = (f"(and (>= Y_{j} Y_{label}))" for j in range(WIDTHS[-1]) if j != label)
    return "\n".join([*lines, "(assert (or", *(f"    {other}" for other in others), "))", ""])


def write_properties(folder: Path, data: Digits) -> None:
    """One VNN-LIB file for each of `PROPERTIES`, and the CSV file that lists them."""
    for what in PROPERTIES:
        label = int(data.labels[what.image])
        title = f"Is test image {what.image}, a {label}, recognised within {what.distance}?"
        text = to_vnnlib(data.images[what.image], label, what.distance, title)
        (folder / f"{what.name}.vnnlib").write_text(text)
    rows = (f"digits_mlp.onnx,{what.name}.vnnlib,{TIMEOUT}\n" for what in PROPERTIES)
    (folder / "instances.csv").write_text("".join(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the digits example and write its files.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent / "digits")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    training, test = load_data()
    model = train(training)
    onnx.save(to_onnx(model), str(folder / "digits_mlp.onnx"))
    write_properties(folder, test)
    print(f"test accuracy {accuracy(model, test):.1%}; files in {folder}")


if __name__ == "__main__":
    main()
