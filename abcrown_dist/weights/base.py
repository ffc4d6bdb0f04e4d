"""What bound passes ask of weights, wherever these live.

A pass never sees ranks. Under tensor parallelism it holds only its own neurons of every tensor, and
asks for what it needs of the others by what it means: `total`, `whole`, `own`, `locate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from abcrown_dist.graph.ir import Graph, Node
from abcrown_dist.parallel.group import Group
from abcrown_dist.util.numerics import Rounding
from abcrown_dist.weights.maps import AffineMap


class Weights(Protocol):
    """Hands out the maps of affine nodes for the duration of a visit.

    Attributes:
        graph: the network; its constants may be without values.
        dtype, device: of all bounds.
        group: the ranks that share these weights.
        transient: weights exist only during a visit, so that autograd must not hold on to them.
        parts: among how many ranks the neurons of every tensor are cut.
        rounding: how errors of bounds are counted.
    """

    graph: Graph
    dtype: torch.dtype
    device: torch.device
    group: Group
    transient: bool
    parts: int
    rounding: Rounding

    def constant(self, key: str) -> Tensor:
        """A constant of a node that is not affine."""
        ...

    def to(self, dtype: torch.dtype) -> Weights | None:
        """The same weights in a wider dtype; None where the model's own digits are not here any more."""
        ...

    def visit(self, node: Node) -> AbstractContextManager[AffineMap]:
        """Context in which the map of `node` may be used, and not after."""
        ...

    def expect(self, names: Sequence[str]) -> None:
        """Tell which nodes will be visited next, in this order, so that they can be fetched early."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in which tensors over a node's (own) neurons are kept."""
        ...

    def total(self, value: Tensor) -> Tensor:
        """Add up what the own neurons of every rank contribute."""
        ...

    def own(self, name: str, whole: Tensor) -> Tensor:
        """The own part of a tensor (..., *shape of the node)."""
        ...

    def whole(self, name: str, own: Tensor) -> Tensor:
        """All neurons (..., *shape of the node), given the own part."""
        ...

    def locate(self, name: str, index: Tensor) -> tuple[Tensor, Tensor]:
        """Which entries of `index` (flat neurons) are own neurons, and where these lie in the own part."""
        ...

    def own_chunks(self, count: int) -> list[tuple[int, bool]]:
        """Chunks of rows to work on, in order, out of `count`; False where the result is another's."""
        ...

    def merge_rows(self, own: Tensor) -> Tensor:
        """All rows, given a tensor that holds the results of the own chunks and zeros elsewhere."""
        ...


class AllNeurons:
    """For weights whose ranks hold all neurons of every tensor: nothing to add up or to look for."""

    parts = 1
    graph: Graph

    def shape(self, name: str) -> tuple[int, ...]:
        return self.graph[name].shape

    def total(self, value: Tensor) -> Tensor:
        return value

    def own(self, name: str, whole: Tensor) -> Tensor:
        return whole

    def whole(self, name: str, own: Tensor) -> Tensor:
        return own

    def locate(self, name: str, index: Tensor) -> tuple[Tensor, Tensor]:
        return torch.arange(len(index), device=index.device), index

    def own_chunks(self, count: int) -> list[tuple[int, bool]]:
        return [(number, True) for number in range(count)]

    def merge_rows(self, own: Tensor) -> Tensor:
        return own
