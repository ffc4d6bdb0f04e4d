"""What a piece of work needs in memory: live tensor bytes, counted exactly, and the process's peak."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from abcrown_dist.util.resident import peak_rss_bytes


class MemoryMeter:
    """Context manager that measures the tensor memory of what runs inside it.

    On the CPU every new storage is counted when an ATen call returns it and taken off when it is
    freed: exact, deterministic, the same on every machine. Views share their storage and in-place
    calls allocate nothing. Not seen are buffers that one ATen call allocates and frees by itself (a
    convolution's workspace) and memory that is not a tensor's. `torch.func` transforms are unwrapped
    before the meter sees their calls.

    On CUDA the numbers are the caching allocator's, for everything on the device.

    Args:
        device: where to measure.
        already: CPU tensors that exist before and are to count until they are freed; others that
            exist before never count.

    Attributes:
        baseline: bytes at entry (on the CPU, those of `already`).
        live_bytes: bytes at present; after the exit, those at the exit.
        peak_bytes: most bytes at any time since the entry, those of `already` included.
    """

    def __init__(self, device: torch.device | str = "cpu", already: Iterable[Tensor] = ()) -> None:
        self.device = torch.device(device)
        self._source: _Storages | _Allocator
        self._source = _Allocator(self.device) if self.device.type == "cuda" else _Storages(already)
        self.baseline = self._source.live

    @property
    def live_bytes(self) -> int:
        return self._source.live

    @property
    def peak_bytes(self) -> int:
        return self._source.peak

    @property
    def peak_rss_bytes(self) -> int:
        """Largest resident set of the whole process since it began, in bytes."""
        return peak_rss_bytes()

    def __enter__(self) -> MemoryMeter:
        self._source.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._source.stop()


class _Storages:
    """Counts storages on the CPU by watching every ATen call."""

    def __init__(self, already: Iterable[Tensor]) -> None:
        self.live = self.peak = 0
        self._known: dict[int, tuple[int, weakref.finalize[Any, Any]]] = {}
        self._watch = _Watch(self)
        for tensor in already:
            self.count(tensor)

    def start(self) -> None:
        self._watch.__enter__()

    def stop(self) -> None:
        self._watch.__exit__(None, None, None)
        for _, finalizer in self._known.values():
            finalizer.detach()
        self._known.clear()

    def knows(self, tensor: Tensor) -> bool:
        return _address(tensor) in self._known

    def count(self, tensor: Tensor) -> None:
        """Enter the storage of `tensor`, or its new size when it was resized."""
        storage, key = tensor.untyped_storage(), _address(tensor)
        size = storage.nbytes()
        old, finalizer = self._known.get(key, (0, None))
        # The Python object of a storage lives exactly as long as the storage itself.
        self._known[key] = size, finalizer or weakref.finalize(storage, self._forget, key)
        self.live += size - old
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        size, _ = self._known.pop(key)
        self.live -= size


class _Watch(TorchDispatchMode):
    """Shows the results of every ATen call to a `_Storages`."""

    def __init__(self, storages: _Storages) -> None:
        super().__init__()
        self._storages = storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        fresh = func is torch.ops.aten.lift_fresh.default  # `torch.tensor` allocates unseen before it
        foreign = (
            set() if fresh else {_address(x) for x in _tensors((args, kwargs)) if not self._storages.knows(x)}
        )
        for tensor in _tensors(result):
            if _address(tensor) not in foreign:
                self._storages.count(tensor)
        return result


class _Allocator:
    """The figures of CUDA's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._final: tuple[int, int] | None = None

    def start(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def stop(self) -> None:
        self._final = self.live, self.peak

    @property
    def live(self) -> int:
        return self._final[0] if self._final else torch.cuda.memory_allocated(self._device)

    @property
    def peak(self) -> int:
        return self._final[1] if self._final else torch.cuda.max_memory_allocated(self._device)


def _tensors(tree: Any) -> list[Tensor]:
    """Strided CPU tensors in nested containers: those with a storage of their own."""
    return [
        item for item in tree_leaves(tree)
        if isinstance(item, Tensor) and item.layout is torch.strided and item.device.type == "cpu"
    ]  # fmt: skip


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
