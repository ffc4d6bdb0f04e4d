"""Rewriting: the same function, in canonical nodes, with nothing superfluous."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from abcrown_dist.graph import canonical
from abcrown_dist.graph.check import check
from abcrown_dist.graph.execute import cast, execute
from abcrown_dist.graph.ir import Graph
from abcrown_dist.graph.rebuild import apply
from abcrown_dist.graph.rewrite import PASSES, rewrite
from abcrown_dist.graph.trace import trace
from tests.models import Residual, randomize


class Lambda(nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


def assert_equal_functions(first: Graph, second: Graph, points: int = 5) -> None:
    """Outputs agree to 1e-5 relative on random points; in float64 to 1e-6 (constants are rounded once)."""
    random = torch.Generator().manual_seed(3)
    for _ in range(points):
        inputs = [torch.randn(first[name].shape, generator=random) for name in first.inputs]
        for found, wanted in zip(execute(second, inputs), execute(first, inputs), strict=True):
            assert found.shape == wanted.shape
            assert (found - wanted).abs().max() <= 1e-5 * max(float(wanted.abs().max()), 1e-3)
        double = [tensor.double() for tensor in inputs]
        exact = zip(
            execute(cast(second, torch.float64), double),
            execute(cast(first, torch.float64), double),
            strict=True,
        )
        for found, wanted in exact:
            assert (found - wanted).abs().max() <= 1e-6 * max(float(wanted.abs().max()), 1e-3)


def ops(graph: Graph) -> dict[str, int]:
    """How often each op occurs, inputs apart."""
    return dict(Counter(node.op for node in graph if node.op != "input"))


_FIXED = torch.Generator().manual_seed(5)


def _rand(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=_FIXED) + 0.25


M23, M32, M33, V3 = _rand(2, 3), _rand(3, 2), _rand(3, 3), _rand(3)
BATCH = _rand(1, 3, 2)

CASES: dict[str, tuple[nn.Module, tuple[int, ...], dict[str, int]]] = {
    "linear": (nn.Linear(3, 2), (1, 3), {"linear": 1}),
    "linear_vector": (nn.Linear(3, 2), (3,), {"linear": 1}),
    "linear_tokens": (
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
        (1, 5, 3),
        {"linear": 2, "relu": 1},
    ),
    "matmul": (Lambda(lambda x: x @ M32), (1, 3), {"linear": 1}),
    "matmul_add": (Lambda(lambda x: x @ M33 + V3), (1, 3), {"linear": 1}),
    "matmul_left": (Lambda(lambda x: M23 @ x), (3, 1), {"mm": 1}),
    "matvec": (Lambda(lambda x: M23 @ x), (3,), {"linear": 1}),
    "bmm_equal": (Lambda(lambda x: torch.bmm(x, BATCH.expand(2, 3, 2))), (2, 4, 3), {"linear": 1}),
    "bmm_different": (Lambda(lambda x: torch.bmm(x, torch.stack([M32, M32 * 2]))), (2, 4, 3), {"bmm": 1}),
    "addmm_scaled": (Lambda(lambda x: torch.addmm(V3, x, M33, beta=2, alpha=-3)), (1, 3), {"linear": 1}),
    "addmm_rows": (Lambda(lambda x: torch.addmm(M33, x, M33)), (3, 3), {"addmm": 1}),
    "two_linear": (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), (1, 8), {"linear": 2}),
    "bottleneck": (nn.Sequential(nn.Linear(8, 1), nn.Linear(1, 8)), (1, 8), {"linear": 2}),
    "conv_bn": (nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.BatchNorm2d(4)), (1, 2, 5, 5), {"conv": 1}),
    "conv_transposed_bn": (
        nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=2, bias=False), nn.BatchNorm2d(6)),
        (1, 4, 3, 3),
        {"conv": 1},
    ),
    "linear_bn": (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), (1, 3), {"linear": 1}),
    "bn_alone": (nn.BatchNorm2d(3), (1, 3, 2, 2), {"mul": 1, "add": 1}),
    "bn_not_affine": (nn.BatchNorm2d(3, affine=False), (1, 3, 2, 2), {"mul": 1, "add": 1}),
    "residual": (nn.Sequential(Residual(3), Residual(3)), (1, 3, 4, 4), {"conv": 4, "relu": 4, "add": 2}),
    "normalised_input": (
        nn.Sequential(Lambda(lambda x: (x - 0.5) / V3[0]), nn.Flatten(), nn.Linear(8, 3)),
        (1, 2, 2, 2),
        {"view": 1, "linear": 1},
    ),
    "shared_by_two": (
        Lambda(lambda x: (lambda z: torch.relu(z) + (z * 2 + 1))(x @ M33)),
        (1, 3),
        {"linear": 1, "relu": 1, "mul": 1, "add": 2},
    ),
    "scaled": (Lambda(lambda x: 1 - (x @ M33) * V3 / 2), (1, 3), {"linear": 1}),
    "negated": (Lambda(lambda x: -(x @ M33)), (1, 3), {"linear": 1}),
    "varying_over_rows": (Lambda(lambda x: x @ M33 + M33), (3, 3), {"linear": 1, "add": 1}),
    "divided_by_zero": (Lambda(lambda x: (x @ M33) / torch.tensor(0.0)), (1, 3), {"linear": 1, "div": 1}),
    "identities": (
        Lambda(lambda x: ((x.detach().clone() * 1 + 0 - 0) / 1).expand(1, 3).view(1, 3)[:, 0:3].exp()),
        (1, 3),
        {"exp": 1},
    ),
    "cast": (Lambda(lambda x: x.double().exp().float()), (1, 3), {"exp": 1}),
    "views": (Lambda(lambda x: x.unsqueeze(0).flatten().view(3, 2).squeeze()), (1, 6), {"view": 1}),
    "views_undone": (Lambda(lambda x: x.view(2, 3).reshape(1, 6).sin()), (1, 6), {"sin": 1}),
    "permutes": (Lambda(lambda x: x.permute(2, 0, 1).transpose(0, -1)), (2, 3, 4), {"permute": 1}),
    "permutes_undone": (Lambda(lambda x: x.t().t().sin()), (2, 3), {"sin": 1}),
    "permute_of_ones": (Lambda(lambda x: x.permute(0, 3, 1, 2)), (1, 1, 1, 5), {"view": 1}),
    "permuted_view": (
        Lambda(lambda x: x.permute(1, 0).reshape(6).sin()),
        (2, 3),
        {"permute": 1, "view": 1, "sin": 1},
    ),
    "relu_variants": (
        Lambda(lambda x: x.clamp(min=0) + torch.clamp_min(x + 1, 0) + torch.maximum(x - 1, torch.zeros(3))),
        (1, 3),
        {"relu": 3, "add": 3, "sub": 1},
    ),
    "max_with_zero": (Lambda(lambda x: torch.stack([torch.zeros(1, 3), x]).amax(0)), (1, 3), {"relu": 1}),
    "max_with_one": (
        Lambda(lambda x: torch.stack([torch.ones(1, 3), x]).amax(0)),
        (1, 3),
        {"stack": 1, "amax": 1},
    ),
    "max_of_all": (
        Lambda(lambda x: torch.stack([torch.zeros(1, 3), x]).amax()),
        (1, 3),
        {"stack": 1, "amax": 1},
    ),
    "min_with_zero": (Lambda(lambda x: x.clamp(max=0)), (1, 3), {"neg": 2, "relu": 1}),
    "leaky_in_parts": (Lambda(lambda x: x.clamp(min=0) + 0.3 * x.clamp(max=0)), (1, 3), {"leaky_relu": 1}),
    "slopes_in_parts": (
        Lambda(lambda x: x.clamp(min=0) + V3 * x.clamp(max=0)),
        (1, 3),
        {"relu": 2, "neg": 2, "mul": 1, "add": 1},
    ),
    "parts_of_two": (
        Lambda(lambda x: x.clamp(min=0) + 0.3 * x.flip(1).clamp(max=0)),
        (1, 3),
        {"relu": 2, "neg": 2, "mul": 1, "add": 1, "flip": 1},
    ),
    "clamp": (Lambda(lambda x: x.clamp(0, 1)), (1, 3), {"clamp": 1}),
    "leaky": (nn.LeakyReLU(0.2), (1, 3), {"leaky_relu": 1}),
    "prelu": (nn.PReLU(1, init=0.3), (1, 3), {"leaky_relu": 1}),
    "prelu_each": (Lambda(lambda x: torch.prelu(x, V3)), (1, 3), {"_prelu_kernel": 1}),
    "steep_leaky": (nn.LeakyReLU(2.5), (1, 3), {"relu": 2, "neg": 1, "sub": 1}),
    "falling_leaky": (nn.LeakyReLU(-0.5), (1, 3), {"relu": 2, "neg": 1, "sub": 1}),
    "crop_and_pad": (Lambda(lambda x: nn.functional.pad(x, (1, -1))), (1, 3), {"constant_pad_nd": 1}),
}


def _raw(module: nn.Module, shape: tuple[int, ...]) -> Graph:
    if any(isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d) for part in module.modules()):
        randomize(module)
    return trace(module, [torch.rand(shape)])


@pytest.mark.parametrize("name", CASES)
def test_rewriting_is_exact_and_canonical(name: str) -> None:
    module, shape, expected = CASES[name]
    raw = _raw(module, shape)
    graph = rewrite(raw, torch.float32)
    assert ops(graph) == expected
    # Fused constants keep the digits that float32 would round away.
    assert {value.dtype for value in graph.constants.values()} <= {torch.float32, torch.float64}
    if name != "divided_by_zero":
        assert_equal_functions(raw, graph)


@pytest.mark.parametrize("name", CASES)
def test_every_single_pass_preserves_the_function(name: str) -> None:
    module, shape, _ = CASES[name]
    if name in ("divided_by_zero", "cast"):
        return
    graph = _raw(module, shape)
    for rules in (canonical.RULES, *PASSES, *PASSES):
        after = check(apply(graph, rules))
        assert_equal_functions(graph, after, points=2)
        graph = after


def test_canonical_attributes() -> None:
    convolution = nn.Conv2d(4, 6, (3, 2), stride=(1, 2), padding=(0, 1), dilation=(2, 1), groups=2)
    node = rewrite(trace(convolution, [torch.rand(1, 4, 8, 8)]), torch.float32).nodes[-1]
    static = {key: value for key, value in node.attrs.items() if key not in ("weight", "bias")}
    assert static == {
        "stride": (1, 2),
        "padding": (0, 1),
        "dilation": (2, 1),
        "transposed": False,
        "output_padding": (0, 0),
        "groups": 2,
    }
    layer = nn.Linear(3, 2)
    graph = rewrite(trace(layer, [torch.rand(1, 3)]), torch.float32)
    weight = graph.constants[graph.nodes[-1].attrs["weight"].key]
    assert weight.shape == (2, 3)
    assert weight.is_contiguous()
    assert weight.data_ptr() == layer.weight.data_ptr(), "the weight needs no copy"


def test_weights_of_nothing_are_dropped() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    graph = rewrite(_raw(module, (1, 3)), torch.float64)
    assert len(graph.constants) == 4
    assert {value.dtype for value in graph.constants.values()} == {torch.float64}


def test_inputs_and_outputs_keep_their_places() -> None:
    module = Lambda(lambda x, y: (x.view(3), y + 0, x * 1, (x + y).clone()))
    graph = rewrite(trace(module, [torch.rand(1, 3), torch.rand(1, 3)]), torch.float32)
    assert graph.inputs == ("input_0", "input_1")
    assert graph.outputs[1:3] == ("input_1", "input_0")
    assert [graph[name].shape for name in graph.outputs] == [(3,), (1, 3), (1, 3), (1, 3)]


def test_an_unused_input_stays() -> None:
    graph = rewrite(trace(Lambda(lambda x, y: y + 1), [torch.rand(1, 3), torch.rand(1, 2)]), torch.float32)
    assert graph.inputs == ("input_0", "input_1")
    assert graph.input_size == 5


def test_a_value_that_is_an_output_is_not_fused_away() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = x @ M33
        return z, z + 1

    raw = trace(Lambda(function), [torch.rand(1, 3)])
    graph = rewrite(raw, torch.float32)
    assert ops(graph) == {"linear": 1, "add": 1}
    assert_equal_functions(raw, graph)
