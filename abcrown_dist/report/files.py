"""Whole files or none: no reader ever meets half a result."""

from __future__ import annotations

import os
from pathlib import Path

from abcrown_dist.util.errors import ConfigError


def write_whole(path: str | Path, text: str) -> None:
    """Replace the content of a file in one step; missing folders are made.

    The text goes to a temporary file beside `path`, which then takes its name. What is no regular
    file (`/dev/stdout`, a pipe) is written to directly.

    Raises:
        ConfigError: the file cannot be written.
    """
    target = Path(os.path.realpath(path))
    try:
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
    except OSError as error:
        raise ConfigError(f"cannot write '{path}': {error.strerror or error}") from None
