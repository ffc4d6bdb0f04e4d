"""Tensor-parallel weights: every map over own neurons against the whole map, and bytes at rest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from abcrown_dist.graph.aten import classify
from abcrown_dist.parallel.group import ALONE, Group
from abcrown_dist.weights.local import LocalWeights
from abcrown_dist.weights.place import place_weights
from tests.parallel import counting, networks
from tests.parallel.jobs import Mode
from tests.parallel.pool import Pool

Pools = Callable[[int], Pool]

# Every kind of layout; with four ranks some own no neuron of some node.
NAMES = ("depth_3", "one_neuron", "cnn", "residual", "decoder", "grouped_dilated", "pooled", "averaged",
         "sliced", "shared", "per_token", "two_inputs_two_outputs")  # fmt: skip


def gaps(group: Group, name: str) -> dict[str, float]:
    """By node and method, how far own parts put together are from the map of one process, in float64."""
    graph = networks.graph(name)
    weights = Mode("tp").place(name, group, torch.float64)
    local = LocalWeights(graph, torch.float64)
    random = torch.Generator().manual_seed(0)
    found: dict[str, float] = {}

    def draw(node_name: str) -> torch.Tensor:
        return torch.randn(9, *graph[node_name].shape, generator=random, dtype=torch.float64)

    for node in graph:
        if classify(node) != "affine":
            continue
        xs, A = [draw(x) for x in node.inputs], draw(node.name)
        own = [weights.own(x, value) for x, value in zip(node.inputs, xs, strict=True)]
        with weights.visit(node) as part, local.visit(node) as whole:
            for method in ("apply", "linear", "absolute", "roundings"):
                given = [(x > 0).double() for x in xs] if method == "roundings" else xs
                mine = [(x > 0).double() for x in own] if method == "roundings" else own
                result = weights.whole(node.name, getattr(part, method)(*mine))
                found[f"{node.name} {method}"] = _gap(result, getattr(whole, method)(*given))
            for x, back, expected in zip(
                node.inputs, part.transpose(weights.own(node.name, A)), whole.transpose(A), strict=True
            ):
                found[f"{node.name} transpose to {x}"] = _gap(weights.whole(x, back), expected)
            offset, own_offset = whole.offset(), part.offset()
            zero = torch.zeros(graph[node.name].shape, dtype=torch.float64)
            expected = weights.own(node.name, zero if offset is None else offset)
            missing = torch.zeros_like(expected) if own_offset is None else own_offset
            found[f"{node.name} offset"] = float((missing - expected).abs().sum())
    return found


def _gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-300))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_maps_over_own_neurons(pools: Pools, name: str, size: int) -> None:
    for found in pools(size).run(gaps, name):
        assert found
        assert max(found.values()) < 1e-13, max(found.items(), key=lambda item: item[1])


def selections(group: Group, name: str) -> bool:
    """`own`, `whole`, `locate`, `shape` and `total` agree on who owns what."""
    graph = networks.graph(name)
    weights = Mode("tp").place(name, group)
    for node in graph:
        values = torch.arange(2 * node.size, dtype=torch.float32).reshape(2, *node.shape)
        mine = weights.own(node.name, values)
        assert mine.shape == (2, *weights.shape(node.name))
        assert torch.equal(weights.whole(node.name, mine), values)
        mask = weights.own(node.name, values[0] % 2 == 0)
        assert torch.equal(weights.whole(node.name, mask), values[0] % 2 == 0)
        index = torch.tensor([node.size - 1, 0, node.size // 2, 0])
        which, place = weights.locate(node.name, index)
        assert torch.equal(mine[0][place], index[which].float())
        assert int(weights.total(torch.tensor([len(which)]))) == len(index)
    return counting.holds_no_values(weights)


@pytest.mark.parametrize("size", [2, 4])
def test_who_owns_what(pools: Pools, size: int) -> None:
    for name in ("one_neuron", "residual", "sliced"):
        assert all(pools(size).run(selections, name))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["depth_8", "cnn", "averaged"])
def test_at_rest_a_rank_holds_its_part_only(pools: Pools, name: str, size: int) -> None:
    """One part in P, up to one output row of every constant, and none of it anywhere twice."""
    graph = networks.graph(name)
    whole = counting.weight_bytes(graph)
    row = sum(4 * value.numel() // max(1, value.shape[0] if value.dim() else 1)
              for value in graph.constants.values())  # fmt: skip
    limit = whole // size + row
    results = pools(size).run(counting.bytes_at_rest, name, Mode("tp"), "alpha-crown", limit)
    for at_rest, after in results:
        assert at_rest <= limit
        assert after == at_rest
    assert whole <= sum(at_rest for at_rest, _ in results) <= whole + 4 * size * len(graph.constants)


def test_one_rank_has_nobody_to_share_with() -> None:
    weights = place_weights(
        networks.graph("cnn"),
        "tp",
        ALONE,
        torch.float32,
        torch.device("cpu"),
        prefetch=True,
        shard_rows=False,
    )
    assert isinstance(weights, LocalWeights)
