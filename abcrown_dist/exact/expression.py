"""Neurons as affine functions of a programme's variables, with what rounding may have done to them.

Every variable of a programme lies in [0, 1], so that its coefficient says how much it can matter: that
makes intervals a sum, and absolute tolerances of a solver mean the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import sparse

from abcrown_dist.exact.rounding import gamma

Array = np.ndarray


@dataclass(frozen=True)
class Expression:
    """Neurons  E v + offset,  each within `error` of the network's own value.

    Attributes:
        E: (neurons, variables).
        offset, error: (neurons,).
    """

    E: sparse.csr_array
    offset: Array
    error: Array

    def __len__(self) -> int:
        return len(self.offset)

    def __getitem__(self, neurons: Array) -> Expression:
        return Expression(self.E[neurons], self.offset[neurons], self.error[neurons])

    @property
    def magnitude(self) -> Array:
        """(neurons,) sum of the magnitudes of all terms at their largest."""
        return abs(self.E).sum(axis=1) + np.abs(self.offset)

    def interval(self) -> tuple[Array, Array]:
        """Lower and upper bounds (neurons,) of the network's values over all v in [0, 1], outward."""
        positive, negative = self.E.maximum(0).sum(axis=1), self.E.minimum(0).sum(axis=1)
        margin = self.error * (1 + gamma(2)) + gamma(_longest(self.E) + 2) * self.magnitude
        return self.offset + negative - margin, self.offset + positive + margin

    def widened(self, columns: int) -> Expression:
        """The same over more variables."""
        return Expression(widen(self.E, columns), self.offset, self.error)

    def value(self, v: Array) -> Array:
        """(neurons,) at a point v (variables,)."""
        return self.E @ v[: self.E.shape[1]] + self.offset


def widen(matrix: sparse.csr_array, columns: int) -> sparse.csr_array:
    """The same rows over more columns; shares memory."""
    if matrix.shape[1] == columns:
        return matrix
    return sparse.csr_array(
        (matrix.data, matrix.indices, matrix.indptr), shape=(matrix.shape[0], columns), copy=False
    )


def combine(
    matrices: Sequence[sparse.csr_array], offset: Array, operands: Sequence[Expression]
) -> Expression:
    """sum_i W_i x_i + b  for operands over the same variables."""
    E = sum_sparse([W @ x.E for W, x in zip(matrices, operands, strict=True)])
    total = offset + sum(W @ x.offset for W, x in zip(matrices, operands, strict=True))
    inherited = np.zeros(len(offset))
    terms = np.abs(offset)
    for W, x in zip(matrices, operands, strict=True):
        inherited += abs(W) @ x.error
        terms += abs(W) @ x.magnitude
    rate = gamma(sum(_longest(W) for W in matrices) + 2)
    return Expression(E, total, (1 + rate) * inherited + rate * terms)


def sum_sparse(matrices: Sequence[sparse.csr_array]) -> sparse.csr_array:
    """Sum of sparse matrices, without stored zeros."""
    total = matrices[0]
    for matrix in matrices[1:]:
        total = total + matrix
    total = sparse.csr_array(total)
    total.eliminate_zeros()
    return total


def stack(parts: Sequence[Expression]) -> Expression:
    """All neurons of several expressions over the same variables."""
    return Expression(
        sparse.csr_array(sparse.vstack([part.E for part in parts], format="csr")),
        np.concatenate([part.offset for part in parts]),
        np.concatenate([part.error for part in parts]),
    )


def _longest(matrix: sparse.csr_array) -> int:
    """Most entries in a row."""
    return int(np.diff(matrix.indptr).max(initial=0))
