"""From torchrun's environment to a group of ranks, and back.

Only rank 0 reads files, configuration included, but which backend to use stands in the
configuration. So rank 0 hands it to the others through torchrun's store, before any process group
exists.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from abcrown_dist.parallel.group import ALONE, Group
from abcrown_dist.util.errors import ConfigError, VerifierError, exit_code

T = TypeVar("T")
_KEY = "abcrown_dist/configuration"
_WAIT = timedelta(minutes=5)  # for rank 0 to read the configuration


@dataclass(frozen=True)
class World:
    """The processes that torchrun started, seen from one of them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> World:
        """As torchrun's variables say; one process without them.

        Raises:
            ConfigError: the variables contradict each other.
        """
        try:
            rank, size, local = (
                int(os.environ.get(name, default))
                for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
            )
        except ValueError as error:
            raise ConfigError(f"RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers ({error})") from None
        if not 0 <= rank < size:
            raise ConfigError(f"RANK {rank} does not fit WORLD_SIZE {size}")
        return cls(rank, size, local)


class FirstRankFailed(VerifierError):
    """Rank 0 stopped with an error, which it has reported; the others end with its exit code."""

    def __init__(self, code: int) -> None:
        super().__init__("rank 0 stopped with an error")
        self.exit_code = code


def open_store(world: World) -> Any:
    """The store through which the ranks find each other (torchrun's environment)."""
    store, _, _ = next(dist.rendezvous("env://", world.rank, world.size, timeout=_WAIT))
    return store


def from_first_rank(world: World, store: Any, make: Callable[[], T]) -> T:
    """`make()` on rank 0, its result on every rank.

    Raises:
        FirstRankFailed: on the other ranks, when rank 0 could not make it.
    """
    if world.rank > 0:
        store.wait([_KEY], _WAIT)
        failed, value = pickle.loads(store.get(_KEY))
        if failed is not None:
            raise FirstRankFailed(failed)
        return value
    try:
        value = make()
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else exit_code(error)
        store.set(_KEY, pickle.dumps((code if isinstance(code, int) else 0, None)))
        raise
    store.set(_KEY, pickle.dumps((None, value)))
    return value


def start_group(world: World, store: Any, device: torch.device, backend: str, timeout: float) -> Group:
    """Form the group of all ranks.

    Args:
        device: what bounds are computed on; CUDA takes NCCL unless `backend` says otherwise.
        timeout: seconds after which a collective that some rank does not join is an error.
    """
    if world.size == 1:
        return ALONE
    chosen = backend if backend != "auto" else "nccl" if device.type == "cuda" else "gloo"
    if chosen == "nccl" and device.type != "cuda":
        raise ConfigError("parallel.backend: nccl needs general.device cuda")
    dist.init_process_group(
        chosen, store=dist.PrefixStore("group", store), rank=world.rank, world_size=world.size,
        timeout=timedelta(seconds=timeout),
    )  # fmt: skip
    return Group(world.rank, world.size, dist.group.WORLD)


def local_device(device: torch.device, world: World) -> torch.device:
    """One CUDA device per local rank; the CPU as it is."""
    if device.type != "cuda" or world.size == 1:
        return device
    chosen = torch.device("cuda", world.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(chosen)
    return chosen


def stop_group(group: Group) -> None:
    """Leave the group."""
    if group.size > 1 and dist.is_initialized():
        dist.destroy_process_group()
