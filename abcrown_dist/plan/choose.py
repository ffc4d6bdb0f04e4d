"""The plan for a configured instance, and the mode that `parallel.mode: auto` stands for."""

from __future__ import annotations

import dataclasses
import logging
import os

import torch

from abcrown_dist.config import Config
from abcrown_dist.graph.ir import Graph
from abcrown_dist.plan.capacity import capacity
from abcrown_dist.plan.predict import CHOICES, Option, Plan, predict, work_of
from abcrown_dist.plan.text import size_text
from abcrown_dist.spec.property import Property

_log = logging.getLogger(__name__)


def make_plan(
    config: Config,
    graph: Graph,
    prop: Property,
    size: int,
    device: torch.device,
    *,
    device_memory: int | None = None,
    can_bound: bool = True,
) -> Plan:
    """Every mode for `size` ranks of one machine.

    Args:
        graph: with its constants' values.
        device: what each rank would compute on.
        device_memory: bytes of one device; None for what this machine has.
        can_bound: whether every op has a relaxation.
    """
    work = work_of(config, graph, prop, can_bound=can_bound, on_cpu=device.type == "cpu")
    room = capacity(device, size, device_memory)
    choices = CHOICES if size > 1 else CHOICES[:1]
    return predict(graph, work, size, config.parallel.prefetch, room, choices)


def choose(
    config: Config, graph: Graph, prop: Property, size: int, device: torch.device, *, can_bound: bool = True
) -> Config:
    """`config` with its `parallel.mode: auto` settled for `size` ranks; any other mode stays.

    Arguments as of `make_plan`; ranks that already wait for work are never sent away, so that a
    single process is no choice for several.
    """
    parallel = config.parallel
    if parallel.mode != "auto" or size == 1:
        return config
    work = work_of(config, graph, prop, can_bound=can_bound, on_cpu=device.type == "cpu")
    room = capacity(device, int(os.environ.get("LOCAL_WORLD_SIZE") or size))
    choices = [c for c in CHOICES if c.mode != "none" and (c.shard_rows or not parallel.shard_rows)]
    plan = predict(graph, work, size, parallel.prefetch, room, choices)
    found = plan.recommended()
    if found is None:
        found = min(plan.options, key=lambda option: option.needs.peak)
        _log.warning("parallel.mode: auto takes %s", _shortage(found, room.each))
    else:
        _log.info(
            "parallel.mode: auto takes %s (%s of %s on each of %d ranks): %s",
            found.choice, size_text(found.needs.peak), size_text(room.each), size, found.choice.why,
        )  # fmt: skip
    chosen = dataclasses.replace(parallel, mode=found.choice.mode, shard_rows=found.choice.shard_rows)
    return dataclasses.replace(config, parallel=chosen)


def _shortage(option: Option, each: int) -> str:
    return (
        f"{option.choice}, which needs least, though in the worst case {size_text(option.needs.peak)} do not "
        f"fit into {size_text(each)} on each rank; solver.crown.batch_size limits them"
    )
