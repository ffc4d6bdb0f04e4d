"""The adjoint test at load: passes right rules, names the node of a wrong one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from abcrown_dist.util.errors import LoadError
from abcrown_dist.weights.adjoint import check_adjoint, check_adjoints
from abcrown_dist.weights.maps import AtenMap
from tests.weights.laws import Lambda, affine_nodes, captured, map_of


def _mixed(x: Tensor) -> Tensor:
    return torch.cat([x.permute(1, 0)[1:], 2 - x.permute(1, 0)[:1]]).relu().mean(0)


def test_counts_every_distinct_derived_rule_once() -> None:
    graph = captured(Lambda(_mixed), [(3, 4)])
    calls = [node for node in affine_nodes(graph) if isinstance(map_of(graph, node), AtenMap)]
    assert len(calls) >= 5
    assert check_adjoints(graph) == len({(node.op, repr(node.args), node.shape) for node in calls})
    assert check_adjoints(captured(nn.Linear(3, 2, dtype=torch.float64), [(1, 3)])) == 0


@pytest.mark.parametrize("op", ["permute", "cat", "mean", "slice"])
def test_a_wrong_derived_rule_is_refused(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """The product of one op is off in a single place, as a faulty vmap rule would be."""
    right = AtenMap.transpose

    def wrong(self: AtenMap, A: Tensor) -> tuple[Tensor, ...]:
        parts = right(self, A)
        if self.node.op != op:
            return parts
        fault = torch.zeros_like(parts[0])
        fault[(-1,) * fault.dim()] = 0.01
        return parts[0] + fault, *parts[1:]

    monkeypatch.setattr(AtenMap, "transpose", wrong)
    with pytest.raises(LoadError, match=rf"node \S+: op {op} is not affine.*adjoint test"):
        check_adjoints(captured(Lambda(_mixed), [(3, 4)]))


def test_a_nonlinear_call_fails_the_identity() -> None:
    graph = captured(Lambda(lambda x: x.sigmoid() * 2), [(3,)])
    node = next(node for node in graph if node.op == "sigmoid")
    wrong = AtenMap(next(n for n in graph if n.op == "mul"), ((3,),), graph.constants, torch.float64,
                    torch.device("cpu"))  # fmt: skip
    wrong.node = node
    with pytest.raises(LoadError, match="op sigmoid is not affine"):
        check_adjoint(wrong, node, [(3,)])


def test_weights_that_are_not_numbers_are_no_failure_of_the_rule() -> None:
    constant = torch.tensor([1.0, math.nan, 2.0], dtype=torch.float64)
    check_adjoints(captured(Lambda(lambda x: x * constant), [(3,)]))
