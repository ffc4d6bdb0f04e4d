"""Groups of rows against the trees that they stand for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from abcrown_dist.spec import junctions

Tree = list[Any]
"""A conjunction: of rows (their numbers) and of disjunctions, which are tuples of conjunctions."""


def random_tree(draw: random.Random, depth: int, counter: Iterator[int]) -> Tree:
    items: Tree = [next(counter) for _ in range(draw.randint(1, 2))]
    for _ in range(draw.randint(0, 2) if depth else 0):
        items.append(tuple(random_tree(draw, depth - 1, counter) for _ in range(draw.randint(2, 3))))
    return items


def paths(tree: Tree, outside: tuple[int, ...] = ()) -> Iterator[tuple[int, tuple[int, ...]]]:
    for item in tree:
        if isinstance(item, int):
            yield item, outside
            continue
        first = item[0][0]
        for alternative in item:
            yield from paths(alternative, (alternative[0], first, *outside))


def groups_of(tree: Tree) -> np.ndarray:
    found = dict(paths(tree))
    depth = max(2, *(len(path) for path in found.values()), 2)
    return np.array([[r] * (depth - len(found[r])) + list(found[r]) for r in range(len(found))]).T


def value(tree: Tree, values: list[float]) -> float:
    parts = [values[i] if isinstance(i, int) else min(value(a, values) for a in i) for i in tree]
    return max(parts)


def holds(tree: Tree, values: list[bool]) -> bool:
    return all(values[i] if isinstance(i, int) else any(holds(a, values) for a in i) for i in tree)


def cases(seed: int) -> tuple[random.Random, Tree, np.ndarray]:
    draw = random.Random(seed)
    counter = iter(range(10_000))
    tree = random_tree(draw, draw.randint(0, 3), counter)
    return draw, tree, groups_of(tree)


@pytest.mark.parametrize("seed", range(40))
def test_fold(seed: int) -> None:
    draw, tree, groups = cases(seed)
    count = groups.shape[1]
    batch = [[draw.uniform(-1, 1) for _ in range(count)] for _ in range(5)]
    index = torch.from_numpy(groups)[:, None].expand(-1, 5, -1)
    margins = torch.tensor(batch, dtype=torch.float64)
    expected = torch.tensor([value(tree, row) for row in batch], dtype=torch.float64)
    assert torch.equal(junctions.fold(margins, index).amax(1), expected)
    best, row = junctions.decisive(margins, index).max(1)
    assert torch.equal(best, expected)
    assert torch.equal(margins.gather(1, row[:, None])[:, 0], expected)
    proven = torch.tensor([value(tree, [float(x > 0.3) for x in row]) > 0 for row in batch])
    assert torch.equal(junctions.fold(margins > 0.3, index).any(1), proven)


def test_without_groups_every_row_is_its_own_factor() -> None:
    margins = torch.tensor([[1.0, -2.0]])
    assert torch.equal(junctions.fold(margins, None), margins)
    assert torch.equal(junctions.decisive(margins, None), margins)
    assert junctions.fulfilled_by_all(margins > 0, None).all()
    assert junctions.direct(None, 3).all()


@pytest.mark.parametrize("seed", range(40))
def test_cases_together_say_the_same(seed: int) -> None:
    draw, tree, groups = cases(seed)
    count = groups.shape[1]
    pending: list[tuple[np.ndarray, np.ndarray | None]] = [(np.arange(count), groups)]
    choices = []
    while pending:
        rows, joined = pending.pop()
        if joined is None or junctions.direct(joined, len(rows)).all():
            choices.append(rows)
            continue
        parts = junctions.branch(joined)
        assert len(parts) >= 2
        pending += [(rows[kept], rest) for kept, rest in parts]
    for _ in range(30):
        values = [draw.random() < 0.7 for _ in range(count)]
        assert any(all(values[r] for r in rows) for rows in choices) == holds(tree, values)


@pytest.mark.parametrize("seed", range(40))
def test_what_every_counterexample_fulfils(seed: int) -> None:
    """Never a row without which the tree can hold; and what stands directly, always."""
    draw, tree, groups = cases(seed)
    count = groups.shape[1]
    index = torch.from_numpy(groups)[:, None]
    for _ in range(20):
        refuted = [draw.random() < 0.3 for _ in range(count)]
        shared = junctions.fulfilled_by_all(torch.tensor([refuted]), index)[0].tolist()
        possible = [not item for item in refuted]
        if not holds(tree, possible):
            continue
        for row in range(count):
            without = [item and r != row for r, item in enumerate(possible)]
            needed = not holds(tree, without)
            assert not shared[row] or needed
            if needed and junctions.direct(groups, count)[row]:
                assert shared[row]


def test_the_last_alternative_counts() -> None:
    groups = torch.tensor([[0, 1, 1, 3], [0, 1, 1, 1]])[:, None]  # row 0 and (rows 1 and 2, or row 3)
    shared = junctions.fulfilled_by_all(torch.tensor([[False, False, False, True]]), groups)
    assert shared.tolist() == [[True, True, True, False]]
    shared = junctions.fulfilled_by_all(torch.tensor([[False, False, False, False]]), groups)
    assert shared.tolist() == [[True, False, False, False]]
