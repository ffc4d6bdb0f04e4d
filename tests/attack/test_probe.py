"""Points that branch and bound comes across, tried as counterexamples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from abcrown_dist.attack.probe import Probe, Tried
from abcrown_dist.spec.property import Property
from abcrown_dist.spec.vnnlib1 import parse_vnnlib
from abcrown_dist.util.deadline import Deadline
from tests import flow


def square(x: Tensor) -> Tensor:
    """y = x0^2 + x1."""
    return (x[:, :1] ** 2 + x[:, 1:]).to(x.dtype)


def prop(*clauses: str) -> Property:
    text = flow.declare(2, 1) + flow.box([(-2, 2), (0, 1)])
    return parse_vnnlib(f"{text}(assert (or {' '.join(clauses)}))")


def probe(of: Property, **options: int) -> Probe:
    return Probe(square, of, torch.float32, 0, Deadline(), **options)


def points(*rows: tuple[float, float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def told(tried: Tried) -> list[tuple[int, list[float]]]:
    return [(disjunct, x.tolist()) for disjunct, x in tried.promising()]


def test_a_point_that_fulfils_its_disjunct_is_promising() -> None:
    tried = probe(prop("(<= Y_0 -9)", "(<= Y_0 0.5)")).measure([1, 1], points((2, 1), (0.5, 0.25)))
    assert told(tried) == [(1, [0.5, 0.25])]
    assert tried.missing[0] > 0 >= tried.missing[1]


def test_each_point_is_tried_against_its_own_disjunct() -> None:
    """The second point would fulfil the disjunct of the first."""
    tried = probe(prop("(<= Y_0 4)", "(<= Y_0 -9)")).measure([1, 0], points((0, 0), (1, 0.5)))
    assert tried.owners.tolist() == [1, 0]
    assert told(tried) == [(0, [1.0, 0.5])]


def test_points_outside_are_moved_into_the_box() -> None:
    tried = probe(prop("(<= Y_0 4.5)")).measure([0], points((9.0, -3.0)))
    assert told(tried) == [(0, [2.0, 0.0])]


def test_a_short_descent_finds_what_no_point_is() -> None:
    of = probe(prop("(<= Y_0 0.3)"))
    tried = of.measure([0, 0], points((1.9, 1.0), (0.9, 0.4)))
    assert told(tried) == []
    found = told(of.descend(tried))
    assert found
    for disjunct, x in found:
        assert disjunct == 0 and x[0] ** 2 + x[1] <= 0.3 + 1e-6
        assert -2 <= x[0] <= 2 and 0 <= x[1] <= 1


def test_what_cannot_be_fulfilled_is_never_claimed() -> None:
    of = probe(prop("(<= Y_0 -0.001)"))
    tried = of.measure([0] * 40, points(*[(0.0, 0.0)] * 40))
    assert told(tried) == []
    assert told(of.descend(tried.select(torch.arange(16)))) == []


def test_only_a_few_points_are_to_be_confirmed() -> None:
    tried = probe(prop("(<= Y_0 9)")).measure([0] * 40, points(*[(k / 80, 0.1) for k in range(40)]))
    assert int((tried.missing <= 0).sum()) == 40
    assert [x[0] for _, x in told(tried)] == [float(torch.tensor(k / 80)) for k in range(8)]


def test_the_same_points_give_the_same_descent() -> None:
    of = prop("(<= Y_0 0.3)")
    start = points((1.5, 0.9))
    first, second = (probe(of).descend(probe(of).measure([0], start)) for _ in range(2))
    assert torch.equal(first.x, second.x) and torch.equal(first.missing, second.missing)


@pytest.mark.parametrize("count", [1, 3, 4, 9])
def test_in_slices_points_come_back_one_by_one(count: int) -> None:
    """Filled up where there are fewer: what is filled up with does not come back."""
    of = prop("(<= Y_0 0.3)", "(<= Y_0 0.1)")
    sizes: list[int] = []

    def watched(x: Tensor) -> Tensor:
        sizes.append(len(x))
        return square(x)

    random = torch.rand(count, 2, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    owners = [k % 2 for k in range(count)]
    sliced = Probe(watched, of, torch.float32, 0, Deadline(), slice=4, most=5)
    tried = sliced.measure(owners, random)
    assert set(sizes) == {4} and len(sizes) == -(-count // 4)
    whole = probe(of, most=5).measure(owners, random)
    assert tried.owners.tolist() == owners
    assert torch.equal(tried.x, whole.x) and torch.equal(tried.missing, whole.missing)
    few = tried.select(torch.arange(min(count, 5)))
    sizes.clear()
    ended = sliced.descend(few)
    assert set(sizes) == {5}
    assert ended.owners.tolist() == owners[:5] and len(ended.x) == len(ended.missing) == min(count, 5)
    assert bool((ended.missing <= few.missing).all())


def test_a_selection_keeps_what_belongs_together() -> None:
    tried = Tried(torch.tensor([5, 6, 7]), points((1, 2), (3, 4), (5, 6)), torch.tensor([1.0, 0.0, -1.0]))
    some = tried.select(torch.tensor([2, 0]))
    assert some.owners.tolist() == [7, 5] and some.missing.tolist() == [-1.0, 1.0]
    assert told(some) == [(7, [5.0, 6.0])]
