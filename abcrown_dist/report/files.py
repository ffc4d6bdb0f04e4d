"""Whole files or none: no reader ever meets half a result."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from abcrown_dist.util.errors import ConfigError


def check_writable(path: str | Path) -> None:
    """Tell now, without writing anything, that `write_whole` would fail, as far as permissions tell.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise _os_error(errno.EISDIR)
        place = Path(path)
        if not _is_stream(path, target):
            place = next(folder for folder in target.parents if folder.exists())
            if not place.is_dir():
                raise _os_error(errno.ENOTDIR)
        if not os.access(place, os.W_OK):
            raise _os_error(errno.EACCES)
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from None


def remove_old(path: str | Path) -> None:
    """Remove a regular file that an earlier run wrote, so that a run that dies does not leave it behind.

    What takes a stream stays.

    Raises:
        ConfigError: it cannot be removed.
    """
    target = Path(os.path.realpath(path))
    if _is_stream(path, target):
        return
    try:
        target.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from None


def _is_stream(path: str | Path, target: Path) -> bool:
    """Whether a file takes text as it comes: a pipe, a terminal, whatever /dev/stdout stands for.

    That may be a regular file; what it holds already must stay.
    """
    return os.path.abspath(path).startswith("/dev/") or (target.exists() and not target.is_file())


def _descriptor(path: str | Path) -> int | None:
    """A copy of the file descriptor that a name under /dev stands for.

    Opening the name instead would give a regular file a second position, and what this process
    prints next would overwrite the text.
    """
    found = re.fullmatch(r"/dev/(stdout|stderr|fd/(\d{1,9}))", os.path.abspath(path))
    if found is None:
        return None
    return os.dup(int(found.group(2) or {"stdout": 1, "stderr": 2}[found.group(1)]))


def _os_error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def _unwritable(path: str | Path, error: OSError | ValueError) -> ConfigError:
    reason = error.strerror if isinstance(error, OSError) else None
    return ConfigError(f"cannot write '{path}': {reason or error}")


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Replace the content of a file in one step; missing folders are made.

    The content (text becomes UTF-8) goes to a temporary file beside `path`, which then takes its name.
    What is no regular file (`/dev/stdout`, a pipe) is appended to directly.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        data = content.encode("utf-8") if isinstance(content, str) else content
        target = Path(os.path.realpath(path))
        if _is_stream(path, target) and not target.is_dir():
            descriptor = _descriptor(path)
            with open(path if descriptor is None else descriptor, "ab") as stream:
                stream.write(data)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            temporary.write_bytes(data)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from None
