"""Gradients with given output gradients, without importing sympy.

`torch.autograd.grad(y, x, A)` compares the shapes of y and A by two functions for symbolic shapes, and
imports them together with sympy: 0.2 s or more in a process whose whole work may take less. Shapes here
are plain tuples, for which plain equality says the same.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_NAME = "torch.fx.experimental.symbolic_shapes"


@contextmanager
def plain_shapes() -> Iterator[None]:
    """While active, torch's module of symbolic shapes is stood for by a small one, if it is not there yet."""
    if _NAME in sys.modules:
        yield
        return
    sys.modules[_NAME] = stand_in = _PlainShapes(_NAME)
    try:
        yield
    finally:
        if sys.modules.get(_NAME) is stand_in:
            del sys.modules[_NAME]


class _PlainShapes(ModuleType):
    """The two functions that autograd wants; whoever wants another name gets the real module's."""

    @staticmethod
    def sym_eq(a: Any, b: Any) -> bool:
        return bool(a == b)

    @staticmethod
    def expect_true(value: bool) -> bool:
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
        return getattr(importlib.import_module(_NAME), name)
