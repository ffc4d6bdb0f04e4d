"""Fixtures for all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.parallel.pool import pools

__all__ = ["pools"]  # one pool of spawned ranks per size for the whole session

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small problems are slower on several threads, and sums differ in their last bits."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def bench() -> Path:
    """Folder of real VNN-COMP instances: $ABCROWN_BENCH, else ../shared/bench beside the repository."""
    folder = Path(os.environ.get("ABCROWN_BENCH") or ROOT.parent / "shared" / "bench")
    if not (folder / "instances.csv").is_file():
        pytest.skip(f"no real instances: {folder}/instances.csv does not exist (set ABCROWN_BENCH)")
    return folder
