"""Reference bounds of another tool on real networks."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def oracle_folder(bench: Path) -> Path:
    """Folder `oracle` beside the real instances."""
    folder = bench.parent / "oracle"
    if not folder.is_dir():
        pytest.skip(f"no reference bounds: {folder} does not exist")
    return folder
