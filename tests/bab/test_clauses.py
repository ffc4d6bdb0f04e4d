"""Properties as batches of rows: everything in its place, padding inert, rounding accounted for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from abcrown_dist.bab.clauses import batches
from abcrown_dist.spec.property import Property
from abcrown_dist.weights.local import LocalWeights
from tests.bab.problems import Identity, box, disjunct, network, problem
from tests.bounds import zoo

A, B, C = (box([low] * 3, [low + 1] * 3) for low in (0.0, 1.0, 2.0))


def mixed() -> Property:
    """Three boxes with 4, 1 and 3 rows; one disjunct without constraints, one with inputs."""
    random = np.random.default_rng(0)
    return problem(
        disjunct(A, random.normal(size=(2, 2)), [0.5, -0.5]),
        disjunct(B, random.normal(size=(1, 2)), 1.5),
        disjunct(A, random.normal(size=(2, 2)), [2.5, 3.5], random.normal(size=(2, 3))),
        disjunct(C, random.normal(size=(3, 2)), [4.5, 5.5, 6.5]),
        disjunct(B, np.zeros((0, 2)), np.zeros(0)),
    )


@pytest.fixture
def weights() -> LocalWeights:
    torch.manual_seed(0)
    return network(zoo.Mlp(3, 4, 2), 3, torch.float64)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 10])
def test_every_row_appears_once_with_its_box(weights: LocalWeights, batch_size: int) -> None:
    prop = mixed()
    (output,), (source,) = weights.graph.outputs, weights.graph.inputs
    seen: dict[int, list[tuple[float, ...]]] = {}
    for clauses in batches(prop, weights, range(5), batch_size):
        assert clauses.box.domains <= batch_size
        count = clauses.rhs.shape[1]
        assert clauses.rhs.shape == clauses.disjunct.shape == (clauses.box.domains, count)
        for b in range(clauses.box.domains):
            for r in range(count):
                owner = int(clauses.disjunct[b, r])
                row = clauses.rows[output][b, r].flatten()
                inputs = clauses.rows[source][b, r].flatten() if source in clauses.rows else torch.zeros(3)
                if owner < 0:
                    assert clauses.rhs[b, r] == np.inf and not row.any() and not inputs.any()
                    continue
                low = [float(x) for x in prop.disjuncts[owner].box.lower]
                assert clauses.box.lower[source][b].flatten().tolist() == low
                seen.setdefault(owner, []).append((*row.tolist(), *inputs.tolist(), float(clauses.rhs[b, r])))
    for index, item in enumerate(prop.disjuncts[:4]):
        D = np.zeros((len(item.rhs), 3)) if item.D is None else item.D
        assert seen[index] == [tuple(row) for row in np.hstack([item.C, D, item.rhs[:, None]]).tolist()]
    assert 4 not in seen, "a disjunct without constraints has no row that could refute it"


def test_only_what_is_wanted(weights: LocalWeights) -> None:
    (clauses,) = batches(mixed(), weights, [1, 2], 10)
    assert set(clauses.disjunct.flatten().tolist()) == {-1, 1, 2}
    assert list(batches(mixed(), weights, [], 10)) == []
    assert list(batches(mixed(), weights, [4], 10)) == []


def test_refuted_and_content(weights: LocalWeights) -> None:
    (clauses,) = batches(mixed(), weights, range(5), 10)
    nothing = torch.zeros_like(clauses.disjunct, dtype=torch.bool)
    assert clauses.refuted(nothing) == set()
    assert clauses.refuted(~nothing) == {0, 1, 2, 3}, "padding belongs to nobody"
    one = nothing.clone()
    one[tuple(torch.nonzero(clauses.disjunct == 3)[1])] = True
    assert clauses.refuted(one) == {3}, "one row is enough"
    every = torch.arange(clauses.rhs.shape[1])
    assert not clauses.content(one, every)
    proven = nothing.clone()
    for owner in range(4):
        proven[tuple(torch.nonzero(clauses.disjunct == owner)[0])] = True
    assert clauses.content(proven, every)
    some = every[:1]
    assert clauses.content(clauses.disjunct[:, some] >= 0, some)
    assert not clauses.content(nothing[:, some], some)


def test_identity_network_adds_inputs_and_outputs_up() -> None:
    """The output is the input: coefficients of Y and X meet on one node."""
    weights = network(Identity(), 2, torch.float64)
    prop = problem(disjunct(box([0, 0], [1, 1]), [[1.0, 2.0]], 0.0, [[10.0, -2.0]]))
    (clauses,) = batches(prop, weights, [0], 4)
    ((_, row),) = clauses.rows.items()
    assert row.flatten().tolist() == [11.0, 0.0]


def test_several_outputs_and_inputs_are_cut_in_order() -> None:
    graph = zoo.graph("two_inputs_two_outputs")
    weights = LocalWeights(graph, torch.float64)
    inputs, outputs = graph.input_size, graph.output_size
    where = box([0] * inputs, [1] * inputs)
    C, D = np.arange(1.0, outputs + 1), np.arange(1.0, inputs + 1)
    (clauses,) = batches(problem(disjunct(where, C, 0.0, D)), weights, [0], 4)
    assert torch.cat([clauses.rows[name].flatten() for name in graph.outputs]).tolist() == C.tolist()
    assert torch.cat([clauses.rows[name].flatten() for name in graph.inputs]).tolist() == D.tolist()


def test_boxes_and_coefficients_in_float32() -> None:
    """Boxes are rounded outward; what coefficients lose is written down."""
    weights = network(Identity(), 2, torch.float32)
    where = box(["0.1", "-0.3"], ["0.1", "0.7"])
    (clauses,) = batches(problem(disjunct(where, [[0.1, 1.0]], 0.0)), weights, [0], 4)
    ((name, row),) = clauses.rows.items()
    low, high = clauses.box.lower[name].double().flatten(), clauses.box.upper[name].double().flatten()
    for i, (written_low, written_high) in enumerate(zip(where.lower, where.upper, strict=True)):
        assert low[i].item() <= written_low and high[i].item() >= written_high
        assert high[i] - low[i] <= float(written_high - written_low) + 1e-7
    lost = clauses.lost[name].flatten().double()
    gap = abs(0.1 - row.flatten()[0].double().item())
    assert gap > 0
    assert gap <= lost[0] <= gap * 1.01
    assert lost[1] < 1e-15
