"""Networks that are awkward to share out: the zoo's, and some that no number of ranks divides."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from abcrown_dist.bounds.concretize import Box
from abcrown_dist.graph.ir import Graph
from abcrown_dist.graph.load_onnx import load_onnx
from abcrown_dist.graph.load_torch import load_torch
from abcrown_dist.spec.vnnlib1 import load_vnnlib
from abcrown_dist.util.numerics import round_down, round_up
from abcrown_dist.weights.evaluate import split_inputs
from tests.bounds import zoo


class Averaged(nn.Module):
    """Channelwise pooling that ranks may do alone or not, and a mean over space."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 5, 1), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.avg_pool2d(F.relu(self.first(x)), 2)
        return self.last(F.relu(self.second(h)).mean((2, 3)))


class PerToken(nn.Module):
    """A dense layer over the last of two axes, and a scaled sum of two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(15, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x))
        return self.last((torch.add(h, F.relu(self.second(h)), alpha=-0.5) / 2 + 0.1).flatten(1))


def _up_and_down() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 6), nn.ReLU(), nn.Unflatten(1, (3, 2)), nn.ConvTranspose1d(3, 5, 2, stride=2),
        nn.ReLU(), nn.ConvTranspose1d(5, 2, 3, padding=1, groups=1), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


def _wide() -> nn.Module:
    """Trap 13: coefficients of its second layer alone would be 17 GB."""
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((3, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 128, 1)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32768, 512), nn.ReLU(), nn.Linear(512, 10))


def _spoilt(value: float) -> nn.Module:
    """One weight of the first layer is `value`."""
    module = zoo.Mlp(4, 9, 7, 3)
    with torch.no_grad():
        next(module.parameters())[5, 2] = value
    return module


_MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "depth_2": (lambda: zoo.Mlp(5, 7, 3), (1, 5)),
    "depth_3": (lambda: zoo.Mlp(3, 11, 9, 1), (1, 3)),
    "depth_5": (lambda: zoo.Mlp(7, 13, 5, 9, 11, 3), (1, 7)),
    "depth_8": (lambda: zoo.Mlp(3, 9, 7, 11, 5, 9, 7, 5, 2), (1, 3)),
    "one_neuron": (lambda: zoo.Mlp(2, 3, 1, 6, 1, 1), (1, 2)),
    "one_input": (lambda: zoo.Mlp(1, 5, 3, 2), (1, 1)),
    "averaged": (Averaged, (1, 1, 6, 6)),
    "per_token": (PerToken, (1, 3, 4)),
    "up_and_down": (_up_and_down, (1, 3)),
}
NAMES = (*zoo.NAMES, *_MODULES)
WIDE = "wide"
NOT_FINITE = {"nan": math.nan, "infinity": math.inf, "overflow": 3e38}
_OTHERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    WIDE: (_wide, (1, 3, 32, 32)),
    **{name: (partial(_spoilt, value), (1, 4)) for name, value in NOT_FINITE.items()},
}


@cache
def graph(name: str) -> Graph:
    """A network by its name here, in the zoo, or by its path as an ONNX file; float32 weights."""
    if name.endswith((".onnx", ".gz")):
        return load_onnx(name).graph
    if name in zoo.NAMES:
        return zoo.graph(name)
    make, shape = _OTHERS.get(name) or _MODULES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = make().eval()
    return load_torch(module, torch.rand(shape, generator=torch.Generator().manual_seed(0))).graph


def real_box(graph: Graph, prop: Path, dtype: torch.dtype) -> Box:
    """The box of a property's first disjunct."""
    low, high = load_vnnlib(prop).disjuncts[0].box.outward()
    lower, upper = (torch.from_numpy(np.asarray(end))[None] for end in (low, high))
    return Box(split_inputs(graph, round_down(lower, dtype)), split_inputs(graph, round_up(upper, dtype)))
