"""Modules through the Python API: loaded, checked against themselves, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from abcrown_dist.graph.execute import execute
from abcrown_dist.graph.load_torch import load_torch
from abcrown_dist.util.errors import LoadError
from tests.models import Residual, randomize


class Lambda(nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


def test_module_is_loaded_and_stays_as_it_was() -> None:
    module = randomize(nn.Sequential(Residual(), nn.Flatten(), nn.Linear(64, 3))).train()
    loaded = load_torch(module, torch.rand(1, 4, 4, 4))
    assert [node.op for node in loaded.graph] == [
        "input", "conv", "relu", "conv", "add", "relu", "view", "linear",
    ]  # fmt: skip
    assert loaded.input_shapes == ((1, 4, 4, 4),)
    assert loaded.output_shapes == ((1, 3),)
    assert loaded.warnings == ()
    assert module.training
    x = torch.randn(1, 4, 4, 4)
    torch.testing.assert_close(execute(loaded.graph, [x])[0], module.eval()(x), rtol=1e-4, atol=1e-5)


def test_double_and_several_inputs() -> None:
    loaded = load_torch(
        Lambda(lambda x, y: x @ y.t()), [torch.rand(1, 3).double(), torch.rand(2, 3).double()]
    )
    assert loaded.dtype == torch.float64
    assert loaded.input_names == ("input_0", "input_1")
    assert loaded.output_shapes == ((1, 2),)


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "numpy_copy": (
        lambda x: x + torch.from_numpy(x.numpy().copy()),
        [torch.rand(1, 3)],
        "differs from the module",
    ),
    "random": (lambda x: x * torch.rand(1, 3), [torch.rand(1, 3)], "differs from the module"),
    "integers": (lambda x: x + 1, [torch.ones(1, 3, dtype=torch.int64)], "must share one floating type"),
    "two_types": (
        lambda x, y: x + y,
        [torch.rand(3), torch.rand(3).double()],
        "must share one floating type",
    ),
    "none": (lambda: torch.ones(1), [], "needs an example input"),
    "error": (lambda x: x @ torch.ones(2, 2), [torch.rand(1, 3)], "running the model failed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    function, examples, message = REFUSED[name]
    with pytest.raises(LoadError, match=message):
        load_torch(Lambda(function), examples)


def test_ill_conditioned_rounding_is_no_mismatch() -> None:
    """Outputs that cancel to nearly nothing differ by rounding alone: more than 1e-4 of them, but no
    more than float32 itself is off."""
    weight = torch.full((1, 64), 1000.0)

    def cancel(x: torch.Tensor) -> torch.Tensor:
        z = (x @ weight.t()) / 3
        return z - ((x * weight) / 3).sum(1, keepdim=True)

    load_torch(Lambda(cancel), torch.rand(1, 64))
