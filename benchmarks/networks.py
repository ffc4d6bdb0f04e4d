"""Networks that the benchmarks run on: real ones where their folders are given, else ones made here."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Source:
    """Where a network and its input box come from.

    Attributes:
        name: for the table.
        onnx: network file; empty for a generated network, which `name` then stands for.
        vnnlib: property file, whose input boxes' hull is bounded over.
        reference: file of another tool's bounds on the same box and the seconds they took, or empty.
    """

    name: str
    onnx: str = ""
    vnnlib: str = ""
    reference: str = ""

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True)
class Loaded:
    """A captured network with one box over its flat inputs (D,), and the reference's arrays by key."""

    graph: Any
    dtype: Any
    lower: np.ndarray
    upper: np.ndarray
    reference: Mapping[str, np.ndarray]


def sources(bench: Path | None, oracle: Path | None) -> list[Source]:
    """Every network of the folders; of `oracle` first, of `bench` those that `oracle` lacks.

    Raises:
        SystemExit: a folder does not hold what it should.
    """
    if bench is None:
        if oracle is not None:
            raise SystemExit("--oracle holds bounds only: give the folder of networks as --bench too")
        return generated()
    found = [] if oracle is None else [_from_reference(bench, path) for path in sorted(oracle.glob("*.npz"))]
    if oracle is not None and not found:
        raise SystemExit(f"{oracle}: no .npz files")
    seen = {source.onnx for source in found}
    listing = bench / "instances.csv"
    if not listing.is_file():
        raise SystemExit(f"{listing}: no such file")
    with listing.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            onnx = str(bench / row["onnx"])
            if onnx not in seen:
                seen.add(onnx)
                found.append(Source(_name(row["onnx"]), onnx, str(bench / row["vnnlib"])))
    return found


def generated() -> list[Source]:
    """The shipped example and the networks of `_MODULES`."""
    folder = ROOT / "examples" / "digits"
    digits = Source("digits_mlp", str(folder / "digits_mlp.onnx"), str(folder / "digits_mlp_crown.vnnlib"))
    return [digits, *(Source(name) for name in _MODULES)]


def load(source: Source) -> Loaded:
    """Capture the network and read its box.

    Raises:
        LoadError: a file cannot be read or is not supported.
    """
    if not source.onnx:
        return _generate(source.name)
    from abcrown_dist.graph.load_onnx import load_onnx

    model = load_onnx(source.onnx)
    if source.reference:
        with np.load(source.reference, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
        return Loaded(model.graph, model.dtype, arrays["x_lo"].ravel(), arrays["x_hi"].ravel(), arrays)
    from abcrown_dist.spec.vnnlib1 import load_vnnlib

    ends = [box.outward() for box, _ in load_vnnlib(source.vnnlib).boxes()]
    lower, upper = np.min([low for low, _ in ends], axis=0), np.max([high for _, high in ends], axis=0)
    return Loaded(model.graph, model.dtype, lower, upper, {})


def _from_reference(bench: Path, path: Path) -> Source:
    with np.load(path, allow_pickle=False) as arrays:
        onnx, vnnlib = str(arrays["onnx"]), str(arrays["vnnlib"])
    return Source(_name(onnx), str(bench / onnx), str(bench / vnnlib), str(path))


def _name(onnx: str) -> str:
    return f"{Path(onnx).parent.name}/{Path(onnx).stem}"


def _mlp(width: int, depth: int) -> Any:
    from torch import nn

    layers: list[Any] = [nn.Flatten(), nn.Linear(784, width), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10)), (1, 1, 28, 28)


def _cnn(channels: int) -> Any:
    from torch import nn

    network = nn.Sequential(
        nn.Conv2d(3, channels, 4, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 4, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(2 * channels * 64, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    return network, (1, 3, 32, 32)


_MODULES: dict[str, Callable[[], Any]] = {
    "mlp_256x4": lambda: _mlp(256, 4),
    "mlp_1024x3": lambda: _mlp(1024, 3),
    "cnn_8": lambda: _cnn(8),
    "cnn_16": lambda: _cnn(16),
}


def _generate(name: str) -> Loaded:
    """Random weights from a fixed seed, inputs within 0.01 of a random image."""
    import torch

    from abcrown_dist.graph.load_torch import load_torch

    torch.manual_seed(0)
    module, shape = _MODULES[name]()
    centre = torch.rand(shape)
    model = load_torch(module, centre)
    flat = centre.double().numpy().ravel()
    return Loaded(model.graph, model.dtype, flat - 0.01, flat + 0.01, {})
