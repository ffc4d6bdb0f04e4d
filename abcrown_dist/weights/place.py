"""Choice of where weights live."""

from __future__ import annotations

import torch

from abcrown_dist.graph.ir import Graph
from abcrown_dist.parallel.group import Group
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
) -> Weights:
    """Weights of `graph` as `parallel.mode` says.

    Args:
        graph: with its constants' values on the group's first rank.
        mode: `none`, `fsdp` or `tp`.
    """
    if mode == "fsdp":
        return ShardedWeights(graph, group, dtype, device, prefetch, shard_rows)
    if mode == "tp" and group.size > 1:
        return TensorParallelWeights(graph, group, dtype, device)
    return LocalWeights(graph, dtype, device)
