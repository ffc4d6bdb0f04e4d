"""Checkpoints: one file of tensors for every rank, and a manifest that makes them a whole.

The manifest is written last and lists the parts of one save, one generation, with their digests. A crash at
any moment leaves the old manifest and all that it lists, or the new one: parts have names that are
never used twice, and those of older generations go only once the new manifest is in place.

What the tensors and notes mean is for the caller to say. Digests find damage, not forgery; but
nothing in these files is code, and a manifest names no file outside its folder.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from abcrown_dist import __version__
from abcrown_dist.bab.checkpoint_files import (
    Damaged,
    discard,
    hash_file,
    new_file,
    open_regular,
    os_reason,
    read_tensors,
    sync_folder,
    write_tensors,
)
from abcrown_dist.parallel.group import Group
from abcrown_dist.util.digest import hash_stream
from abcrown_dist.util.errors import ConfigError, LoadError

__all__ = ["FORMAT", "Checkpoint", "Part", "Saved", "hash_file", "read"]

FORMAT = 1
"""Version of manifests and parts; a checkpoint of another one is not read."""

_MARK = "abcrown_dist checkpoint"  # key of the format's version, the first one in every manifest
_NUMBER = "(?:0|[1-9][0-9]{0,17})"
_OWN = rf"\.(?P<generation>{_NUMBER})\.(?:{_NUMBER}of{_NUMBER}\.part(?:\.tmp)?|manifest\.tmp)"
_START = f'{{"{_MARK}": '.encode()  # the first bytes of every manifest
T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """A rank's file, as the manifest lists it: name within its folder, size in bytes, hexadecimal SHA-256."""

    name: str
    bytes: int
    sha256: str


class Checkpoint:
    """The checkpoint that the ranks of `group` write to `path`, over and over.

    The folder must be there, and one and the same for all ranks.

    Args:
        path: of the manifest; the parts lie beside it.
        group: the ranks that have a part each.

    Raises:
        ConfigError: `path` cannot be the name of a checkpoint, or bears something else that would be lost.
    """

    def __init__(self, path: Path, group: Group) -> None:
        self._group = group
        self._last = -1  # generation, known to rank 0
        try:
            self.path = Path(os.path.realpath(path))
            if not _may_be_replaced(self.path):
                raise ConfigError(f"'{path}' is no checkpoint: it is not overwritten")
        except (OSError, ValueError) as error:
            raise ConfigError(f"'{path}' cannot be a checkpoint: {os_reason(error)}") from None
        if re.search(_OWN + "$", self.path.name):
            raise ConfigError(f"'{path}' is how the parts of a checkpoint are called: choose another name")

    def save(self, tensors: Mapping[str, Tensor], notes: Mapping[str, Any]) -> bool:
        """Replace the checkpoint; whether that worked. For all ranks to call; all get the same answer.

        If it did not work, the previous checkpoint stands, and rank 0 logs a warning.

        Args:
            tensors: of this rank, of any shape, on any device; of torch's real dtypes.
            notes: what JSON has a form for; rank 0's are kept.

        Raises:
            RankLost: another rank did not join in.
        """
        generation = self._group.share(self._next_generation() if self._group.rank == 0 else None)
        own = self._name(generation, f"{self._group.rank}of{self._group.size}.part")
        told = self._group.share_all(_attempt(lambda: _write_part(own, tensors)))
        parts = [part for part in told if isinstance(part, Part)]
        if len(parts) == len(told):
            failure = self._group.share(
                self._commit(generation, parts, notes) if self._group.rank == 0 else None
            )
        else:
            failure = next(f"rank {rank}: {text}" for rank, text in enumerate(told) if isinstance(text, str))
        if not failure:
            return True
        discard(own)
        if self._group.rank == 0:
            stands = "the previous one stands" if self.path.exists() else "there is none yet"
            _log.warning("%s: no checkpoint was saved (%s); %s", self.path, failure, stands)
        return False

    def remove(self) -> None:
        """Remove the checkpoint, and what saves that failed have left of it. For one rank to call."""
        if discard(self.path):  # else it had better stay whole
            for file, _ in self._own_files():
                discard(file)
        else:
            _log.warning("%s: the checkpoint cannot be removed", self.path)

    def _commit(self, generation: int, parts: list[Part], notes: Mapping[str, Any]) -> str:
        """Make `parts` the checkpoint and drop all older ones; what went wrong, or nothing."""
        failure = _attempt(lambda: self._write_manifest(generation, parts, notes))
        # Network file systems may report the failure of a step that they have taken.
        if failure and _generation(self.path) != generation:
            return failure
        sync_folder(self.path.parent)
        for file, older in self._own_files():
            if older < generation:
                discard(file)
        return ""

    def _write_manifest(self, generation: int, parts: list[Part], notes: Mapping[str, Any]) -> str:
        for rank, part in enumerate(parts):
            if _size(self.path.with_name(part.name)) != part.bytes:
                raise OSError(
                    errno.ENOENT, f"rank 0 sees no part of rank {rank} in {self.path.parent}: is it shared?"
                )
        text = _manifest(generation, parts, notes)
        sync_folder(self.path.parent)  # the names of the parts, before anything relies on them
        with new_file(self.path, self._name(generation, "manifest.tmp")) as stream:
            stream.write(text.encode())
        return ""

    def _next_generation(self) -> int:
        """One that no file bears, whatever earlier processes left behind."""
        known = [self._last, _generation(self.path), *(number for _, number in self._own_files())]
        self._last = max(known) + 1
        return self._last

    def _own_files(self) -> Iterator[tuple[Path, int]]:
        """This checkpoint's parts and temporary files, each with its generation."""
        try:
            names = os.listdir(self.path.parent)
        except OSError:
            return
        for name in names:
            if found := re.fullmatch(re.escape(self.path.name) + _OWN, name):
                yield self.path.with_name(name), int(found["generation"])

    def _name(self, generation: int, ending: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{generation}.{ending}")


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was found whole.

    Attributes:
        path: of the manifest.
        program: version of the program that wrote it.
        generation: number of the save.
        notes: what the writer put beside the tensors, as JSON values.
        parts: the files of ranks 0, 1, ...
    """

    path: Path
    program: str
    generation: int
    notes: Mapping[str, Any]
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Number of ranks that wrote it."""
        return len(self.parts)

    def part(self, rank: int) -> dict[str, Tensor]:
        """The tensors of a rank, on the host, read now and compared with their digest once more.

        Raises:
            LoadError: the file is not what it was when the checkpoint was read.
        """
        listed = self.parts[rank]
        try:
            with open_regular(self.path.with_name(listed.name)) as stream:
                return read_tensors(stream, listed.sha256)
        except Damaged as error:
            raise self.spoilt(rank, str(error)) from None
        except OSError as error:
            raise self.spoilt(rank, f"cannot be read: {os_reason(error)}") from None

    def check(self, rank: int) -> None:
        """Compare a rank's file with what the manifest says of it.

        Raises:
            LoadError: it is another, or is missing.
        """
        listed = self.parts[rank]
        try:
            with open_regular(self.path.with_name(listed.name)) as stream:
                size = os.fstat(stream.fileno()).st_size
                if size < listed.bytes:
                    raise self.spoilt(rank, f"is cut off ({size} of {listed.bytes} bytes)")
                if size > listed.bytes or hash_stream(stream) != listed.sha256:
                    raise self.spoilt(rank, "is damaged")
        except FileNotFoundError:
            raise LoadError(
                f"'{self.path}' lacks the part of rank {rank} ({listed.name}): it is not resumed from"
            ) from None
        except (OSError, ValueError) as error:  # a name may hold what no name of a file does
            raise self.spoilt(rank, f"cannot be read: {os_reason(error)}") from None

    def spoilt(self, rank: int, what: str) -> LoadError:
        """The error that says what is wrong with a rank's part."""
        name = self.parts[rank].name
        return LoadError(f"'{self.path}': the part of rank {rank} ({name}) {what}: it is not resumed from")


def read(path: str | Path) -> Saved:
    """Find a checkpoint, and all parts of it undamaged.

    Raises:
        LoadError: it is none, or not whole.
    """
    try:
        target = Path(os.path.realpath(path))
        text = _manifest_bytes(target)
    except (OSError, ValueError) as error:
        raise LoadError(f"cannot read the checkpoint '{path}': {os_reason(error)}") from None
    if text is None:
        raise LoadError(f"'{path}' is no checkpoint")
    try:
        saved = _parse(target, text)
    except _OtherFormat as error:
        raise LoadError(f"the checkpoint '{path}' {error}") from None
    except (KeyError, RecursionError, TypeError, ValueError):
        raise LoadError(f"the checkpoint '{path}' is damaged") from None
    for rank in range(saved.size):
        saved.check(rank)
    return saved


class _OtherFormat(Exception):
    """A manifest of another version of the format."""


def _manifest(generation: int, parts: list[Part], notes: Mapping[str, Any]) -> str:
    """The text of a manifest: one JSON object, with a digest of what follows it."""
    body = {
        "program": __version__,
        "generation": generation,
        "parts": [asdict(part) for part in parts],
        "notes": dict(notes),
    }
    body = json.loads(json.dumps(body))  # as a reader will see it: keys are text
    return json.dumps({_MARK: FORMAT, "sha256": _digest(body), **body})


def _digest(body: Mapping[str, Any]) -> str:
    """Of what JSON gave: Python writes and reads its floats back bit for bit, in the same order."""
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()


def _manifest_bytes(path: Path) -> bytes | None:
    """What a manifest holds, None for any other file, which may be large."""
    with open_regular(path) as stream:
        start = stream.read(len(_START))
        return start + stream.read() if start == _START else None


def _parse(path: Path, text: bytes) -> Saved:
    """What a manifest says, of which nothing is to be trusted.

    Raises:
        _OtherFormat, KeyError, RecursionError, TypeError, ValueError: it is none that can be read.
    """
    body = json.loads(text)
    version, digest = body.pop(_MARK), body.pop("sha256")
    if version != FORMAT:
        raise _OtherFormat(f"has format {version!r:.20}, and this program reads format {FORMAT}")
    if digest != _digest(body):
        raise ValueError("digest")
    program, generation, listed, notes = (body[key] for key in ("program", "generation", "parts", "notes"))
    if not (type(program) is str and type(generation) is int and listed and isinstance(notes, dict)):
        raise ValueError("types")
    parts = tuple(Part(**entry) for entry in listed)
    for rank, part in enumerate(parts):
        name = rf"[^/\0]+\.{generation}\.{rank}of{len(parts)}\.part"
        if not (re.fullmatch(name, part.name) and type(part.bytes) is int and type(part.sha256) is str):
            raise ValueError("parts")
    return Saved(path, program, generation, notes, parts)


def _generation(path: Path) -> int:
    """Of the manifest there, -1 if there is none that can be read."""
    try:
        text = _manifest_bytes(path)
        return -1 if text is None else _parse(path, text).generation
    except (OSError, _OtherFormat, KeyError, RecursionError, TypeError, ValueError):
        return -1


def _may_be_replaced(path: Path) -> bool:
    """Whether nothing is there, or a manifest of any version, or an empty file.

    Raises:
        OSError: that cannot be told, or is no file.
    """
    try:
        with open_regular(path) as stream:
            return stream.read(len(_START)) in (_START, b"")
    except FileNotFoundError:
        return True


def _attempt(step: Callable[[], T]) -> T | str:
    """The result of `step`, or on one line why there is none: no run ends for want of a checkpoint."""
    try:
        return step()
    except Exception as error:
        return " ".join(os_reason(error).split())


def _write_part(path: Path, tensors: Mapping[str, Tensor]) -> Part:
    with new_file(path, path.with_name(f"{path.name}.tmp")) as stream:
        count, digest = write_tensors(stream, tensors)
    return Part(path.name, count, digest)


def _size(path: Path) -> int:
    """In bytes; -1 for a file that is not there."""
    try:
        return path.stat().st_size
    except OSError:
        return -1
