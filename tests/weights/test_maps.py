"""Affine maps against explicit Jacobians: hot ops by their own rules, all others by derived ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from abcrown_dist.weights.maps import AtenMap, ConvMap, LinearMap, ReshapeMap, SumMap
from abcrown_dist.weights.terms import sum_roundings
from tests.weights.laws import DOUBLE, Lambda, affine_nodes, captured, check_laws, check_rows, map_of


def random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=DOUBLE)


@pytest.mark.parametrize("lead", [(1,), (1, 3), (2, 2)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(lead: tuple[int, ...], bias: bool) -> None:
    graph = captured(nn.Linear(5, 4, bias=bias, dtype=DOUBLE), [(*lead, 5)])
    (node,) = (node for node in affine_nodes(graph) if node.op == "linear")
    assert isinstance(map_of(graph, node), LinearMap)
    check_laws(graph, node)
    check_rows(graph, node)


def test_linear_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Magnitudes are taken block by block; a block that does not divide the outputs changes nothing."""
    monkeypatch.setattr("abcrown_dist.weights.maps._BLOCK", 12)
    graph = captured(nn.Linear(5, 7, dtype=DOUBLE), [(1, 5)])
    check_laws(graph, affine_nodes(graph)[-1])


CONVOLUTIONS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "1d": (nn.Conv1d(2, 3, 3, stride=2, padding=1, dtype=DOUBLE), (1, 2, 8)),
    "2d": (nn.Conv2d(2, 3, 3, padding=1, dtype=DOUBLE), (1, 2, 4, 5)),
    "no_bias": (nn.Conv2d(2, 3, 2, bias=False, dtype=DOUBLE), (1, 2, 4, 4)),
    "stride_leaves_a_border": (nn.Conv2d(1, 2, 2, stride=3, dtype=DOUBLE), (1, 1, 7, 6)),
    "uneven": (nn.Conv2d(2, 2, (2, 3), stride=(1, 2), padding=(0, 1), dtype=DOUBLE), (1, 2, 3, 6)),
    "dilated": (nn.Conv2d(1, 2, 2, dilation=(2, 1), padding=1, dtype=DOUBLE), (1, 1, 5, 4)),
    "grouped": (nn.Conv2d(4, 6, 3, groups=2, padding=1, dtype=DOUBLE), (1, 4, 3, 3)),
    "depthwise": (nn.Conv2d(3, 3, 2, stride=2, groups=3, dtype=DOUBLE), (1, 3, 5, 5)),
    "3d": (nn.Conv3d(2, 2, 2, stride=(1, 2, 1), padding=(1, 0, 0), dtype=DOUBLE), (1, 2, 2, 4, 3)),
    "all_at_once": (
        nn.Conv2d(4, 4, (3, 2), stride=2, padding=(2, 1), dilation=(1, 2), groups=2, dtype=DOUBLE),
        (1, 4, 6, 5),
    ),
}
TRANSPOSED: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "1d": (nn.ConvTranspose1d(2, 3, 3, stride=2, dtype=DOUBLE), (1, 2, 3)),
    "2d": (nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, dtype=DOUBLE), (1, 2, 3, 2)),
    "output_padding": (
        nn.ConvTranspose2d(2, 2, 3, stride=3, padding=1, output_padding=(2, 1), dtype=DOUBLE),
        (1, 2, 2, 3),
    ),
    "grouped_dilated": (
        nn.ConvTranspose2d(4, 2, 2, stride=2, groups=2, dilation=2, padding=1, dtype=DOUBLE),
        (1, 4, 3, 3),
    ),
    "3d": (nn.ConvTranspose3d(1, 2, 2, stride=2, bias=False, dtype=DOUBLE), (1, 1, 2, 1, 2)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name: str) -> None:
    module, shape = CONVOLUTIONS[name]
    graph = captured(module, [shape])
    (node,) = affine_nodes(graph)
    assert isinstance(map_of(graph, node), ConvMap)
    check_laws(graph, node)
    check_rows(graph, node)


@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_convolution(name: str) -> None:
    module, shape = TRANSPOSED[name]
    graph = captured(module, [shape])
    (node,) = affine_nodes(graph)
    affine = map_of(graph, node)
    assert isinstance(affine, ConvMap) and affine.transposed
    check_laws(graph, node)
    assert affine.rows(torch.arange(2)) is None


S, P = (3, 4), (1, 2, 4, 4)
C = random(3, 4)
MASK = C > 0
DERIVED: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "view": (lambda x: x.view(2, 6), [S]),
    "squeeze": (lambda x: x.squeeze(0).unsqueeze(-1), [(1, 3)]),
    "permute": (lambda x: x.permute(2, 0, 1), [(2, 3, 4)]),
    "transpose": (lambda x: x.t(), [S]),
    "slice": (lambda x: x[1:, ::2], [S]),
    "cat": (lambda x, y: torch.cat([x, C, y]), [S, S]),
    "cat_with_itself": (lambda x: torch.cat([x, x], 1), [S]),
    "stack": (lambda x, y: torch.stack([x, y], 1), [S, S]),
    "split": (lambda x: x.split([1, 3], 1)[1], [S]),
    "pad": (lambda x: F.pad(x, (1, 2), value=7.0), [S]),
    "crop": (lambda x: F.pad(x, (-1, 1)), [S]),
    "reflect": (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), [P]),
    "expand": (lambda x: x.expand(3, 4), [(1, 4)]),
    "index": (lambda x: x[:, torch.tensor([3, 0, 0])], [S]),
    "gather": (lambda x: torch.gather(x, 1, torch.tensor([[0, 1], [3, 3], [2, 0]])), [S]),
    "where": (lambda x, y: torch.where(MASK, x, y), [S, S]),
    "sum": (lambda x: x.sum(1), [S]),
    "mean": (lambda x: x.mean((0, 1), keepdim=True), [S]),
    "cumsum": (lambda x: x.cumsum(1), [S]),
    "avg_pool": (lambda x: F.avg_pool2d(x, 2), [P]),
    "avg_pool_overlapping": (lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False), [P]),
    "avg_pool_divisor": (lambda x: F.avg_pool2d(x, 2, divisor_override=1), [P]),
    "avg_pool_1d": (lambda x: F.avg_pool1d(x, 3, stride=1), [(1, 2, 5)]),
    "adaptive": (lambda x: F.adaptive_avg_pool2d(x, 3), [P]),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), [P]),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear"), [P]),
    "unfold": (lambda x: F.unfold(x, 2), [P]),
    "add": (lambda x, y: x + y, [S, S]),
    "add_broadcast": (lambda x, y: x + y, [S, (4,)]),
    "add_scaled": (lambda x, y: torch.add(x, y, alpha=3), [S, S]),
    "add_constant": (lambda x: x + C, [S]),
    "sub": (lambda x, y: x - y, [S, S]),
    "sub_scaled": (lambda x, y: torch.sub(x, y, alpha=-3), [S, S]),
    "sub_from_constant": (lambda x: C - x, [S]),
    "neg": (lambda x: -x, [S]),
    "mul": (lambda x: C * x, [S]),
    "mul_number": (lambda x: x * -2.5, [S]),
    "div": (lambda x: x / (C.abs() + 0.25), [S]),
    "mm": (lambda x: x @ random(4, 9), [S]),
    "mm_left": (lambda x: random(5, 3) @ x, [S]),
    "bmm": (lambda x: torch.bmm(x, random(2, 3, 4)), [(2, 5, 3)]),
    "bmm_left": (lambda x: torch.bmm(random(2, 5, 3), x), [(2, 3, 7)]),
    "addmm": (lambda x: torch.addmm(C, random(3, 2), x, beta=-1, alpha=2), [(2, 4)]),
    "addmm_bias_depends": (lambda b, x: torch.addmm(b, x, random(2, 4)), [S, (3, 2)]),
    "convolution_of_a_batch": (lambda x: F.conv1d(x, random(3, 2, 2)), [(2, 2, 5)]),
    "convolution_without_batch": (lambda x: F.conv2d(x, random(3, 2, 2, 2), random(3)), [P[1:]]),
}


@pytest.mark.parametrize("canonical", [True, False], ids=["rewritten", "raw"])
@pytest.mark.parametrize("name", DERIVED)
def test_derived_maps(name: str, canonical: bool) -> None:
    function, shapes = DERIVED[name]
    graph = captured(Lambda(function), shapes, canonical)
    nodes = affine_nodes(graph)
    assert nodes
    for node in nodes:
        if canonical or node.op not in ("convolution",):  # which only rewriting makes a `conv`
            check_laws(graph, node)


def test_which_maps_are_derived() -> None:
    """Sums of equal shapes and reshapes have rules of their own; scaled sums must not take them."""
    kinds = {
        name: [type(map_of(graph, node)) for node in affine_nodes(graph)]
        for name, (function, shapes) in DERIVED.items()
        for graph in [captured(Lambda(function), shapes)]
    }
    assert kinds["add"] == [SumMap]
    assert kinds["view"] == [ReshapeMap]
    assert SumMap not in kinds["add_scaled"] + kinds["add_broadcast"] + kinds["add_constant"]
    assert kinds["permute"] == kinds["cat"] == kinds["avg_pool"] == [AtenMap]


def test_sum_of_a_node_with_itself() -> None:
    graph = captured(Lambda(lambda x: x + x), [S])
    for node in affine_nodes(graph):
        check_laws(graph, node)


def test_sums_are_rounded_once_less_than_they_have_terms() -> None:
    """But for what is fused: an input of zero that was shifted is multiplied and added up all the same."""
    products, constant = torch.tensor([0.0, 1.0, 5.0]), torch.tensor([2.0, 2.0, 2.0])
    assert sum_roundings(products, constant, 0).tolist() == [0, 2, 6]
    assert sum_roundings(products, constant, 4).tolist() == [6, 6, 10]
