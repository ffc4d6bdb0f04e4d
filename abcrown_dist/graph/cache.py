"""Converted networks kept in files, so that a run that finds its network there imports no converter.

A network is stored only after it agreed with onnxruntime, together with the box that the points of that
comparison were taken from. For another box it is compared again, which needs onnxruntime alone. What
is found in the cache is used only if every digest in it is right; else it is converted and stored anew.

The folder is as trustworthy as those who may write to it: digests find damage, not forgery.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

from abcrown_dist import __version__
from abcrown_dist.graph.load_onnx import LoadedModel, check_box, find_difference, load_onnx, not_finite_note
from abcrown_dist.graph.onnx_file import Port, external_files
from abcrown_dist.graph.stored import Stored, Unstorable, Unusable, read_model, write_model
from abcrown_dist.util.digest import hash_stream
from abcrown_dist.util.errors import LoadError

FORMAT = 1
"""Version of what lies in the folder; a new one makes all files of older ones unknown."""

_CONVERTERS = ("torch", "onnx", "onnx2pytorch", "onnxruntime")
_log = logging.getLogger(__name__)


def default_folder() -> Path:
    """`abcrown_dist` in the user's folder for caches: $XDG_CACHE_HOME, else ~/.cache.

    Raises:
        RuntimeError: the user has no home directory.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(named) if os.path.isabs(named) else Path("~/.cache").expanduser()
    return base / "abcrown_dist"


@dataclass(frozen=True)
class _Request:
    """The arguments of `load_onnx`, and the digests that networks and comparisons are found by."""

    path: Path
    input_shape: Sequence[int] | None
    lower: np.ndarray | None
    upper: np.ndarray | None
    key: str

    @property
    def box(self) -> str:
        """Digest of the box, or of there being none."""
        ends = [
            b"none" if end is None else np.asarray(end, dtype=np.float64).tobytes()
            for end in (self.lower, self.upper)
        ]
        return hashlib.sha256(b"".join(ends)).hexdigest()

    def convert(self) -> LoadedModel:
        return load_onnx(self.path, self.input_shape, self.lower, self.upper)


@dataclass(frozen=True)
class GraphCache:
    """Converted networks in `folder`, which is made when the first one is stored.

    Any number of processes may use it at once: files appear whole, under names that say what they hold.
    """

    folder: Path

    def load(
        self,
        path: str | Path,
        input_shape: Sequence[int] | None = None,
        lower: np.ndarray | None = None,
        upper: np.ndarray | None = None,
    ) -> LoadedModel:
        """As `load_onnx`: from the cache if the network is there, else converted and then stored.

        Trouble with the cache itself is a warning.
        """
        path = Path(path)
        try:
            key = fingerprint(path, input_shape)
        except OSError:
            return load_onnx(path, input_shape, lower, upper)  # which says what is wrong with the file
        request = _Request(path, input_shape, lower, upper, key)
        return self._find(request) or self._convert(request)

    def _find(self, request: _Request) -> LoadedModel | None:
        """The network asked for, if it is there, whole, and agrees with onnxruntime on the box."""
        stored = self._read(request)
        if stored is None:
            return None
        model = replace(stored.model, path=str(request.path))
        check_box(model.graph.input_size, model.path, request.lower)
        if self._is_compared(request, stored.digest):
            return model
        ports = [
            Port(name, shape, model.dtype)
            for name, shape in zip(model.input_names, model.input_shapes, strict=True)
        ]
        difference, not_finite = find_difference(
            model.graph, ports, request.path, request.lower, request.upper
        )
        if difference is not None:
            return None  # the conversion will say which node differs, if it still does
        model = replace(model, warnings=not_finite_note(request.path, not_finite))
        self._note_comparison(request, stored.digest, model)
        return model

    def _read(self, request: _Request) -> Stored | None:
        file = self._graph_file(request)
        try:
            with open(file, "rb") as stream:
                stored = read_model(stream)
            if stored.extra["key"] != request.key:
                raise Unusable("it holds another network")
        except FileNotFoundError:
            return None
        except (OSError, Unusable) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            _log.warning("%s is not used: %s; the network is converted anew", file, reason)
            return None
        external: Mapping[str, str] = stored.extra["external"]
        return stored if _digests(request.path, external) == external else None

    def _convert(self, request: _Request) -> LoadedModel:
        """The network from its files, which is stored if they stayed the same meanwhile."""
        external = _external_digests(request.path)
        model = request.convert()
        if external is not None and _unchanged(request, external):
            self._store(request, external, model)
        return model

    def _store(self, request: _Request, external: Mapping[str, str], model: LoadedModel) -> None:
        try:
            with self._new_file(self._graph_file(request)) as stream:
                digest = write_model(stream, model, {"key": request.key, "external": external})
        except Unstorable as error:
            _log.warning("%s: not kept in the graph cache: %s", model.path, error)
        except OSError as error:
            _log.warning("%s: not kept in the graph cache %s: %s", model.path, self.folder, error.strerror)
        else:
            self._note_comparison(request, digest, model)

    def _is_compared(self, request: _Request, digest: str) -> bool:
        """Whether the graph with this digest is known to agree with onnxruntime on the box."""
        try:
            return self._comparison_file(request).read_bytes() == _agreement(request, digest)
        except OSError:
            return False

    def _note_comparison(self, request: _Request, digest: str, model: LoadedModel) -> None:
        """Remember an agreement. Where it came with a warning, the next run shall compare and warn again."""
        if model.warnings:
            return
        try:
            with self._new_file(self._comparison_file(request)) as stream:
                stream.write(_agreement(request, digest))
        except OSError as error:
            _log.warning("%s: not noted in the graph cache %s: %s", model.path, self.folder, error.strerror)

    def _graph_file(self, request: _Request) -> Path:
        return self.folder / f"{request.key}.graph"

    def _comparison_file(self, request: _Request) -> Path:
        return self.folder / f"{request.key}.{request.box[:16]}.compared"

    @contextmanager
    def _new_file(self, path: Path) -> Iterator[BinaryIO]:
        """A file that takes its name, in place of what may bear it, once it is whole."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name[:16]}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
        try:
            with open(temporary, "xb") as stream:
                yield stream
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def fingerprint(path: Path, input_shape: Sequence[int] | None) -> str:
    """Hexadecimal SHA-256 of all that decides what a network is converted to, but for external data.

    Raises:
        OSError: the file cannot be read.
    """
    parts = (
        *_converter(),
        "as declared" if input_shape is None else str(tuple(input_shape)),
        path.suffix == ".gz",  # how its bytes are read
        _file_digest(path),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@cache
def _converter() -> tuple[str, ...]:
    """What converts: format and version of this package, its very code, and the libraries it uses."""
    code = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        code.update(source.read_bytes())
    versions = [f"{package} {_version(package)}" for package in _CONVERTERS]
    return (str(FORMAT), __version__, code.hexdigest(), sys.byteorder, *versions)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # installed under another name, such as onnxruntime-gpu
        return "unknown"


def _file_digest(path: Path) -> str:
    if not path.is_file():  # a pipe or a device might never end
        raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
    with open(path, "rb") as stream:
        return hash_stream(stream)


def _digests(path: Path, names: Iterable[str]) -> dict[str, str] | None:
    """Digests of files beside `path`, by name; None when one of them cannot be read."""
    try:
        return {name: _file_digest(path.parent / name) for name in names}
    except OSError:
        return None


def _external_digests(path: Path) -> dict[str, str] | None:
    """Digests of a network's external data, by file; None when they cannot be told."""
    try:
        return _digests(path, external_files(path))
    except (LoadError, OSError):
        return None  # loading the network will say what is wrong


def _unchanged(request: _Request, external: Mapping[str, str]) -> bool:
    """Whether the network's files are still what they were."""
    try:
        same = fingerprint(request.path, request.input_shape) == request.key
    except OSError:
        return False
    return same and _digests(request.path, external) == external


def _agreement(request: _Request, digest: str) -> bytes:
    """What the note of a comparison says."""
    return f"graph {digest} agrees on box {request.box}\n".encode()
