"""Where a search begins: float boxes and points in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
import torch

from abcrown_dist.spec.property import Box
from abcrown_dist.util.numerics import round_down, round_up


@dataclass(frozen=True)
class Region:
    """T float boxes: lower and upper bounds, each (T, inputs), in the network's dtype.

    Rounded inward. Where no float lies between the bounds as written (inputs fixed at 0.1), both are
    the float nearest to the lower bound: it is what the clamped decimal is cast to at confirmation.
    """

    lower: torch.Tensor
    upper: torch.Tensor

    @classmethod
    def of(cls, boxes: Sequence[Box], device: torch.device, dtype: torch.dtype) -> Region:
        """Round non-empty `boxes` into `dtype` on `device`."""
        inward = [_inward(box) for box in boxes]
        nearest = torch.tensor([[float(value) for value in box.lower] for box in boxes], dtype=torch.float64)
        lower = round_up(torch.from_numpy(np.stack([low for low, _ in inward])), dtype)
        upper = round_down(torch.from_numpy(np.stack([high for _, high in inward])), dtype)
        nothing_between = lower > upper
        lower = torch.where(nothing_between, nearest.to(dtype), lower)
        upper = torch.where(nothing_between, nearest.to(dtype), upper)
        return cls(lower.to(device), upper.to(device))

    def __len__(self) -> int:
        return len(self.lower)

    @property
    def width(self) -> torch.Tensor:
        """(T, inputs), zero for a fixed input."""
        return self.upper - self.lower

    def select(self, index: torch.Tensor) -> Region:
        """The boxes `index` (int64 or bool, as in tensor indexing)."""
        return Region(self.lower[index], self.upper[index])

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """The nearest points of the boxes, for x of shape (T, R, inputs)."""
        return torch.minimum(torch.maximum(x, self.lower[:, None]), self.upper[:, None])


def _inward(box: Box) -> tuple[np.ndarray, np.ndarray]:
    """Largest float64 bounds, each (n,), that lie inside the box as written."""
    lower = np.array([float(value) for value in box.lower])
    upper = np.array([float(value) for value in box.upper])
    for i, (low, high) in enumerate(zip(box.lower, box.upper, strict=True)):
        if Decimal(lower[i]) < low:
            lower[i] = np.nextafter(lower[i], np.inf)
        if Decimal(upper[i]) > high:
            upper[i] = np.nextafter(upper[i], -np.inf)
    return lower, upper


def centres(region: Region) -> torch.Tensor:
    """(T, 1, inputs)."""
    return region.project((region.lower + region.width / 2)[:, None])


def uniform(region: Region, count: int, generator: torch.Generator) -> torch.Tensor:
    """(T, count, inputs), uniform in each box.

    The numbers are drawn on the generator's device (the CPU), so that a seed means the same search on
    every device.
    """
    where = _random(region, count, generator)
    return region.project(region.lower[:, None] + where * region.width[:, None])


def vertices(region: Region, count: int, generator: torch.Generator) -> torch.Tensor:
    """(T, count, inputs) of each box's vertices: all, where it has at most `count`, else random ones."""
    high = _random(region, count, generator) < 0.5
    digits = int(math.log2(count)) if count > 0 else 0
    free = region.width > 0
    position = free.cumsum(-1) - 1
    enumerable = free & (free.sum(-1, keepdim=True) <= digits)
    number = torch.arange(count, device=free.device)[None, :, None]
    bit = (number >> position.clamp(0, max(digits, 1))[:, None]) & 1
    high = torch.where(enumerable[:, None], bit.bool(), high)
    return torch.where(high, region.upper[:, None], region.lower[:, None])


def mixed(region: Region, count: int, generator: torch.Generator) -> torch.Tensor:
    """(T, count, inputs): the centre, then vertices and uniform points half and half."""
    if count <= 1:
        return centres(region)[:, :count]
    corners = (count - 1) // 2
    parts = [centres(region), vertices(region, corners, generator)]
    parts.append(uniform(region, count - 1 - corners, generator))
    return torch.cat(parts, dim=1)


def _random(region: Region, count: int, generator: torch.Generator) -> torch.Tensor:
    boxes, inputs = region.lower.shape
    drawn = torch.rand((boxes, count, inputs), generator=generator, dtype=region.lower.dtype)
    return drawn.to(region.lower.device)
