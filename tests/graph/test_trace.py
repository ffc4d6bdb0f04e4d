"""Capture: every kind of module gives a graph that computes the same; what cannot be captured is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from abcrown_dist.graph.check import check
from abcrown_dist.graph.execute import execute
from abcrown_dist.graph.trace import trace
from abcrown_dist.util.errors import LoadError
from tests.models import Residual, randomize


class Lambda(nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


def _split_relu(x: torch.Tensor) -> torch.Tensor:
    first, second, third = x.split([1, 2, 1], dim=1)
    return torch.cat([third, torch.relu(first), second], dim=1)


def _inplace_chain(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y += 1
    y.relu_()
    y.mul_(x)
    return y - 3


def _write_seen_through_view(x: torch.Tensor) -> torch.Tensor:
    y = x * 1.5
    flat = y.view(-1)
    F.relu_(flat)
    return y + 1


def _copy_into_buffer(x: torch.Tensor) -> torch.Tensor:
    buffer = torch.zeros(2, 4)
    buffer.copy_(x)
    return buffer * 2


def _accumulate_into_buffer(x: torch.Tensor) -> torch.Tensor:
    buffer = torch.ones(1, 4)
    buffer.add_(x)
    return buffer * x


def _constant_buffer(x: torch.Tensor) -> torch.Tensor:
    buffer = torch.zeros(4)
    buffer[1] = 3.0
    buffer += 1
    return x * buffer


MODULES: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "mlp": (nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), [(1, 4)]),
    "vector": (nn.Linear(4, 5), [(4,)]),
    "rows": (nn.Linear(4, 5), [(12, 4)]),
    "tokens": (nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU()), [(1, 3, 4)]),
    "residual": (nn.Sequential(Residual(), Residual(), nn.Flatten(), nn.Linear(64, 3)), [(1, 4, 4, 4)]),
    "pool": (nn.Sequential(nn.Conv2d(1, 4, 3, groups=1), nn.MaxPool2d(2), nn.AvgPool2d(2)), [(1, 1, 10, 10)]),
    "grouped": (nn.Conv2d(4, 8, 3, stride=2, dilation=2, groups=2, padding=1), [(1, 4, 9, 9)]),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2), [(1, 4, 3, 3)]),
    "conv1d": (nn.Sequential(nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3)), [(1, 2, 8)]),
    "dropout": (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), [(1, 4)]),
    "attention": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), [(1, 3, 8)]),
    "two_inputs": (Lambda(lambda x, y: torch.cat([x, y * 2], dim=1) @ torch.ones(5, 2)), [(1, 2), (1, 3)]),
    "two_outputs": (Lambda(lambda x: {"a": x + 1, "b": [x * 2, x]}), [(1, 3)]),
    "consumed_twice": (Lambda(lambda x: torch.relu(x) - x * x + x), [(1, 3)]),
    "input_is_output": (Lambda(lambda x: x), [(1, 3)]),
    "constant_output": (Lambda(lambda x: (x + 1, torch.full((2, 3), 7.0))), [(1, 3)]),
    "integer_output": (Lambda(lambda x: torch.tensor(x.shape[1])), [(1, 3)]),
    "split": (Lambda(_split_relu), [(1, 4)]),
    "zeros_like": (Lambda(lambda x: torch.maximum(x, torch.zeros_like(x))), [(1, 3)]),
    "gather": (Lambda(lambda x: x[:, torch.tensor([2, 0, 2])]), [(1, 3)]),
    "inplace": (Lambda(_inplace_chain), [(1, 4)]),
    "inplace_through_view": (Lambda(_write_seen_through_view), [(2, 3)]),
    "copy_into_buffer": (Lambda(_copy_into_buffer), [(1, 4)]),
    "accumulate_into_buffer": (Lambda(_accumulate_into_buffer), [(1, 4)]),
    "constant_buffer": (Lambda(_constant_buffer), [(1, 4)]),
    "data": (Lambda(lambda x: x.data * 2), [(1, 4)]),
    "scalar": (Lambda(lambda x: x.sum()), [(1, 4)]),
}


def outputs_of(result: Any) -> list[torch.Tensor]:
    """Flat list of the tensors in a module's result."""
    if isinstance(result, torch.Tensor):
        return [result]
    parts = result.values() if isinstance(result, dict) else result
    return [tensor for part in parts for tensor in outputs_of(part)]


@pytest.mark.parametrize("name", MODULES)
def test_capture_computes_the_same(name: str) -> None:
    module, shapes = MODULES[name]
    randomize(module)
    graph = check(trace(module, [torch.rand(shape) for shape in shapes]))
    random = torch.Generator().manual_seed(1)
    for scale in (1.0, 10.0):
        points = [torch.randn(shape, generator=random) * scale for shape in shapes]
        with torch.no_grad():
            expected = outputs_of(module(*[point.clone() for point in points]))
        for found, wanted in zip(execute(graph, points), expected, strict=True):
            torch.testing.assert_close(found, wanted.to(found.dtype), rtol=1e-5, atol=1e-5)


def test_only_what_an_output_needs_is_kept() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        torch.sigmoid(x)
        return x + 1

    assert [node.op for node in trace(Lambda(function), [torch.rand(1, 2)])] == ["input", "add"]


def test_constants_fold_and_appear_once() -> None:
    layer = nn.Linear(3, 3)
    shared = Lambda(lambda x: layer(torch.relu(layer(x))) * (torch.ones(3) + 1).exp())
    graph = trace(shared, [torch.rand(1, 3)])
    assert [node.op for node in graph] == ["input", "addmm", "relu", "addmm", "mul"]
    assert len(graph.constants) == 3


def test_names_and_training_mode() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU()).train()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    graph = trace(module, [torch.rand(1, 2)])
    assert [node.name for node in graph] == ["input", "0/addmm", "1/native_batch_norm", "2/relu"]
    assert {"0.weight", "0.bias", "1.running_mean"} <= set(graph.constants)
    assert all(part.training for part in module.modules())
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


def test_inputs_are_not_written_to() -> None:
    x = torch.tensor([[-1.0, 2.0]])
    graph = trace(nn.ReLU(inplace=True), [x])
    assert x.tolist() == [[-1.0, 2.0]]
    assert execute(graph, [x])[0].tolist() == [[0.0, 2.0]]


def _slice_write(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[:, 0] += 1
    return y


def _view_then_write_base(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    part = y[:, 1:]
    y.mul_(2)
    return part


def _buffer_slice(x: torch.Tensor) -> torch.Tensor:
    buffer = torch.zeros(1, 4)
    buffer[:, :2] = x[:, :2]
    return buffer


def _constant_changed_later(x: torch.Tensor) -> torch.Tensor:
    buffer = torch.ones(4)
    y = x * buffer
    buffer += 1
    return y * buffer


REFUSED: dict[str, tuple[Any, str]] = {
    "slice_write": (_slice_write, "add_ changed in place through a view"),
    "view_of_written": (_view_then_write_base, "mul_ changed in place through a view"),
    "buffer_slice": (_buffer_slice, "copy_ changed through another view"),
    "constant_changed": (_constant_changed_later, "add_ overwrites the constant"),
    "item": (lambda x: x * x.sum().item(), "_local_scalar_dense turns a value"),
    "branch": (lambda x: x if x.sum() > 0 else -x, "control flow that depends on the input"),
    "numpy": (lambda x: torch.from_numpy(x.detach().numpy()) + 1, "left PyTorch"),
    "no_tensor": (lambda x: 3, "returns int, no tensor"),
    "out": (lambda x: torch.add(x, 1, out=torch.empty(1, 4)), "add.out is not supported"),
    "own_error": (lambda x: x @ torch.ones(3, 3), "running the model failed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(LoadError, match=message):
        trace(Lambda(function), [torch.rand(1, 4)])


def test_refusal_names_the_submodule() -> None:
    module = nn.Sequential(nn.Linear(4, 4), Lambda(_slice_write))
    with pytest.raises(LoadError, match=r"^1: "):
        trace(module, [torch.rand(1, 4)])


def test_import_of_dynamo_is_avoided() -> None:
    """It costs more than a second at the first captured call."""
    import subprocess
    import sys

    code = (
        "import sys, torch; from abcrown_dist.graph.trace import trace; "
        "trace(torch.nn.Linear(2, 2), [torch.ones(1, 2)]); print('torch._dynamo' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
