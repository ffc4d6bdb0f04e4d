"""Exact answers about small modules of affine maps, ReLU and LeakyReLU, whatever their shape.

Independent of the package's graphs and bounds: forward hooks replace the result of every activation by a
free variable, so that all pre-activations and outputs become affine functions of the inputs and of these
variables, which are read off at the unit vectors. Together with the pieces of the activations they make a
mixed-integer program (Tjeng, Xiao and Tedrake, "Evaluating Robustness of Neural Networks with Mixed
Integer Programming", ICLR 2019).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import Tensor, nn

ACTIVATIONS = (nn.ReLU, nn.LeakyReLU)


@dataclass(frozen=True)
class Piecewise:
    """A module as  z = Zx x + Za a + z0,  y = Yx x + Ya a + y0,  a = max(z, 0) + slope min(z, 0).

    Attributes:
        z, y: each (matrix over (x, a), constant); Za is strictly lower triangular by layers.
        slope: (neurons,).
        layers: slices of the neurons, in the order of evaluation.
        lower, upper: (inputs,).
        low, high: interval bounds of z, (neurons,).
    """

    z: tuple[np.ndarray, np.ndarray]
    y: tuple[np.ndarray, np.ndarray]
    slope: np.ndarray
    layers: list[slice]
    lower: np.ndarray
    upper: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @property
    def unstable(self) -> np.ndarray:
        """Neurons (n,) whose sign intervals leave open."""
        return np.nonzero((self.low < 0) & (self.high > 0))[0]

    def minimum_of_maximum(self, C: np.ndarray, base: np.ndarray) -> float:
        """min over the box of  max over k of  C_k y - base_k,  up to HiGHS's tolerances.

        Raises:
            RuntimeError: HiGHS finds no optimum within a minute.
        """
        inputs, neurons = len(self.lower), len(self.slope)
        first = inputs + neurons  # columns: inputs, activations, one binary per neuron, the maximum
        columns = first + neurons + 1
        identity = np.eye(columns)
        a, p, t = identity[inputs:first], identity[first:-1], identity[-1:]
        z = np.zeros((neurons, columns))
        z[:, :first] = self.z[0]
        s, low, high = self.slope, np.minimum(self.low, 0), np.maximum(self.high, 0)
        y = np.zeros((len(base), columns))
        y[:, :first] = C @ self.y[0]
        below: list[tuple[np.ndarray, np.ndarray]] = [
            (z - a, -self.z[1]),
            (s[:, None] * z - a, -s * self.z[1]),
            (a - z - ((1 - s) * low)[:, None] * p, self.z[1] - (1 - s) * low),
            (a - s[:, None] * z - ((1 - s) * high)[:, None] * p, s * self.z[1]),
            (y - t, base - C @ self.y[1]),
        ]
        least, most = np.full(columns, -np.inf), np.full(columns, np.inf)
        least[:inputs], most[:inputs] = self.lower, self.upper
        least[first:-1], most[first:-1] = self.low >= 0, self.high > 0
        result = milp(
            identity[-1],
            integrality=(np.arange(columns) >= first) & (np.arange(columns) < columns - 1),
            bounds=Bounds(least, most),
            constraints=[LinearConstraint(rows, -np.inf, rhs) for rows, rhs in below],
            options={"time_limit": 60.0, "mip_rel_gap": 1e-9},
        )
        if result.status != 0:
            raise RuntimeError(f"HiGHS: {result.message}")
        return float(result.fun)


def piecewise(module: nn.Module, shape: Sequence[int], lower: np.ndarray, upper: np.ndarray) -> Piecewise:
    """Read off the pieces of a module on inputs (batch, *shape), over a flat box."""
    module = copy.deepcopy(module).double().eval()
    inputs = math.prod(shape)
    found = _recorded(module, torch.zeros(1, *shape, dtype=torch.float64), None)
    sizes = [z[0].numel() for z, _ in found[0]]
    slope = np.concatenate([np.full(size, s) for size, (_, s) in zip(sizes, found[0], strict=True)])
    basis = torch.eye(1 + inputs + sum(sizes), dtype=torch.float64)[:, 1:]
    basis[0] = 0
    zs, y = _recorded(module, basis[:, :inputs].reshape(-1, *shape), basis[:, inputs:])
    z = torch.cat([value.flatten(1) for value, _ in zs], dim=1)
    ends = np.cumsum([0, *sizes])
    layers = [slice(int(i), int(j)) for i, j in pairwise(ends)]
    z_map, y_map = _affine(z), _affine(y.flatten(1))
    low, high = _intervals(z_map, slope, layers, lower, upper)
    return Piecewise(z_map, y_map, slope, layers, lower, upper, low, high)


def _affine(values: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Matrix and constant of an affine function, given its values at 0 and at the unit vectors."""
    return (values[1:] - values[0]).T.numpy(), values[0].numpy()


def _recorded(module: nn.Module, x: Tensor, free: Tensor | None) -> tuple[list[tuple[Tensor, float]], Tensor]:
    """Pre-activations with their negative slopes, and outputs; activations yield `free` where it is given."""
    seen: list[tuple[Tensor, float]] = []
    used = 0

    def hook(layer: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        nonlocal used
        seen.append((args[0].detach(), float(getattr(layer, "negative_slope", 0.0))))
        size = args[0][0].numel()
        used += size
        return output if free is None else free[:, used - size : used].reshape(args[0].shape)

    handles = [m.register_forward_hook(hook) for m in module.modules() if isinstance(m, ACTIVATIONS)]
    with torch.no_grad():
        output = module(x)
    for handle in handles:
        handle.remove()
    return seen, output


def _intervals(
    z: tuple[np.ndarray, np.ndarray],
    slope: np.ndarray,
    layers: list[slice],
    lower: np.ndarray,
    upper: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    inputs, neurons = len(lower), len(slope)
    low, high = np.zeros(neurons), np.zeros(neurons)
    least, most = np.zeros(inputs + neurons), np.zeros(inputs + neurons)
    least[:inputs], most[:inputs] = lower, upper
    for layer in layers:
        matrix = z[0][layer]
        plus, minus = np.maximum(matrix, 0), np.minimum(matrix, 0)
        low[layer] = plus @ least + minus @ most + z[1][layer]
        high[layer] = plus @ most + minus @ least + z[1][layer]
        after = slice(inputs + layer.start, inputs + layer.stop)
        least[after] = np.where(low[layer] > 0, low[layer], slope[layer] * low[layer])
        most[after] = np.where(high[layer] > 0, high[layer], slope[layer] * high[layer])
    return low, high
