"""Where weights live, and the first rank's constants on every rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from abcrown_dist.graph.ir import Graph
from abcrown_dist.parallel.group import ALONE, Group
from abcrown_dist.weights.fsdp import ShardedWeights, without_values
from abcrown_dist.weights.local import LocalWeights
from abcrown_dist.weights.place import place_weights, share_values
from abcrown_dist.weights.tensor_parallel import TensorParallelWeights
from tests.parallel import networks
from tests.parallel.pool import Pool

Pools = Callable[[int], Pool]


def constants() -> dict[str, Tensor]:
    """Of every kind: what an ONNX file may hold, and views of it."""
    random = torch.Generator().manual_seed(3)
    wide = torch.randn(6, 4, 5, generator=random)
    image = torch.randn(2, 3, 4, 5, generator=random)
    special = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])
    return {
        "float32": wide,
        "special": special,
        "float16": wide[0].half(),
        "float64": torch.randn(7, generator=random, dtype=torch.float64),
        "bfloat16": wide[1].bfloat16(),
        "bool": wide[2] > 0,
        "int64": torch.randint(-(2**62), 2**62, (3, 5), generator=random),
        "uint8": torch.randint(256, (9,), generator=random, dtype=torch.uint8),
        "transposed": wide[3].T,
        "permuted": wide.permute(2, 0, 1),
        "channels last": image.contiguous(memory_format=torch.channels_last),
        "every other": wide[::2, :, 1::3],
        "expanded": wide[4, 0].expand(3, 5),
        "expanded once": wide[4, 0].expand(1, 5),
        "0-dim": torch.tensor(2.5),
        "0-dim int": torch.tensor(-7),
        "empty": torch.empty(0),
        "empty of three axes": torch.empty(2, 0, 3, dtype=torch.int64),
    }


def graph_of_all() -> Graph:
    return dataclasses.replace(networks.graph("depth_2"), constants=constants())


def shared(group: Group) -> dict[str, tuple[torch.dtype, tuple[int, ...], tuple[int, ...], Tensor]]:
    """By constant: type, shape, strides and bits, as numpy-free bytes."""
    graph = graph_of_all()
    found = share_values(graph if group.rank == 0 else without_values(graph), group)
    return {key: described(value) for key, value in found.constants.items()}


def described(value: Tensor) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], Tensor]:
    return value.dtype, tuple(value.shape), value.stride(), value.contiguous().flatten().view(torch.uint8)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_bits_and_layouts_of_all_constants_arrive(pools: Pools, size: int) -> None:
    for found in pools(size).run(shared):
        assert list(found) == list(constants())
        for key, value in constants().items():
            dtype, shape, stride, bits = found[key]
            expected = described(value)
            assert (dtype, shape) == expected[:2], key
            assert torch.equal(bits, expected[3]), key
            if key in ("transposed", "permuted", "channels last"):
                assert stride == value.stride(), key


def strided_alike(group: Group) -> bool:
    """Every rank has the same strides as the first."""
    mine = {key: stride for key, (_, _, stride, _) in shared(group).items()}
    return mine == group.share(mine)


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_have_the_same_layouts(pools: Pools, size: int) -> None:
    assert all(pools(size).run(strided_alike))


def placed(group: Group, mode: str) -> tuple[type, int]:
    graph = networks.graph("depth_3")
    weights = place_weights(
        graph if group.rank == 0 or mode == "none" else without_values(graph), mode, group, torch.float32,
        torch.device("cpu"), prefetch=False, shard_rows=False,
    )  # fmt: skip
    return type(weights), weights.group.size


@pytest.mark.parametrize(
    ("mode", "kind"), [("none", LocalWeights), ("fsdp", ShardedWeights), ("tp", TensorParallelWeights)]
)
def test_the_mode_says_where_weights_live(pools: Pools, mode: str, kind: type) -> None:
    assert pools(2).run(placed, mode) == [(kind, 1 if mode == "none" else 2)] * 2
    assert placed(ALONE, mode) == (LocalWeights if mode == "tp" else kind, 1)
