"""The queue of open domains against a plain sorted list."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from abcrown_dist.bab import store as module
from abcrown_dist.bab.domains import Domains
from abcrown_dist.bab.store import Store

CPU = torch.device("cpu")


def domains(
    margins: list[float], idents: list[int], goals: list[int] | None = None, columns: int = 1
) -> Domains:
    """Domains whose state repeats their identity, so that mixed-up rows show."""
    ident = torch.tensor(idents)
    return Domains(
        margin=torch.tensor(margins, dtype=torch.float64),
        goal=torch.tensor(goals or [0] * len(idents)),
        ident=ident,
        depth=ident % 7,
        state={"twin": ident[:, None].repeat(1, columns), "fixed": ident[:, None].float()},
    )


def check(taken: Domains, expected: list[tuple[float, int]]) -> None:
    assert taken.margin.tolist() == [margin for margin, _ in expected]
    idents = [ident for _, ident in expected]
    assert taken.ident.tolist() == idents
    assert taken.depth.tolist() == [ident % 7 for ident in idents]
    assert taken.state["twin"][:, 0].tolist() == idents
    assert taken.state["fixed"][:, 0].tolist() == idents


@pytest.mark.parametrize("seed", range(20))
def test_any_course_takes_what_a_sorted_list_takes(seed: int) -> None:
    random = np.random.default_rng(seed)
    store, plain, following = Store(CPU), list[tuple[float, int]](), 0
    for _ in range(60):
        if random.random() < 0.5 or not plain:
            count = int(random.integers(0, 9))
            margins = random.integers(-5, 5, count).astype(float).tolist()  # many ties
            idents = (random.permutation(count) + following).tolist()
            following += count
            store.insert(domains(margins, idents, columns=int(random.integers(1, 4))))
            plain += zip(margins, idents, strict=True)
        else:
            count = int(random.integers(1, 7))
            plain.sort()
            check(store.take(count), plain[:count])
            plain = plain[count:]
        assert len(store) == len(plain)
        assert store.worst() == min([margin for margin, _ in plain], default=math.inf)
    plain.sort()
    if plain:
        check(store.take(10**6), plain)
    assert len(store) == 0 and store.bytes() == 0 and store.goals() == set()


def test_order_does_not_depend_on_arrival() -> None:
    margins, idents = [0.5, -1.0, 0.5, 0.25, -1.0], [5, 4, 3, 2, 1]
    orders = []
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        store = Store(CPU)
        for index in order:
            store.insert(domains([margins[index]], [idents[index]]))
        orders.append(store.take(5).ident.tolist())
    assert orders[0] == orders[1] == [1, 4, 2, 3, 5]


def test_what_is_not_a_number_comes_first_and_stays_what_it_is() -> None:
    store = Store(CPU)
    store.insert(domains([-7.0, math.nan, -math.inf], [1, 2, 3]))
    assert store.worst() == -math.inf
    taken = store.take(2)
    assert sorted(taken.ident.tolist()) == [2, 3]
    assert taken.margin.isnan().tolist().count(True) == 1


def test_goals_are_those_of_open_domains() -> None:
    store = Store(CPU)
    store.insert(domains([1.0, 2.0], [1, 2], goals=[4, 6]))
    store.insert(domains([3.0], [3], goals=[9]))
    assert store.goals() == {4, 6, 9}
    store.take(1)
    assert store.goals() == {6, 9}


def test_shorter_decisions_are_filled_up_with_zeros() -> None:
    store = Store(CPU)
    store.insert(domains([1.0], [1], columns=1))
    store.insert(domains([0.0], [2], columns=3))
    assert store.take(2).state["twin"].tolist() == [[2, 2, 2], [1, 0, 0]]


def test_blocks_that_are_mostly_taken_are_let_go() -> None:
    store = Store(CPU)
    store.insert(domains([float(i) for i in range(1000)], list(range(1000))))
    whole = store.bytes()
    store.take(400)
    assert store.bytes() == whole  # not worth the copy yet
    store.take(200)
    assert store.bytes() == whole * 4 // 10
    check(store.take(3), [(600.0, 600), (601.0, 601), (602.0, 602)])


def test_beyond_the_limit_domains_wait_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cpu:0` stands for the host: tensors stay where they are, but it is not the device `cpu`."""
    moved: list[tuple[int, torch.device]] = []

    def to(self: Domains, device: torch.device) -> Domains:
        moved.append((len(self), device))
        return self

    host = torch.device("cpu", 0)
    monkeypatch.setattr(module, "_HOST", host)
    monkeypatch.setattr(Domains, "to", to)
    one = domains([1.0], [1])
    store = Store(CPU, device_bytes=2 * one.bytes())
    store.insert(one)
    store.insert(one)
    assert moved == []
    store.insert(domains([3.0, 0.0], [3, 2]))
    assert moved == [(2, host)]
    moved.clear()
    assert store.take(1).ident.tolist() == [2]
    assert moved == [(1, CPU)]  # whatever is taken comes to the device


def test_on_the_cpu_there_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(CPU, device_bytes=0)
    with monkeypatch.context() as patch:
        patch.delattr(Domains, "to")
        store.insert(domains([1.0], [1]))
    assert len(store) == 1


@pytest.mark.parametrize("count", [1, 3, 7, 20])
def test_spread_takes_urgent_and_less_urgent_domains_alike(count: int) -> None:
    store = Store(CPU)
    store.insert(domains([float(k) for k in range(7)], list(range(7))))
    taken = store.spread(count)
    idents = taken.ident.tolist()
    assert idents == [k * 7 // min(count, 7) for k in range(min(count, 7))]
    left = [block.ident.tolist() for block in store.everything()]
    assert sorted(idents + [ident for part in left for ident in part]) == list(range(7))


def test_the_front_is_what_would_be_taken_and_stays() -> None:
    store = Store(CPU)
    store.insert(domains([2.0, math.nan, 1.0, 1.0], [3, 4, 9, 5]))
    margin, ident = store.front(3)
    assert ident.tolist() == [4, 5, 9] and margin.tolist() == [-math.inf, 1.0, 1.0]
    assert len(store) == 4 and store.take(3).ident.tolist() == [4, 5, 9]
