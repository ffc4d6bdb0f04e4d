"""Importing onnx2pytorch without torchvision.

onnx2pytorch needs torchvision for five operators (DeformConv, ImageDecoder, MaxRoiPool,
NonMaxSuppression, RoiAlign) but imports it whole, and torchvision in turn imports torch._dynamo and
sympy: more than a second, whatever the network. Here its names stand for themselves until one of them
is used.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_PACKAGE = "torchvision"
_lock = threading.Lock()


def import_onnx2pytorch() -> ModuleType:
    """The module `onnx2pytorch`; torchvision itself is imported when a converted model first uses it."""
    with _lock:
        if "onnx2pytorch" in sys.modules or _PACKAGE in sys.modules:
            return importlib.import_module("onnx2pytorch")
        with _deferring():
            return importlib.import_module("onnx2pytorch")


@contextmanager
def _deferring() -> Iterator[None]:
    """While active, importing torchvision gives stand-ins; none is left in `sys.modules`."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if _belongs(name)]:
            del sys.modules[name]


def _belongs(name: str) -> bool:
    return name == _PACKAGE or name.startswith(f"{_PACKAGE}.")


class _Finder:
    """Finds an empty stand-in for every module of torchvision."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not _belongs(name):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


class _StandIn(ModuleType):
    """A module of which every name is a `_Deferred`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Deferred(self.__name__, name)


class _Deferred:
    """A name of a module that is imported on the first use of the name."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._real()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real(), name)

    def _real(self) -> Any:
        return getattr(importlib.import_module(self._module), self._name)
