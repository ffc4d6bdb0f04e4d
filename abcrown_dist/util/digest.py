"""Digests of files."""

from __future__ import annotations

import hashlib
from typing import BinaryIO


def hash_stream(stream: BinaryIO) -> str:
    """Hexadecimal SHA-256 of what is left in `stream`, read a block at a time."""
    digest = hashlib.sha256()
    while block := stream.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()
