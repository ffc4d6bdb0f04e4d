"""Small random networks of every shape that the engine claims to handle, and boxes for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from abcrown_dist.bounds.concretize import Box
from abcrown_dist.graph.ir import Graph
from abcrown_dist.graph.load_torch import load_torch
from abcrown_dist.util.numerics import round_down, round_up
from tests.models import Residual, randomize


class Mlp(nn.Sequential):
    """Dense layers with an activation between any two."""

    def __init__(self, *sizes: int, activation: Callable[[], nn.Module] = nn.ReLU) -> None:
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), activation()]
        super().__init__(*layers[:-1])


class Shared(nn.Module):
    """The input is read twice, a hidden node three times, and a branch skips two nonlinearities."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        g = F.relu(self.b(h) - h)
        return torch.cat([g + 0.5 * h, F.relu(self.c(x)) + h], 1).sum(1, keepdim=True) - x.mean(
            1, keepdim=True
        )


class TwoInputs(nn.Module):
    """Two inputs of different shapes, two outputs, the second an inner node of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.vector, self.last = nn.Conv2d(1, 2, 2), nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, image: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
        z = self.image(image).flatten(1) + self.vector(vector)
        return self.last(F.relu(z)), z


class Sliced(nn.Module):
    """cat, split, pad, permute, index and constants with broadcasting between the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv, self.last = nn.Linear(6, 8), nn.Conv1d(3, 4, 2), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        a, b = F.leaky_relu(self.first(x), 0.2).split([3, 5], 1)
        joined = torch.cat([a, b[:, [4, 0, 0]], 1 - a], 1).reshape(1, 3, 3).permute(0, 2, 1)
        h = F.relu(self.conv(F.pad(joined, (1, 1), value=0.5)) / torch.tensor([[1.0], [2.0], [-4.0], [0.5]]))
        return self.last(F.relu(h * 2 - 0.25).permute(0, 2, 1).flatten(1))


class PassThrough(nn.Module):
    """One output is the input itself, another an affine function of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, self.last(F.relu(self.first(x))), -2 * x + 1


class ReluOutput(nn.Module):
    """The output is a nonlinearity's, and an inner nonlinearity is read by another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return F.relu(-F.leaky_relu(self.last(F.relu(F.leaky_relu(h, 0.3)) + F.relu(h)), 0.1))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 2), nn.ReLU(),
        nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip


def _pooled() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.AvgPool2d(3, 2, 1), nn.Conv2d(3, 2, 2),
        nn.LeakyReLU(0.1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2),
    )  # fmt: skip


def _decoder() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 8), nn.ReLU(), nn.Unflatten(1, (2, 2, 2)),
        nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1), nn.BatchNorm2d(3), nn.ReLU(),
        nn.Conv2d(3, 1, 3, padding=1),
    )  # fmt: skip


def _grouped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 8, 2, groups=2, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 2, dilation=2, groups=4),
        nn.ReLU(), nn.Flatten(), nn.Linear(36, 2),
    )  # fmt: skip


def _residual() -> nn.Module:
    return nn.Sequential(Residual(2), Residual(2), nn.Flatten(), nn.Linear(32, 3))


_MODULES: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]]]] = {
    "affine": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), [(1, 4)]),
    "mlp": (lambda: Mlp(4, 10, 8, 3), [(1, 4)]),
    "deep": (lambda: Mlp(3, 8, 8, 8, 8, 8, 2), [(1, 3)]),
    "leaky": (lambda: Mlp(3, 8, 8, 2, activation=lambda: nn.LeakyReLU(0.2)), [(1, 3)]),
    "steep_leaky": (lambda: Mlp(3, 6, 6, 2, activation=lambda: nn.LeakyReLU(1.5)), [(1, 3)]),
    "falling_leaky": (lambda: Mlp(3, 6, 6, 2, activation=lambda: nn.LeakyReLU(-0.4)), [(1, 3)]),
    "cnn": (_cnn, [(1, 2, 6, 6)]),
    "residual": (_residual, [(1, 2, 4, 4)]),
    "shared": (Shared, [(1, 4)]),
    "two_inputs_two_outputs": (TwoInputs, [(1, 1, 3, 3), (1, 3)]),
    "decoder": (_decoder, [(1, 3)]),
    "grouped_dilated": (_grouped, [(1, 4, 4, 4)]),
    "pooled": (_pooled, [(1, 1, 6, 6)]),
    "sliced": (Sliced, [(1, 6)]),
    "pass_through": (PassThrough, [(1, 3)]),
    "relu_output": (ReluOutput, [(1, 3)]),
}
NAMES = tuple(_MODULES)


@cache
def graph(name: str, seed: int = 0) -> Graph:
    """A network of the zoo with float32 weights."""
    make, shapes = _MODULES[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = make()
    random = torch.Generator().manual_seed(seed)
    examples = [torch.rand(shape, generator=random) for shape in shapes]
    return load_torch(randomize(module, seed), examples).graph


def boxes(graph: Graph, count: int, dtype: torch.dtype, radius: float = 0.4, seed: int = 0) -> Box:
    """`count` random boxes, each wider than the one before.

    The last of several has half of its inputs fixed; a single one has its first input fixed.
    """
    random = torch.Generator().manual_seed(seed)
    lower, upper = {}, {}
    for name in graph.inputs:
        shape = (count, *graph[name].shape)
        centre = torch.randn(shape, generator=random, dtype=torch.float64)
        width = radius * torch.rand(shape, generator=random, dtype=torch.float64)
        width *= torch.linspace(0.5, 1.5, count, dtype=torch.float64).reshape(count, *[1] * (len(shape) - 1))
        flat = width.view(count, -1)
        flat[-1, :: 2 if count > 1 else flat.shape[1]] = 0
        low, high = round_down(centre - width, dtype), round_up(centre + width, dtype)
        lower[name], upper[name] = low, torch.where(width == 0, low, high)
    return Box(lower, upper)
