"""The second reader of VNN-LIB (`reference.py`), for tests run in importlib mode."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    """Module `reference.py` beside this file."""
    spec = importlib.util.spec_from_file_location("reference", Path(__file__).with_name("reference.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
