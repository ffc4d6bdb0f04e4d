"""Choice of where weights live."""

from __future__ import annotations

import dataclasses

import torch

from abcrown_dist.graph.ir import Graph
from abcrown_dist.parallel.group import Group
from abcrown_dist.util.numerics import REAL_ARITHMETIC, Rounding
from abcrown_dist.weights.base import Weights
from abcrown_dist.weights.fsdp import ShardedWeights
from abcrown_dist.weights.local import LocalWeights
from abcrown_dist.weights.tensor_parallel import TensorParallelWeights


def place_weights(
    graph: Graph,
    mode: str,
    group: Group,
    dtype: torch.dtype,
    device: torch.device,
    *,
    prefetch: bool,
    shard_rows: bool,
    rounding: Rounding = REAL_ARITHMETIC,
) -> Weights:
    """Weights of `graph` as `parallel.mode` says.

    Args:
        graph: with its constants' values on the group's first rank.
        mode: `none`, `fsdp` or `tp`.
        rounding: see `weights.base.Weights`; default for real arithmetic.
    """
    if mode == "fsdp":
        return ShardedWeights(graph, group, dtype, device, prefetch, shard_rows, rounding=rounding)
    if mode == "tp" and group.size > 1:
        return TensorParallelWeights(graph, group, dtype, device, rounding)
    return LocalWeights(graph, dtype, device, rounding)


def share_values(graph: Graph, group: Group) -> Graph:
    """The first rank's graph with its constants on every rank of `group`, which has none of its values yet.

    Memory layouts travel along: products may round otherwise in another one.
    """
    if group.size == 1:
        return graph
    strides = group.share({key: _layout(value) for key, value in graph.constants.items()})
    constants = {}
    for key, value in graph.constants.items():
        packed = value.contiguous() if group.rank == 0 else torch.empty(value.shape, dtype=value.dtype)
        group.send_from_first(None, packed.flatten().view(torch.uint8))
        stride = strides[key]
        constants[key] = packed
        if stride is not None:
            constants[key] = torch.empty_strided(value.shape, stride, dtype=value.dtype).copy_(packed)
    return dataclasses.replace(graph, constants=constants)


def _layout(value: torch.Tensor) -> tuple[int, ...] | None:
    """The strides that all ranks keep; None for the usual ones, and for values that repeat in memory."""
    repeats = any(step == 0 and count > 1 for step, count in zip(value.stride(), value.shape, strict=True))
    return None if repeats or value.is_contiguous() else value.stride()
