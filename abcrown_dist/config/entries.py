"""A setting as its user wrote it: the value and the place, for messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Entry:
    """Canonical value of a key, and where it was set ("FILE:LINE" or "command line")."""

    value: Any
    place: str
