"""All weights on this device: the mode for one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from abcrown_dist.graph.ir import Graph, Node
from abcrown_dist.parallel.group import ALONE
from abcrown_dist.util.numerics import REAL_ARITHMETIC, Rounding
from abcrown_dist.weights.base import AllNeurons
from abcrown_dist.weights.maps import AffineMap, build_map


class LocalWeights(AllNeurons):
    """Every constant of `graph` on one device in one dtype.

    Args:
        graph: the network.
        dtype: floating-point type of all bounds; integer constants (indices) keep theirs.
        device: where the weights live.
        rounding: see `weights.base.Weights`; default for real arithmetic.
    """

    transient = False
    group = ALONE

    def __init__(
        self,
        graph: Graph,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        rounding: Rounding = REAL_ARITHMETIC,
    ) -> None:
        self.graph, self.dtype, self.device, self.rounding = graph, dtype, torch.device(device), rounding
        self._constants = {key: self._place(value) for key, value in graph.constants.items()}
        self._maps: dict[str, AffineMap] = {}

    def constant(self, key: str) -> Tensor:
        """The constant `key`, for nodes that are not affine."""
        return self._constants[key]

    @contextmanager
    def visit(self, node: Node) -> Iterator[AffineMap]:
        affine = self._maps.get(node.name)
        if affine is None:
            affine = build_map(self.graph, node, self.constant, self.dtype, self.device)
            self._maps[node.name] = affine
        yield affine

    def expect(self, names: Sequence[str]) -> None:
        """Everything is here already."""

    def to(self, dtype: torch.dtype) -> LocalWeights:
        """The same weights in another dtype, converted from the graph's own constants."""
        return self if dtype == self.dtype else LocalWeights(self.graph, dtype, self.device, self.rounding)

    def _place(self, value: Tensor) -> Tensor:
        dtype = self.dtype if value.is_floating_point() else value.dtype
        return value.to(self.device, dtype)
