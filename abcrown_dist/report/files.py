"""Whole files or none: no reader ever meets half a result."""

from __future__ import annotations

import errno
import os
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
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        special = target.exists() and not target.is_file()
        place = target if special else next(folder for folder in target.parents if folder.exists())
        if not special and not place.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(place, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from None


def _unwritable(path: str | Path, error: OSError | ValueError) -> ConfigError:
    reason = error.strerror if isinstance(error, OSError) else None
    return ConfigError(f"cannot write '{path}': {reason or error}")


def write_whole(path: str | Path, text: str) -> None:
    """Replace the content of a file in one step; missing folders are made.

    The text goes to a temporary file beside `path`, which then takes its name. What is no regular
    file (`/dev/stdout`, a pipe) is written to directly.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file() and not target.is_dir():
            target.write_text(text, encoding="utf-8")
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from None
