"""The ranks as a mesh: how many share weights, who is in which group, and how copies tell each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from abcrown_dist.config.schema import Parallel
from abcrown_dist.parallel.group import Group
from abcrown_dist.parallel.mesh import Mesh, degrees
from abcrown_dist.util.errors import ConfigError, DeadlineExceeded
from tests.parallel.pool import Pool

Pools = Callable[[int], Pool]


@pytest.mark.parametrize("mode", ["fsdp", "tp"])
@pytest.mark.parametrize(
    ("shards", "domain", "size", "expected"),
    [
        ("auto", "auto", 1, (1, 1)),
        ("auto", "auto", 4, (4, 1)),
        (2, "auto", 4, (2, 2)),
        ("auto", 2, 4, (2, 2)),
        ("auto", 4, 4, (1, 4)),
        (1, "auto", 4, (1, 4)),
        (3, 2, 6, (3, 2)),
    ],
)
def test_degrees_of_ranks_that_share_weights(
    mode: str, shards: int | str, domain: int | str, size: int, expected: tuple[int, int]
) -> None:
    assert degrees(Parallel(mode=mode, shards=shards, domain=domain), size) == expected


@pytest.mark.parametrize(("shards", "domain"), [("auto", "auto"), (1, "auto"), ("auto", 4), (1, 4)])
def test_under_none_every_rank_has_a_copy(shards: int | str, domain: int | str) -> None:
    assert degrees(Parallel(mode="none", shards=shards, domain=domain), 4) == (1, 4)


NOT_THE_SIZE = "parallel.shards {} times parallel.domain {} is not {}, the number of ranks"


@pytest.mark.parametrize(
    ("mode", "shards", "domain", "size", "message"),
    [
        ("none", 2, "auto", 4, "parallel.mode: none shares no weights, not among 2 ranks"),
        ("none", "auto", 2, 4, NOT_THE_SIZE.format(1, 2, 4)),
        ("fsdp", 3, "auto", 4, NOT_THE_SIZE.format(3, 1, 4)),
        ("fsdp", 8, "auto", 4, NOT_THE_SIZE.format(8, 1, 4)),
        ("tp", "auto", 3, 4, NOT_THE_SIZE.format(1, 3, 4)),
        ("tp", "auto", 8, 4, NOT_THE_SIZE.format(1, 8, 4)),
        ("tp", 2, 2, 2, NOT_THE_SIZE.format(2, 2, 2)),
        ("fsdp", 2, "auto", 1, NOT_THE_SIZE.format(2, 1, 1)),
    ],
)
def test_degrees_that_do_not_fit(
    mode: str, shards: int | str, domain: int | str, size: int, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        degrees(Parallel(mode=mode, shards=shards, domain=domain), size)
    assert str(caught.value) == message


def members(group: Group) -> list[int]:
    """World ranks of a group of several, by their place in it."""
    return [int(rank) for rank in group.gather_all(torch.tensor([dist.get_rank()])).flatten()]


def seated(group: Group, mode: str, shards: int) -> tuple[list[int], list[int], list[int], list[int], bool]:
    mesh = Mesh.of(group, Parallel(mode=mode, shards=shards))
    again = Mesh.of(group, Parallel(mode=mode, shards=shards))
    kept = again.weights is mesh.weights and again.across is mesh.across
    assert [members(part)[part.rank] for part in (mesh.world, mesh.domains)] == [group.rank] * 2
    return (
        members(mesh.world), members(mesh.weights) if mesh.weights.size > 1 else [group.rank],
        members(mesh.across) if mesh.across.size > 1 else [group.rank],
        members(mesh.domains), kept,
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["fsdp", "tp"])
def test_four_ranks_as_two_copies_of_two(pools: Pools, mode: str) -> None:
    """World rank = copy * shards + place."""
    everyone = [0, 1, 2, 3]
    for rank, (world, weights, across, domains, kept) in enumerate(pools(4).run(seated, mode, 2)):
        copy, place = divmod(rank, 2)
        assert world == everyone
        assert weights == [2 * copy, 2 * copy + 1]
        assert across == [place, 2 + place]
        assert domains == (across if mode == "tp" else everyone)
        assert kept  # groups are made once


@pytest.mark.parametrize(("mode", "shards"), [("none", 1), ("fsdp", 4)])
def test_one_copy_and_one_rank_a_copy_need_no_further_groups(pools: Pools, mode: str, shards: int) -> None:
    for rank, (world, weights, across, domains, _) in enumerate(pools(4).run(seated, mode, shards)):
        assert world == domains == [0, 1, 2, 3]
        assert weights == (world if shards == 4 else [rank])
        assert across == ([rank] if shards == 4 else world)


def together(group: Group, mode: str, shards: int, late: tuple[int, ...]) -> list[tuple[int, str]] | str:
    mesh = Mesh.of(group, Parallel(mode=mode, shards=shards))
    copy = group.rank // shards

    def work() -> tuple[int, str]:
        if copy in late:
            raise DeadlineExceeded(f"copy {copy} is late")
        return copy, "x" * copy

    try:
        return mesh.together(work)
    except DeadlineExceeded as error:
        return str(error)


@pytest.mark.parametrize(("mode", "shards"), [("none", 1), ("fsdp", 2), ("tp", 2), ("fsdp", 4)])
def test_what_copies_find_comes_in_their_order(pools: Pools, mode: str, shards: int) -> None:
    expected = [(copy, "x" * copy) for copy in range(4 // shards)]
    assert pools(4).run(together, mode, shards, ()) == [expected] * 4


@pytest.mark.parametrize("late", [(0,), (1,), (0, 1)])
def test_a_copy_out_of_time_is_all_of_them_out_of_time(pools: Pools, late: tuple[int, ...]) -> None:
    found = pools(4).run(together, "fsdp", 2, late)
    for rank, message in enumerate(found):
        assert message == f"copy {rank // 2 if rank // 2 in late else late[0]} is late"


def test_one_process_is_a_mesh() -> None:
    mesh = Mesh()
    assert mesh.together(lambda: 7) == [7]
    assert dataclasses.astuple(mesh.world)[:2] == (0, 1)
    with pytest.raises(DeadlineExceeded):
        mesh.together(lambda: (_ for _ in ()).throw(DeadlineExceeded("late")))
