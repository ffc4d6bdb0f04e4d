"""Random small verification problems with their exact answers, and searches on them in this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from abcrown_dist.attack.confirm import Confirmer
from abcrown_dist.config.keys import build
from abcrown_dist.graph.load_onnx import LoadedModel
from abcrown_dist.graph.load_torch import load_torch
from abcrown_dist.problem import prepare
from abcrown_dist.report.progress import Progress
from abcrown_dist.spec.property import Property, Verdict
from abcrown_dist.spec.vnnlib1 import parse_vnnlib
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.verify import Outcome, solve
from tests import flow
from tests.piecewise import piecewise

MOST_UNSTABLE = 12


class Block(nn.Module):
    """Dense layers whose result is added to their input, behind an activation."""

    def __init__(self, size: int, slope: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(size, size), nn.Linear(size, size)
        self.inner, self.outer = _activation(slope), _activation(slope)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x + self.second(self.inner(self.first(x))))


def _activation(slope: float) -> nn.Module:
    return nn.LeakyReLU(slope) if slope else nn.ReLU()


def _dense(sizes: Sequence[int], slope: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), _activation(slope)]
    return nn.Sequential(*layers[:-1])


def mlp(random: np.random.Generator, slope: float = 0.0) -> tuple[nn.Module, tuple[int, ...]]:
    inputs, depth = int(random.integers(1, 4)), int(random.integers(1, 4))
    hidden = random.integers(2, 8 - depth, depth).tolist()
    return _dense([inputs, *hidden, int(random.integers(1, 4))], slope), (inputs,)


def leaky(random: np.random.Generator) -> tuple[nn.Module, tuple[int, ...]]:
    return mlp(random, float(random.choice([0.01, 0.1, 0.4])))


def convolutional(random: np.random.Generator) -> tuple[nn.Module, tuple[int, ...]]:
    body = [nn.Conv1d(1, 2, 2), nn.ReLU(), nn.Conv1d(2, 2, 2, padding=1), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(6, 2)), (1, 3)


def residual(random: np.random.Generator) -> tuple[nn.Module, tuple[int, ...]]:
    size, slope = int(random.integers(2, 4)), float(random.choice([0.0, 0.1]))
    return nn.Sequential(nn.Linear(2, size), Block(size, slope), nn.Linear(size, 2)), (2,)


def activated(random: np.random.Generator) -> tuple[nn.Module, tuple[int, ...]]:
    """The input is activated before the first layer, and the output is an activation's."""
    return nn.Sequential(nn.ReLU(), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.LeakyReLU(0.2)), (3,)


FAMILIES: dict[str, Callable[[np.random.Generator], tuple[nn.Module, tuple[int, ...]]]] = {
    "mlp": mlp,
    "leaky": leaky,
    "convolutional": convolutional,
    "residual": residual,
    "activated": activated,
}


@dataclass(frozen=True)
class Constraints:
    """One disjunct:  C y <= base + shift  over a box, which a point can fulfil if shift >= least.

    Attributes:
        lower, upper: (inputs,), three decimals each.
        C, base: (K, outputs) and (K,).
        least: min over the box of  max_k (C_k y - base_k), exactly.
        scale: how much that maximum varies.
    """

    lower: np.ndarray
    upper: np.ndarray
    C: np.ndarray
    base: np.ndarray
    least: float
    scale: float

    def text(self, margin: float) -> str:
        """An `and` that lies `margin` times the scale on the side of sat (positive) or unsat."""
        ends = zip(self.lower.tolist(), self.upper.tolist(), strict=True)
        parts = [f"(>= X_{i} {low:.3f}) (<= X_{i} {high:.3f})" for i, (low, high) in enumerate(ends)]
        rhs = self.base + self.least + margin * self.scale
        for row, bound in zip(self.C.tolist(), rhs.tolist(), strict=True):
            terms = " ".join(f"(* {value!r} Y_{i})" for i, value in enumerate(row))
            parts.append(f"(<= (+ {terms}) {bound!r})")
        return f"(and {' '.join(parts)})"


@dataclass(frozen=True)
class Case:
    """A module with a disjunction about it.

    Attributes:
        shape: of one input, without the leading axis.
        disjuncts: at least one.
        unstable: neurons that intervals leave open over the first box.
    """

    module: nn.Module
    shape: tuple[int, ...]
    disjuncts: list[Constraints]
    unstable: int

    @cached_property
    def model(self) -> LoadedModel:
        return load_torch(self.module, torch.zeros(1, *self.shape))

    @property
    def outputs(self) -> int:
        return self.disjuncts[0].C.shape[1]

    def property(self, margins: Sequence[float]) -> Property:
        """One margin per disjunct: `sat` if any of them is positive."""
        clauses = " ".join(item.text(margin) for item, margin in zip(self.disjuncts, margins, strict=True))
        anywhere: list[flow.Range] = [(-9, 9)] * math.prod(self.shape)
        text = flow.declare(len(anywhere), self.outputs) + flow.box(anywhere)
        return parse_vnnlib(f"{text}(assert (or {clauses}))\n")

    def evaluate(self, flat: np.ndarray) -> np.ndarray:
        """Outputs at one flat input, as the module computes them."""
        x = torch.from_numpy(flat).float().reshape(1, *self.shape)
        with torch.no_grad():
            return self.module(x).double().flatten().numpy()


def draw(family: str, seed: int, *, rows: int = 3, disjuncts: int = 3, most: int = MOST_UNSTABLE) -> Case:
    """A random case with three to `most` unstable neurons."""
    random = np.random.default_rng([seed, *family.encode()])
    while True:
        module, shape = FAMILIES[family](random)
        with torch.no_grad():
            for value in module.parameters():
                fan = math.prod(value.shape[1:]) if value.dim() > 1 else 4
                value.copy_(torch.from_numpy(random.standard_normal(value.shape) * 1.5 / math.sqrt(fan)))
        boxes = [_box(random, math.prod(shape)) for _ in range(int(random.integers(1, disjuncts + 1)))]
        if random.random() < 0.5:
            boxes = [boxes[0]] * len(boxes)
        counts = [len(piecewise(module, shape, *ends).unstable) for ends in boxes]
        if counts[0] >= 3 and max(counts) <= most:
            items = [_constraints(random, module, shape, ends, rows) for ends in boxes]
            if all(item.scale > 1e-3 for item in items):
                return Case(module, shape, items, counts[0])


def _box(random: np.random.Generator, inputs: int) -> tuple[np.ndarray, np.ndarray]:
    centre, radius = np.round(random.uniform(-1, 1, inputs), 3), np.round(random.uniform(0.2, 2, inputs), 3)
    return centre - radius, centre + radius


def _constraints(
    random: np.random.Generator,
    module: nn.Module,
    shape: tuple[int, ...],
    ends: tuple[np.ndarray, np.ndarray],
    rows: int,
) -> Constraints:
    pieces = piecewise(module, shape, *ends)
    points = torch.from_numpy(random.uniform(*ends, (200, len(ends[0])))).float()
    with torch.no_grad():
        y = module(points.reshape(-1, *shape)).double().flatten(1).numpy()
    count = int(random.integers(1, rows + 1))
    C = np.round(random.standard_normal((count, y.shape[1])), 2)
    # Each row near its own median: then no row alone decides.
    base = np.round(np.median(y @ C.T, axis=0), 3)
    worst = (y @ C.T - base).max(axis=1)
    scale = float(worst.max() - worst.min())
    return Constraints(*ends, C, base, pieces.minimum_of_maximum(C, base), scale)


def search(case: Case, prop: Property, options: Mapping[str, Any], seconds: float = 60.0) -> Outcome:
    """Verify a property of a case; a `sat` is checked against the module, an `unsat` for its completeness."""
    config = build(dict(options))
    torch.manual_seed(config.general.seed)
    confirmer = Confirmer(prop, case.evaluate)
    outcome = solve(
        config,
        lambda: prepare(config, case.model, prop, confirmer),
        Deadline(seconds),
        Progress(mode="none"),
    )
    flow.check_outcome(outcome, prop)
    if outcome.verdict is Verdict.SAT:
        assert outcome.witness is not None
        item = prop.disjuncts[outcome.witness.disjunct]
        x = np.array([float(value) for value in outcome.witness.inputs])
        y = case.evaluate(x)
        assert (item.C @ y <= item.rhs + 1e-9 * np.abs(item.rhs)).all()
        assert all(low <= v <= high for v, low, high in zip(x, *item.box.outward(), strict=True))
    return outcome
