"""Affine nodes as sparse matrices, whatever they compute: their transpose, applied to identity rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy import sparse

from abcrown_dist.weights.maps import AffineMap

_BLOCK = 1 << 22  # entries of a dense block of rows


def sparse_matrices(
    affine: AffineMap, shape: tuple[int, ...], in_shapes: Sequence[tuple[int, ...]]
) -> list[sparse.csr_array]:
    """W_i of  y = sum_i W_i x_i + b,  one matrix (outputs, inputs_i) per operand, over flat neurons.

    Args:
        affine: in float64.
        shape, in_shapes: of the node and of its operands.
    """
    size = math.prod(shape)
    if affine.identity_rows:
        return [sparse.eye_array(size, format="csr") for _ in in_shapes]
    step = max(1, _BLOCK // max(1, *(math.prod(s) for s in in_shapes), size))
    blocks: list[list[sparse.csr_array]] = [[] for _ in in_shapes]
    with torch.no_grad():
        for index in torch.arange(size).split(step):
            for found, dense in zip(blocks, _rows(affine, index, shape), strict=True):
                found.append(sparse.csr_array(dense.reshape(len(index), -1).double().cpu().numpy()))
    return [
        sparse.vstack(found, format="csr") if found else sparse.csr_array((0, math.prod(s)))
        for found, s in zip(blocks, in_shapes, strict=True)
    ]


def flat_offset(affine: AffineMap, size: int) -> np.ndarray:
    """b of  y = sum_i W_i x_i + b,  (outputs,) float64."""
    offset = affine.offset()
    return np.zeros(size) if offset is None else offset.detach().double().cpu().numpy().reshape(-1)


def _rows(affine: AffineMap, index: torch.Tensor, shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    direct = affine.rows(index)
    if direct is not None:
        return (direct,)
    size = math.prod(shape)
    identity = torch.zeros(len(index), size, dtype=torch.float64)
    identity[torch.arange(len(index)), index] = 1
    return affine.transpose(identity.reshape(len(index), *shape))
