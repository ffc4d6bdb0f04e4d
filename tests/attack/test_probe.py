"""Points that branch and bound comes across, tried as counterexamples."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import torch
from torch import Tensor

from abcrown_dist.attack.probe import Probe
from abcrown_dist.spec.property import Property, Witness
from abcrown_dist.spec.vnnlib1 import parse_vnnlib
from abcrown_dist.util.deadline import Deadline
from tests import flow


def square(x: Tensor) -> Tensor:
    """y = x0^2 + x1."""
    return (x[:, :1] ** 2 + x[:, 1:]).to(x.dtype)


def prop(*clauses: str) -> Property:
    text = flow.declare(2, 1) + flow.box([(-2, 2), (0, 1)])
    return parse_vnnlib(f"{text}(assert (or {' '.join(clauses)}))")


class Judge:
    """Confirms what fulfils y <= bound, and remembers what it was asked."""

    def __init__(self, answer: bool = True) -> None:
        self.asked: list[tuple[tuple[float, ...], int]] = []
        self.answer = answer

    def __call__(self, x: np.ndarray, disjunct: int) -> Witness | None:
        self.asked.append((tuple(x.tolist()), disjunct))
        return Witness([Decimal(v) for v in x.tolist()], [], disjunct) if self.answer else None


def probe(of: Property, judge: Judge) -> Probe:
    return Probe(square, of, judge, torch.float32, 0, Deadline())


def points(*rows: tuple[float, float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_a_point_that_fulfils_its_disjunct_is_confirmed() -> None:
    judge = Judge()
    of = prop("(<= Y_0 -9)", "(<= Y_0 0.5)")
    found = probe(of, judge)([1, 1], points((2, 1), (0.5, 0.25)))
    assert found is not None and found.disjunct == 1
    assert judge.asked == [((0.5, 0.25), 1)]


def test_each_point_is_tried_against_its_own_disjunct() -> None:
    """The second point would fulfil the disjunct of the first."""
    judge = Judge()
    of = prop("(<= Y_0 4)", "(<= Y_0 -9)")
    found = probe(of, judge)([1, 0], points((0, 0), (1, 0.5)))
    assert found is not None
    assert judge.asked == [((1.0, 0.5), 0)]


def test_points_outside_are_moved_into_the_box() -> None:
    judge = Judge()
    found = probe(prop("(<= Y_0 4.5)"), judge)([0], points((9.0, -3.0)))
    assert found is not None
    assert judge.asked == [((2.0, 0.0), 0)]


def test_a_short_descent_finds_what_no_point_is() -> None:
    judge = Judge()
    found = probe(prop("(<= Y_0 0.3)"), judge)([0, 0], points((1.9, 1.0), (0.9, 0.4)))
    assert found is not None
    ((x, disjunct),) = judge.asked
    assert disjunct == 0 and x[0] ** 2 + x[1] <= 0.3


def test_what_cannot_be_fulfilled_is_never_claimed() -> None:
    judge = Judge()
    assert probe(prop("(<= Y_0 -0.001)"), judge)([0] * 40, points(*[(0.0, 0.0)] * 40)) is None
    assert judge.asked == []


def test_what_is_not_confirmed_is_not_a_witness() -> None:
    judge = Judge(answer=False)
    assert probe(prop("(<= Y_0 9)"), judge)([0] * 40, points(*[(0.1, 0.1)] * 40)) is None
    assert 1 <= len(judge.asked) <= 16  # a few of the points, a few of the descents' ends


def test_the_same_points_give_the_same_witness() -> None:
    of = prop("(<= Y_0 0.3)")
    found = [probe(of, Judge())([0], points((1.5, 0.9))) for _ in range(2)]
    assert found[0] is not None and found[0] == found[1]
