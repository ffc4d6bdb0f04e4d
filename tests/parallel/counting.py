"""What ranks of a pool count: whole weights alive, bytes at rest, what becomes of rank 0's model."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import abcrown_dist.problem as problem_module
from abcrown_dist.graph.ir import Graph, Node
from abcrown_dist.parallel.group import Group
from abcrown_dist.util.memory import MemoryMeter
from abcrown_dist.weights.base import Weights
from abcrown_dist.weights.fsdp import ShardedWeights
from abcrown_dist.weights.tensor_parallel import TensorParallelWeights
from tests import flow
from tests.parallel import networks
from tests.parallel.jobs import Case, Mode, bounds_of, values_and_gradients

# gloo's threads let go of a buffer a moment after its collective has ended: up to a time slice of a
# busy machine. What is alive is read once that has passed.
_PATIENCE = 5.0


def settled(read: Callable[[], int], limit: int) -> int:
    """What `read` says when it has come down to `limit`, or after some seconds."""
    end = time.monotonic() + _PATIENCE
    while read() > limit and time.monotonic() < end:
        gc.collect()
        time.sleep(0.002)
    return read()


@dataclass
class Census:
    """How many nodes' gathered weights are alive, and the most that ever were.

    Attributes:
        limit: as many as there should be.
    """

    limit: int
    alive: int = 0
    most: int = 0
    gathered: int = 0

    def before(self) -> None:
        """Called before a further node is gathered."""
        settled(lambda: self.alive, self.limit - 1)

    def enter(self, values: dict[str, torch.Tensor]) -> None:
        """Count a node until the last of its buffers is freed."""
        left = [len(values)]
        self.gathered += 1
        self.alive += 1
        self.most = max(self.most, self.alive)

        def freed() -> None:
            left[0] -= 1
            self.alive -= left[0] == 0

        for value in values.values():
            weakref.finalize(value.untyped_storage(), freed)


def whole_weights(group: Group, name: str, mode: Mode, work: str, limit: int) -> Census:
    """Count gathered weights while a network is bounded by a method, or attacked (`work` is `attack`)."""
    census = Census(limit)
    with pytest.MonkeyPatch.context() as patch:
        original = ShardedWeights._gather

        def gather(self: ShardedWeights, node: Node) -> Any:
            if not node.constants():
                return original(self, node)
            census.before()
            found = original(self, node)
            census.enter(found.values)
            return found

        patch.setattr(ShardedWeights, "_gather", gather)
        if work == "attack":
            values_and_gradients(group, name, mode, torch.randn(3, networks.graph(name).input_size))
        else:
            case = Case(work, 2, batch_rows=4, iterations=3)
            bounds_of(mode.place(name, group), case, mode.shard_rows)
        settled(lambda: census.alive, 0)
    return census


def weight_bytes(graph: Graph) -> int:
    """Bytes of all constants in float32."""
    return sum(value.numel() * 4 for value in graph.constants.values())


def bytes_at_rest(group: Group, name: str, mode: Mode, work: str, limit: int) -> tuple[int, int]:
    """Live bytes once weights are in their places, and once more after a bounding by `work`."""
    networks.graph(name)  # which lives on, and is not counted
    with MemoryMeter() as meter:
        weights = mode.place(name, group)
        at_rest = settled(lambda: meter.live_bytes, limit)
        bounds_of(weights, Case(work, 1, iterations=2), mode.shard_rows)
        return at_rest, settled(lambda: meter.live_bytes, at_rest)


def converted(group: Group, name: str, mode: Mode, dtype: torch.dtype, wider: torch.dtype) -> Any:
    """Bounds by weights that were turned into a wider type; None where that is refused."""
    weights = mode.place(name, group, dtype).to(wider)
    return None if weights is None else bounds_of(weights, Case("crown", 2, dtype=wider))


def whole_model_after_loading(group: Group, model: str, prop: str, mode: str) -> list[str]:
    """Constants of the loaded model that are still alive once weights are in their places."""
    alive: dict[str, weakref.ref[Any]] = {}
    original = problem_module.load_onnx

    def load_onnx(*arguments: Any) -> Any:
        found = original(*arguments)
        for key, value in found.graph.constants.items():
            if value.numel() > 1:
                alive[key] = weakref.ref(value.untyped_storage())
        return found

    config = flow.configure(Path(model), Path(prop), "--parallel.mode", mode)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(problem_module, "load_onnx", load_onnx)
        problem = problem_module.load(config, problem_module.Instance(Path(model), Path(prop), 60), group)
    gc.collect()
    assert problem.weights.group is group
    assert isinstance(problem.weights, (ShardedWeights, TensorParallelWeights))
    assert bool(alive) == (group.rank == 0)
    return [key for key, reference in alive.items() if reference() is not None]


def holds_no_values(weights: Weights) -> bool:
    """Whether the graph that weights keep has shapes only."""
    return all(value.is_meta for value in weights.graph.constants.values())


def graphs_without_values(group: Group, name: str, mode: Mode) -> bool:
    return holds_no_values(mode.place(name, group))


def measured(group: Group, name: str, mode: Mode, case: Case) -> tuple[Any, int, int]:
    """Bounds, bytes of weights at rest, and the most live bytes while they were bounded."""
    weights = mode.place(name, group, case.dtype)
    if isinstance(weights, ShardedWeights):
        standing = [shard.piece for shard in weights.shards.values()]
    elif isinstance(weights, TensorParallelWeights):
        standing = list(weights._parts.values())
        standing += [shard.piece for shard in weights._sharded.shards.values()]
    else:
        standing = [weights.constant(key) for key in weights.graph.constants]
    with MemoryMeter(already=standing) as meter:
        found = bounds_of(weights, case, mode.shard_rows)
        return found, meter.baseline, meter.peak_bytes
