"""Who owns which neurons, and how each kind of node is computed."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from abcrown_dist.parallel.group import even_bounds, padded_piece
from abcrown_dist.weights.layout import plan_layouts, weight_ends
from tests.bounds import zoo
from tests.parallel import networks
from tests.weights.laws import Lambda, captured


def how(module: nn.Module | Callable[..., Tensor], *shapes: tuple[int, ...], size: int = 2) -> dict[str, str]:
    """Last kind of layout by op."""
    graph = captured(module if isinstance(module, nn.Module) else Lambda(module), list(shapes))
    plan = plan_layouts(graph, size)
    return {node.op: plan[node.name][0] for node in graph}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("name", networks.NAMES)
def test_every_neuron_has_one_owner(name: str, size: int) -> None:
    graph = networks.graph(name)
    for node_name, (_, ends) in plan_layouts(graph, size).items():
        assert len(ends) == size + 1
        assert ends[0] == 0 and ends[-1] == graph[node_name].size
        assert list(ends) == sorted(ends)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", networks.NAMES)
def test_affine_layers_are_shared_out_evenly(name: str, size: int) -> None:
    """Up to one output neuron or channel."""
    graph = networks.graph(name)
    for node in graph:
        kind, ends = plan_layouts(graph, size)[node.name]
        if kind in ("neurons", "channels"):
            cut = weight_ends(node, ends)
            parts = [last - first for first, last in itertools.pairwise(cut)]
            assert max(parts) - min(parts) <= 1


@pytest.mark.parametrize(("count", "size"), [(0, 3), (1, 4), (7, 2), (8, 4), (9, 4)])
def test_pieces(count: int, size: int) -> None:
    bounds = even_bounds(count, size)
    pieces = [last - first for first, last in itertools.pairwise(bounds)]
    assert sum(pieces) == count and max(pieces) - min(pieces) <= 1
    piece = padded_piece(count, size)
    assert count <= piece * size < count + size


def test_layers_are_cut_by_their_outputs() -> None:
    assert how(nn.Linear(3, 4).double(), (1, 3)) == {"input": "input", "linear": "neurons"}
    assert how(nn.Conv2d(2, 4, 3).double(), (1, 2, 5, 5))["conv"] == "channels"
    assert how(nn.ConvTranspose2d(2, 4, 3).double(), (1, 2, 5, 5))["conv"] == "channels"


def test_what_mixes_neurons_of_several_ranks_is_replicated() -> None:
    assert how(nn.Conv2d(4, 4, 3, groups=2).double(), (1, 4, 5, 5))["conv"] == "replicated"
    assert how(nn.Linear(3, 4).double(), (2, 3))["linear"] == "replicated"
    assert how(lambda x: torch.cat([x, 2 * x], 1), (1, 3))["cat"] == "replicated"
    assert how(lambda x: x.permute(0, 2, 1), (1, 2, 3))["permute"] == "replicated"
    assert how(lambda x: x.mean(1, keepdim=True), (1, 4))["mean"] == "replicated"


def test_what_keeps_neurons_in_their_places_is_local() -> None:
    graph = zoo.graph("residual")
    plan = plan_layouts(graph, 2)
    assert {plan[node.name][0] for node in graph if node.op in ("relu", "add", "view")} == {"local"}


def test_operands_that_are_cut_differently_are_replicated() -> None:
    """A convolution is cut by whole channels, an input by neurons."""

    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1, dtype=torch.double)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x) + x

    assert how(Skip(), (1, 3, 3, 3))["add"] == "replicated"
    assert how(lambda x: x + torch.ones(2, 1, 4, dtype=torch.double), (1, 3, 4))["add"] == "replicated"


def test_pooling_stays_with_the_channels() -> None:
    conv = nn.Conv2d(1, 4, 3, dtype=torch.double)
    whole = how(lambda x: F.avg_pool2d(conv(x), 2), (1, 1, 6, 6))
    assert whole["avg_pool2d"] == "pooled"
    assert how(lambda x: F.avg_pool2d(x, 2), (1, 3, 4, 4))["avg_pool2d"] == "replicated"  # 24 neurons each
    assert how(lambda x: F.avg_pool2d(x, 2), (1, 4, 4, 4))["avg_pool2d"] == "pooled"
