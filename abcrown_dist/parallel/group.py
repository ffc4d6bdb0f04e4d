"""A group of ranks and the collectives that the verifier needs, the right primitives by backend.

NCCL has fused collectives. On gloo (torch 2.14, two ranks, 128 MB) asynchronous broadcasts into
slices of one buffer are three times faster than `all_gather_into_tensor` and hide no second copy,
and reduces into slices beat `reduce_scatter_tensor` likewise; uneven pieces work with them, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from abcrown_dist.util.errors import VerifierError, describe, exit_code, is_out_of_memory

T = TypeVar("T")
_HOST = torch.device("cpu")  # small messages stay there, whatever the bounds are computed on


class RankLost(VerifierError):
    """Another rank died, or did not join a collective in time: no rank can go on. Exit code 4."""


class FirstRankFailed(VerifierError):
    """Rank 0 stopped with an error, which it reports itself; the others end with its exit code."""

    def __init__(self, code: int, text: str = "rank 0 stopped with an error") -> None:
        super().__init__(text)
        self.exit_code = code


@dataclass
class Traffic:
    """What a rank spent on collectives: seconds that it waited, bytes that it received."""

    seconds: float = 0.0
    bytes: int = 0

    def reset(self) -> None:
        """Start counting anew."""
        self.seconds, self.bytes = 0.0, 0


class Pending:
    """A collective under way. `wait` ends it; the memory it fills must not be touched before."""

    def __init__(self, works: Sequence[Any], group: Group) -> None:
        self._works, self._group = works, group

    def wait(self) -> None:
        """Block until the result is there (on CUDA: until the stream may use it).

        Raises:
            RankLost: another rank did not join in.
        """
        with self._group.timed():
            for work in self._works:
                work.wait()
        self._works = ()


@dataclass(frozen=True)
class Group:
    """Ranks that act together, seen from one of them. Every method but `together` and
    `timed` is for all to call.

    Attributes:
        rank, size: this rank's place, and how many there are.
        handle: torch's process group, None for a group of one.
        timeout: seconds that a collective waits for the other ranks.
        fused: whether tensors travel by NCCL, which has fused collectives.
        traffic: what collectives have cost so far; groups of the same ranks may share it.
    """

    rank: int = 0
    size: int = 1
    handle: Any = None
    timeout: float = 600.0
    fused: bool = False
    traffic: Traffic = field(default_factory=Traffic, compare=False)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context for what all ranks do together: the backend's errors become `RankLost`."""
        try:
            yield
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise RankLost(
                f"rank {self.rank}: another rank died or fell behind "
                f"(parallel.timeout {self.timeout:g} s): {describe(error)}"
            ) from error

    def warm_up(self, device: torch.device) -> None:
        """Form NCCL's communicator: the first messages between some ranks alone would wait for the others."""
        if self.fused and self.size > 1:
            self.total(torch.zeros(1, device=device))

    @contextmanager
    def timed(self) -> Iterator[None]:
        """`together`, its time counted as waiting."""
        begun = time.perf_counter()
        with self.together():
            yield
        self.traffic.seconds += time.perf_counter() - begun

    def gather(self, own: Tensor, buffer: Tensor, bounds: Sequence[int]) -> Pending:
        """Fill the flat `buffer` with every rank's piece, rank r's at bounds[r]:bounds[r + 1]."""
        buffer[bounds[self.rank] : bounds[self.rank + 1]].copy_(own)
        if self.size == 1:
            return Pending((), self)
        self.traffic.bytes += (buffer.numel() - own.numel()) * buffer.element_size()
        pieces = [buffer[bounds[r] : bounds[r + 1]] for r in range(self.size)]
        if self.fused and len({piece.numel() for piece in pieces}) == 1:
            source = pieces[self.rank].clone()
            with self.together():
                work = dist.all_gather_into_tensor(buffer, source, self.handle, async_op=True)
            return Pending([work], self)
        with self.together():
            works = [
                dist.broadcast(piece, self._global(r), group=self.handle, async_op=True)
                for r, piece in enumerate(pieces)
                if piece.numel()
            ]
        return Pending(works, self)

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Tensor:
        """Sum over ranks of parts[r], for this rank's own r. `parts` is used up."""
        if self.size == 1:
            return parts[0]
        own = parts[self.rank]
        self.traffic.bytes += own.numel() * own.element_size() * (self.size - 1)
        if self.fused and len({part.shape for part in parts}) == 1:
            result = torch.empty_like(own)
            with self.together():
                work = dist.reduce_scatter(result, list(parts), group=self.handle, async_op=True)
            Pending([work], self).wait()
            return result
        with self.together():
            works = [
                dist.reduce(part, self._global(r), group=self.handle, async_op=True)
                for r, part in enumerate(parts)
                if part.numel()
            ]
        Pending(works, self).wait()
        return own

    def total(self, value: Tensor) -> Tensor:
        """Sum over ranks; the same bits on all of them. `value` is used up."""
        if self.size == 1:
            return value
        result = value.contiguous()
        self.traffic.bytes += result.numel() * result.element_size()
        with self.together():
            work = dist.all_reduce(result, group=self.handle, async_op=True)
        Pending([work], self).wait()
        return result

    def all_true(self, flag: bool) -> bool:
        """Whether `flag` holds on every rank."""
        return self._vote(flag, dist.ReduceOp.MIN)

    def any_true(self, flag: bool) -> bool:
        """Whether `flag` holds on some rank."""
        return self._vote(flag, dist.ReduceOp.MAX)

    def share(self, value: T | None, source: int = 0) -> T:
        """The value that rank `source` has: any picklable object."""
        if self.size == 1:
            assert value is not None
            return value
        box = [value]
        with self.timed():
            dist.broadcast_object_list(box, self._global(source), group=self.handle, device=_HOST)
        return box[0]  # type: ignore[return-value]

    def share_all(self, value: T) -> list[T]:
        """The small picklable object of every rank, in the order of ranks."""
        if self.size == 1:
            return [value]
        box: list[Any] = [None] * self.size
        with self.timed():
            dist.all_gather_object(box, value, group=self.handle)
        return box

    def gather_all(self, own: Tensor) -> Tensor:
        """(size, *shape): the small tensors of all ranks, equal in shape; on the host."""
        if self.size == 1:
            return own[None]
        found = [torch.empty_like(own) for _ in range(self.size)]
        self.traffic.bytes += own.numel() * own.element_size() * (self.size - 1)
        with self.timed():
            dist.all_gather(found, own.contiguous(), group=self.handle)
        return torch.stack(found)

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> None:
        """Send tensors to ranks and fill others with what ranks send; empty ones do not travel.

        Between two ranks tensors arrive in the order in which they were sent.
        """
        pairs: list[tuple[Any, int, Tensor]] = [(dist.isend, rank, part) for rank, part in sends]
        pairs += [(dist.irecv, rank, part) for rank, part in receives]
        operations = [
            dist.P2POp(way, part, self._global(rank), self.handle)
            for way, rank, part in pairs
            if part.numel()
        ]
        self.traffic.bytes += sum(part.numel() * part.element_size() for _, part in receives)
        if not operations:
            return
        with self.together():
            works = dist.batch_isend_irecv(operations)
        Pending(works, self).wait()

    def first(self, make: Callable[[], T]) -> T:
        """`make()` on rank 0, its result (picklable) on every rank.

        Raises:
            FirstRankFailed: on the other ranks, where rank 0 raises what `make` did.
        """
        if self.size == 1:
            return make()
        if self.rank > 0:
            answer: tuple[int | None, str, Any] = self.share(None)
            code, text, value = answer
            if code is not None:
                raise FirstRankFailed(code, text)
            return value
        try:
            value = make()
        except Exception as error:
            self.share((exit_code(error), describe(error), None))
            raise
        self.share((None, "", value))
        return value

    def send_from_first(self, value: Tensor | None, like: Tensor) -> Tensor:
        """Rank 0's tensor on every rank, written into `like`."""
        if value is not None:
            like.copy_(value)
        if self.size > 1:
            with self.together():
                dist.broadcast(like, self._global(0), group=self.handle)
        return like

    def scatter_from_first(self, pieces: Sequence[Tensor] | None, own: Tensor) -> Tensor:
        """Rank r receives rank 0's pieces[r] in `own`; all have the same size."""
        if self.size == 1:
            assert pieces is not None
            return own.copy_(pieces[0])
        listed = None if pieces is None else [piece.contiguous() for piece in pieces]
        with self.together():
            dist.scatter(own, listed, self._global(0), group=self.handle)
        return own

    def deal(self, pieces: Sequence[Tensor] | None, own: Tensor) -> Tensor:
        """Rank r receives rank 0's pieces[r] in `own`, whose shapes may differ."""
        if self.rank == 0:
            assert pieces is not None
            with self.together():
                for rank in range(1, self.size):
                    if pieces[rank].numel():
                        dist.send(pieces[rank], self._global(rank), group=self.handle)
            return own.copy_(pieces[0])
        if own.numel():
            with self.together():
                dist.recv(own, self._global(0), group=self.handle)
        return own

    def _vote(self, flag: bool, operation: Any) -> bool:
        if self.size == 1:
            return flag
        vote = torch.tensor([int(flag)])
        with self.together():
            work = dist.all_reduce(vote, operation, group=self.handle, async_op=True)
        Pending([work], self).wait()
        return bool(vote.item())

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.handle, rank)


ALONE = Group()


def even_bounds(count: int, size: int) -> list[int]:
    """Cut `count` items into `size` contiguous ranges that differ by at most one; size + 1 ends."""
    return [count * r // size for r in range(size + 1)]


def padded_piece(count: int, size: int) -> int:
    """Elements of every rank's piece of a flat buffer of `count`, padding at the tail only."""
    return -(-count // size)
