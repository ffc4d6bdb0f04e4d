"""Bounds are never computed with TF32 or reduced-precision sums, whatever the host program had set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from abcrown_dist import api, cli
from abcrown_dist.spec.vnnlib1 import parse_vnnlib

FLAGS: tuple[tuple[Any, str], ...] = (
    (torch.backends.cuda.matmul, "allow_tf32"),
    (torch.backends.cudnn, "allow_tf32"),
    (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
)
PROPERTY = """
(declare-const X_0 Real) (declare-const Y_0 Real)
(assert (>= X_0 0)) (assert (<= X_0 1)) (assert (>= Y_0 100))
"""


@pytest.fixture
def careless() -> Iterator[None]:
    """A host program that has everything fast and rough."""
    precision, before = torch.get_float32_matmul_precision(), [getattr(*flag) for flag in FLAGS]
    torch.set_float32_matmul_precision("medium")
    for place, name in FLAGS:
        setattr(place, name, True)
    yield
    torch.set_float32_matmul_precision(precision)
    for (place, name), value in zip(FLAGS, before, strict=True):
        setattr(place, name, value)


def _program(folder: Path) -> None:
    words = ["--config", "digits_mlp.yaml", "--progress", "none", "--results_file", str(folder / "out.txt")]
    assert cli.main(words) == 0


def _bounds(folder: Path) -> None:
    x = torch.zeros(1, 1)
    api.compute_bounds(nn.Linear(1, 1), x, x, x + 1)


def _module(folder: Path) -> None:
    api.verify_module(nn.Linear(1, 1), torch.zeros(1, 1), parse_vnnlib(PROPERTY))


@pytest.mark.usefixtures("careless")
@pytest.mark.parametrize("way", [_program, _bounds, _module])
def test_full_precision(way: Callable[[Path], None], tmp_path: Path) -> None:
    way(tmp_path)
    assert torch.get_float32_matmul_precision() == "highest"
    assert [getattr(*flag) for flag in FLAGS] == [False] * len(FLAGS)
