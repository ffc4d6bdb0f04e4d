"""What is demanded of HiGHS's bound: the margin, by hand on one neuron, and that it is subtracted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from abcrown_dist.exact import integer
from abcrown_dist.exact.encode import encode
from abcrown_dist.exact.expression import widen
from abcrown_dist.exact.highs import IntegerSolution
from abcrown_dist.exact.integer import FEASIBILITY, integer_minimum, leak
from abcrown_dist.exact.program import Program
from abcrown_dist.graph.load_torch import load_torch
from abcrown_dist.weights.local import LocalWeights

Array = np.ndarray


def chain(*factors: float, big: float = 1.0) -> tuple[Program, Array]:
    """x -> w_1 relu -> ... -> w_k with x in [-1, 1], bounds +-big |w_1 ... w_i|, and the output as a cost."""
    modules: list[nn.Module] = []
    for factor in factors:
        layer = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.fill_(factor)
        modules += [layer, nn.ReLU()]
    graph = load_torch(nn.Sequential(*modules[:-1]), torch.zeros(1, 1).double()).graph
    reach, bounds = big, {}
    for factor, node in zip(factors, (node for node in graph if node.op == "relu"), strict=False):
        reach *= abs(factor)
        bounds[node.inputs[0]] = np.full(1, -reach), np.full(1, reach)
    encoding = encode(LocalWeights(graph, torch.float64), -np.ones(1), np.ones(1), bounds, as_given=True)
    program = encoding.program
    output = encoding.expressions[graph.outputs[0]]
    return program, widen(output.E, program.columns).toarray().reshape(-1)


def test_one_neuron_leaks_its_constant_in_each_of_its_rows() -> None:
    """y = 5 relu(4 x): each of three rows gives way by the tolerance times its scale, y by 5 times that."""
    program, cost = chain(4.0, 5.0)
    rows = [(group.kind, float(group.scale[0])) for group in program.groups]
    assert [kind for kind, _ in rows] == ["lower", "off", "on"]
    assert leak(program, cost) == pytest.approx(FEASIBILITY * 5 * sum(scale for _, scale in rows))


def test_leaks_are_carried_through_later_layers() -> None:
    """y = 5 relu(3 relu(4 x)): what the first neuron leaks arrives 15-fold."""
    program, cost = chain(4.0, 3.0, 5.0)
    worth = {program.groups[0].node: 15.0, program.groups[-1].node: 5.0}
    assert len(worth) == 2
    wanted = FEASIBILITY * sum(worth[group.node] * float(group.scale[0]) for group in program.groups)
    assert leak(program, cost) == pytest.approx(wanted)


def test_leaks_grow_with_the_constants() -> None:
    tight, loose = leak(*chain(4.0, 5.0)), leak(*chain(4.0, 5.0, big=2.0**10))
    assert 2**9 * tight < loose < 2**11 * tight


def test_the_margin_is_subtracted(monkeypatch: pytest.MonkeyPatch) -> None:
    program, cost = chain(-1.0, -5.0, big=64.0)
    found = integer_minimum(program, cost)
    assert found is not None and found.optimal
    assert found.margin >= leak(program, cost) > 1e-4
    assert found.value == pytest.approx(-5.0 - found.margin, abs=1e-5)

    def exact(scaled: Array, *_: object, **__: object) -> IntegerSolution:
        return IntegerSolution(True, -5.0 * float(np.abs(scaled).sum() / np.abs(cost).sum()), 0.0, None, 0)

    monkeypatch.setattr(integer, "solve_milp", exact)
    again = integer_minimum(program, cost)
    assert again is not None
    assert again.value == pytest.approx(-5.0 - again.margin, abs=1e-9)
