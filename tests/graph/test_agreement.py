"""The comparison with an original: by component, each against its own rounding."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from abcrown_dist.graph.agreement import compare, sample_points
from abcrown_dist.graph.execute import execute
from abcrown_dist.graph.ir import Graph
from tests.weights.laws import captured


class WithCompanion(nn.Module):
    """A small linear output beside one of 1e6."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.layer(x), x[:, :1] * 0 + 1e6], dim=1)


class PowerAtTheEnd(WithCompanion):
    """The same with a nonlinear call over both."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).pow(2)


class Cancelling(nn.Module):
    """(x + 1e8) - 1e8, and a long sum of equal terms."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([(x + 1e8) - 1e8, (x.repeat(1, 5000) * 0.1).sum(1, keepdim=True)], dim=1)


def differs(graph: Graph, change: torch.Tensor) -> bool:
    def reference(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [value + change for value in execute(graph, inputs)]

    return compare(graph, reference, sample_points([(1, 4)], torch.float32))[0] is not None


@pytest.mark.parametrize("component", range(3))
@pytest.mark.parametrize("module", [WithCompanion, PowerAtTheEnd])
def test_a_large_output_excuses_no_error_of_another(module: type[nn.Module], component: int) -> None:
    graph = captured(module(), [(1, 4)], dtype=torch.float32)
    change = torch.zeros(1, 4)
    assert not differs(graph, change)
    change[0, component] = 1e-2
    assert differs(graph, change)


def test_rounding_is_no_difference() -> None:
    module = Cancelling()
    graph = captured(module, [(1, 4)], dtype=torch.float32)

    def reference(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [module(inputs[0])]

    assert compare(graph, reference, sample_points([(1, 4)], torch.float32))[0] is None
