"""How far a point is from being a counterexample of each of a group of disjuncts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from abcrown_dist.spec.junctions import fold
from abcrown_dist.spec.property import Disjunct


@dataclass(frozen=True)
class Objective:
    """The constraints  C y + D x <= rhs  of T disjuncts, padded to K rows each, in float64.

    Float64 whatever the network computes in: the constraints then add no rounding of their own to
    that of the outputs, which decides at the border (`Y_0 >= 148.15682830810547`).

    Attributes:
        C: (T, K, outputs).
        rhs: (T, K).
        D: (T, K, inputs), or None where no disjunct of the group mentions an input.
        strict: (T, K) bool.
        real: (T, K) bool; False marks padding.
        scale: (T, K), one over the Euclidean norm of a row's coefficients. Violations are compared in
            this unit, or a row written as 1000 Y_0 <= 0 would hide all others.
        groups: (depth, T, K), see `spec.junctions`; None where no disjunct has factors.
    """

    C: torch.Tensor
    rhs: torch.Tensor
    D: torch.Tensor | None
    strict: torch.Tensor
    real: torch.Tensor
    scale: torch.Tensor
    groups: torch.Tensor | None = None

    @classmethod
    def of(cls, disjuncts: Sequence[Disjunct], device: torch.device) -> Objective:
        """Stack `disjuncts`, each with at least one constraint, on `device`."""
        height = max(len(disjunct.rhs) for disjunct in disjuncts)
        C = np.stack([_pad(disjunct.C, height) for disjunct in disjuncts])
        rhs = np.stack([_pad(disjunct.rhs, height) for disjunct in disjuncts])
        real = np.stack([_pad(np.ones(len(disjunct.rhs), dtype=bool), height) for disjunct in disjuncts])
        strict = np.zeros_like(real)
        for row, disjunct in zip(strict, disjuncts, strict=True):
            if disjunct.strict is not None:
                row[: len(disjunct.strict)] = disjunct.strict
        D = _stack_inputs(disjuncts, height)
        norm = np.sqrt((C**2).sum(-1) + (0.0 if D is None else (D**2).sum(-1)))
        scale = 1.0 / np.where(norm > 0, norm, 1.0)
        return cls(
            C=torch.from_numpy(C).to(device),
            rhs=torch.from_numpy(rhs).to(device),
            D=None if D is None else torch.from_numpy(D).to(device),
            strict=torch.from_numpy(strict).to(device),
            real=torch.from_numpy(real).to(device),
            scale=torch.from_numpy(scale).to(device),
            groups=_stack_groups(disjuncts, height, device),
        )

    def __len__(self) -> int:
        return len(self.C)

    def select(self, index: torch.Tensor) -> Objective:
        """The objective of the disjuncts `index` (int64 or bool, as in tensor indexing)."""
        D = None if self.D is None else self.D[index]
        groups = None if self.groups is None else self.groups[:, index]
        rows = (self.strict[index], self.real[index], self.scale[index])
        return Objective(self.C[index], self.rhs[index], D, *rows, groups)

    def violations(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Scaled amounts by which points miss the constraints: positive is missed, <= 0 fulfilled.

        Args:
            x: (T, R, inputs), R points for each disjunct.
            y: (T, R, outputs), what the network answers there.

        Returns:
            (T, R, K) float64, differentiable; -inf in padding, +inf where the network answered NaN or
            an infinity, which no counterexample may rest on.
        """
        value = torch.einsum("tro,tko->trk", y.double(), self.C) - self.rhs[:, None]
        if self.D is not None:
            value = value + torch.einsum("trn,tkn->trk", x.double(), self.D)
        value = (value * self.scale[:, None]).masked_fill(~self.real[:, None], -torch.inf)
        return value.masked_fill(~y.isfinite().all(-1, keepdim=True), torch.inf)

    def joined(self, missing: torch.Tensor) -> torch.Tensor:
        """Amounts (T, R, K) by which points miss each row's factor: those of its nearest alternative."""
        if self.groups is None:
            return missing
        return fold(missing, self.groups[:, :, None].expand(-1, -1, missing.shape[1], -1))

    def worst(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Amounts (T, R) by which points miss the disjuncts; arguments as for `violations`."""
        return self.joined(self.violations(x, y)).amax(-1)

    def fulfilled(self, missing: torch.Tensor) -> torch.Tensor:
        """Bool (T, R): whether points that miss rows by so much (T, R, K) are counterexamples."""
        held = torch.where(self.strict[:, None], missing < 0, missing <= 0)
        return ~self.joined(~held).any(-1)

    def magnitude(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Scaled sum of the sizes of each constraint's terms, (T, R, K): the unit of its rounding error."""
        size = torch.einsum("tro,tko->trk", y.double().abs(), self.C.abs()) + self.rhs[:, None].abs()
        if self.D is not None:
            size = size + torch.einsum("trn,tkn->trk", x.double().abs(), self.D.abs())
        return size * self.scale[:, None]


def _pad(rows: np.ndarray, height: int) -> np.ndarray:
    return np.pad(rows, [(0, height - len(rows))] + [(0, 0)] * (rows.ndim - 1))


def _stack_inputs(disjuncts: Sequence[Disjunct], height: int) -> np.ndarray | None:
    width = max((d.D.shape[1] for d in disjuncts if d.D is not None), default=0)
    if width == 0:
        return None
    absent = np.zeros((height, width))
    return np.stack([absent if d.D is None else _pad(d.D, height) for d in disjuncts])


def _stack_groups(disjuncts: Sequence[Disjunct], height: int, device: torch.device) -> torch.Tensor | None:
    depth = max(0 if disjunct.groups is None else len(disjunct.groups) for disjunct in disjuncts)
    if depth == 0:
        return None
    groups = np.broadcast_to(np.arange(height), (depth, len(disjuncts), height)).copy()
    for t, disjunct in enumerate(disjuncts):
        if disjunct.groups is not None:
            groups[depth - len(disjunct.groups) :, t, : len(disjunct.rhs)] = disjunct.groups
    return torch.from_numpy(groups).to(device)
