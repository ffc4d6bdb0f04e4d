"""From torchrun's environment to a group of ranks, and back.

Only rank 0 reads files, configuration included, but which backend to use stands in the
configuration. So rank 0 hands it to the others through torchrun's store, before any process group
exists.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from abcrown_dist.config import Config
from abcrown_dist.config.resolve import resolve_device
from abcrown_dist.parallel.group import ALONE, FirstRankFailed, Group, RankLost
from abcrown_dist.parallel.mesh import degrees
from abcrown_dist.util.errors import ConfigError, describe, exit_code

T = TypeVar("T")
_KEY = "abcrown_dist/configuration"
_WAIT = timedelta(minutes=5)  # for rank 0 to read the configuration
_FAREWELL = timedelta(seconds=30)  # for the others to hear that rank 0 could not


@dataclass(frozen=True)
class World:
    """The processes that torchrun started, seen from one of them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    restarts: int = 0  # how often torchrun has started all ranks again

    @classmethod
    def from_environment(cls) -> World:
        """As torchrun's variables say; one process without them.

        Raises:
            ConfigError: the variables contradict each other.
        """
        try:
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")
            rank, size, local, restarts = (
                int(os.environ.get(name, "1" if name == "WORLD_SIZE" else "0")) for name in names
            )
        except ValueError as error:
            raise ConfigError(f"RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers ({error})") from None
        if not 0 <= rank < size:
            raise ConfigError(f"RANK {rank} does not fit WORLD_SIZE {size}")
        return cls(rank, size, local, restarts)


@contextmanager
def _meeting(world: World) -> Iterator[None]:
    """Context for what ranks do before there is a group."""
    try:
        yield
    except RuntimeError as error:  # all errors of torch's stores
        raise RankLost(f"rank {world.rank}: the ranks did not find each other: {describe(error)}") from error


def open_store(world: World) -> Any:
    """The store through which the ranks find each other (torchrun's environment).

    Raises:
        RankLost: nobody answers there.
    """
    with _meeting(world):
        try:
            store, _, _ = next(dist.rendezvous("env://", world.rank, world.size, timeout=_WAIT))
        except ValueError as error:  # MASTER_ADDR or MASTER_PORT is missing
            raise ConfigError(f"WORLD_SIZE is {world.size}, but {describe(error)}") from None
        # The store may outlive ranks that torchrun starts again; what they wrote must not be read.
        return dist.PrefixStore(f"attempt {world.restarts}", store)


def from_first_rank(world: World, store: Any, make: Callable[[], T]) -> T:
    """`make()` on rank 0, its result on every rank.

    Raises:
        FirstRankFailed: on the other ranks, when rank 0 could not make it.
        RankLost: rank 0 sends nothing.
    """
    if world.rank > 0:
        with _meeting(world):
            store.wait([_KEY], _WAIT)
            code, value = pickle.loads(store.get(_KEY))
            store.set(f"{_KEY}/{world.rank}", "read")
        if code is not None:
            raise FirstRankFailed(code)
        return value
    try:
        value = make()
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else exit_code(error)
        store.set(_KEY, pickle.dumps((code if isinstance(code, int) else 0, None)))
        _wait_until_read(world, store)
        raise
    store.set(_KEY, pickle.dumps((None, value)))
    return value


def _wait_until_read(world: World, store: Any) -> None:
    """Stay while others read, for a little while: without torchrun's agent the store ends with rank 0."""
    with suppress(RuntimeError):
        store.wait([f"{_KEY}/{rank}" for rank in range(1, world.size)], _FAREWELL)


def check_world(config: Config, world: World) -> None:
    """Check that `parallel` fits the ranks that there are.

    Raises:
        ConfigError: degrees that do not multiply to the number of ranks, a verifier for one process, or
            a backend that the device does not have.
    """
    parallel = config.parallel
    degrees(parallel, world.size)
    if parallel.shard_rows and parallel.mode not in ("fsdp", "auto"):
        raise ConfigError(f"parallel.shard_rows needs parallel.mode fsdp, not {parallel.mode}")
    if world.size > 1 and config.general.complete_verifier in ("mip", "bab-refine"):
        raise ConfigError(
            f"general.complete_verifier: {config.general.complete_verifier} runs in one process, not on "
            f"{world.size} ranks"
        )
    if parallel.backend == "nccl" and world.size > 1 and resolve_device(config.general.device).type != "cuda":
        raise ConfigError("parallel.backend: nccl needs general.device cuda")


def start_group(world: World, store: Any, device: torch.device, backend: str, timeout: float) -> Group:
    """Form the group of all ranks.

    Args:
        device: what bounds are computed on; CUDA takes NCCL unless `backend` says otherwise.
        timeout: seconds after which a collective that some rank does not join is an error.
    """
    if world.size == 1:
        return ALONE
    chosen = backend if backend != "auto" else "nccl" if device.type == "cuda" else "gloo"
    fused = chosen == "nccl"
    with _meeting(world):
        dist.init_process_group(
            # Small messages stay on the host: they need not wait for the device, nor it for them.
            "cpu:gloo,cuda:nccl" if fused else chosen,
            store=dist.PrefixStore("group", store), rank=world.rank, world_size=world.size,
            timeout=timedelta(seconds=timeout),
        )  # fmt: skip
    group = Group(world.rank, world.size, dist.group.WORLD, timeout, fused)
    group.warm_up(device)
    return group


def local_device(device: torch.device, world: World) -> torch.device:
    """One CUDA device per local rank; the CPU as it is."""
    if device.type != "cuda" or world.size == 1:
        return device
    chosen = torch.device("cuda", world.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(chosen)
    return chosen


def stop_group(group: Group) -> None:
    """Leave the group, in good order. After a failure, do not: it waits for collectives under way."""
    if group.size > 1 and dist.is_initialized():
        dist.destroy_process_group()
