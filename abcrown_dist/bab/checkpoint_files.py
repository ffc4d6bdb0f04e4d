"""Files that checkpoints are made of: tensors as raw bytes behind a JSON header. No pickle.

Layout of a part: `MAGIC`, the length of the header (8 bytes, little-endian), the header, then the tensors one
after the other, each in C order. Large tensors pass through in blocks, so that neither writing nor
reading holds a second copy of them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from torch import Tensor

from abcrown_dist.util.digest import hash_stream
from abcrown_dist.util.errors import LoadError

MAGIC = b"abcrown_dist part\n"
_LENGTH = 8
_BLOCK = 1 << 24  # bytes
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
    )
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Damaged(Exception):
    """A part that is not what a checkpoint holds; the message says in what, without the file's name."""


class _Hash(Protocol):
    """A digest under way, as hashlib makes them."""

    def update(self, data: Any, /) -> None: ...

    def hexdigest(self) -> str: ...


def hash_file(path: str | Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes.

    Raises:
        LoadError: it cannot be read, or is no regular file.
    """
    try:
        with open_regular(path) as stream:
            return hash_stream(stream)
    except (OSError, ValueError) as error:  # a name may hold what no name of a file does
        raise LoadError(f"cannot read '{path}': {os_reason(error)}") from None


def os_reason(error: BaseException) -> str:
    """What went wrong, without the name of the file if the system says it on its own."""
    return (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"


def open_regular(path: str | Path) -> BinaryIO:
    """A regular file, to be read; a pipe or a device might never end.

    Raises:
        OSError: it cannot be read, or is nothing of the kind.
    """
    if not os.path.isfile(path) and os.path.exists(path):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(path, "rb")


@contextmanager
def new_file(path: Path, temporary: Path) -> Iterator[BinaryIO]:
    """A file that takes the name `path`, in place of what may bear it, once its bytes are on the disk.

    Until then it bears the name `temporary`, which nothing else must bear.

    Raises:
        OSError: it cannot be written; nothing of it is left, nothing that was there has changed.
    """
    try:
        with open(temporary, "xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        discard(temporary)
        raise


def discard(path: Path) -> bool:
    """Remove a file if that can be done; whether it is gone."""
    try:
        os.unlink(path)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return True


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk, where the system can do that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_tensors(stream: BinaryIO, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write tensors, of any shape and on any device; bytes written and their hexadecimal SHA-256.

    Raises:
        TypeError: a tensor's dtype has no form here; nothing has been written.
        OSError: the file takes no more.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES or tensor.layout is not torch.strided:
            raise TypeError(f"{name}: checkpoints hold no tensors of {tensor.dtype} and {tensor.layout}")
    listed = [[name, _NAMES[tensor.dtype], list(tensor.shape)] for name, tensor in tensors.items()]
    header = json.dumps({"byteorder": sys.byteorder, "tensors": listed}).encode()
    digest, count = hashlib.sha256(), 0
    for block in _blocks(MAGIC + len(header).to_bytes(_LENGTH, "little") + header, tensors):
        digest.update(block)
        stream.write(block)
        count += len(block)
    return count, digest.hexdigest()


def read_tensors(stream: BinaryIO, sha256: str) -> dict[str, Tensor]:
    """Tensors that `write_tensors` wrote, on the host, each in memory of its own.

    Args:
        sha256: hexadecimal digest of the whole file.

    Raises:
        Damaged: the file is anything else.
        OSError: it cannot be read.
    """
    left = os.fstat(stream.fileno()).st_size
    digest = hashlib.sha256()
    start = stream.read(len(MAGIC) + _LENGTH)
    length = int.from_bytes(start[len(MAGIC) :], "little")
    left -= len(MAGIC) + _LENGTH + length
    if not start.startswith(MAGIC) or left < 0:
        raise Damaged("is no part of a checkpoint")
    text = stream.read(length)
    digest.update(start + text)
    try:
        entries = _entries(text)
        # Before any memory is asked for: a damaged shape could ask for all there is.
        if sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in entries) != left:
            raise Damaged("has other tensors than its header says")
        tensors = {name: torch.empty(shape, dtype=dtype) for name, dtype, shape in entries}
    except (KeyError, OverflowError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        raise Damaged(f"has a header that cannot be read ({type(error).__name__})") from error
    for tensor in tensors.values():
        _fill(tensor, stream, digest)
    if digest.hexdigest() != sha256:
        raise Damaged("is damaged")
    return tensors


def _entries(header: bytes) -> list[tuple[str, torch.dtype, list[int]]]:
    """Name, dtype and shape of every tensor."""
    found = json.loads(header)
    if found["byteorder"] != sys.byteorder:
        raise Damaged(f"was written on a {found['byteorder']}-endian machine")
    entries = [(name, _DTYPES[dtype], shape) for name, dtype, shape in found["tensors"]]
    if not all(type(name) is str for name, _, _ in entries):
        raise TypeError("names")
    return entries  # `torch.empty` judges the shapes


def _blocks(start: bytes, tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a part, piece by piece: what lies on a device or has gaps is copied a block at a time."""
    yield start
    for tensor in tensors.values():
        rows = tensor.view(-1) if tensor.is_contiguous() else tensor
        if not rows.numel():
            continue
        fitting = _BLOCK * rows.shape[0] // (rows.numel() * rows.element_size())
        for piece in rows.split(max(1, fitting)):
            yield _memory(piece.contiguous().cpu())


def _fill(tensor: Tensor, stream: BinaryIO, digest: _Hash) -> None:
    """Read a contiguous tensor's values into its memory."""
    memory = _memory(tensor)
    for begin in range(0, len(memory), _BLOCK):
        block = memory[begin : begin + _BLOCK]
        stream.readinto(block)  # type: ignore[attr-defined]
        digest.update(block)  # which tells whether it came whole


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, writable."""
    array: Any = tensor.resolve_neg().view(-1).view(torch.uint8).numpy()
    return memoryview(array)
