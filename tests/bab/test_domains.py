"""Identities of domains, and batches of them put together."""

from __future__ import annotations

import torch

from abcrown_dist.bab.domains import Domains, child_ident, concatenate, pad_last


def test_identities_do_not_collide() -> None:
    """A tree of 2^17 paths: neurons by depth, both signs, several goals."""
    level = child_ident(torch.zeros(4, dtype=torch.int64), torch.arange(4))
    seen = [level]
    for depth in range(15):
        neuron = torch.full_like(level, depth % 5)
        level = torch.cat([child_ident(level, neuron, torch.full_like(level, sign)) for sign in (1, -1)])
        seen.append(level)
    every = torch.cat(seen)
    assert len(every) > 10**5
    assert len(every.unique()) == len(every)


def test_an_identity_depends_on_the_path_alone() -> None:
    """Not on who else is in the batch, nor in which order."""
    parents, neurons, signs = torch.arange(50), torch.arange(50) % 7, torch.arange(50) % 2 * 2 - 1
    together = child_ident(parents, neurons, signs)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(child_ident(parents[order], neurons[order], signs[order]), together[order])
    assert torch.equal(child_ident(parents[7:8], neurons[7:8], signs[7:8]), together[7:8])


def test_every_part_of_a_decision_counts() -> None:
    parent = torch.zeros(1, dtype=torch.int64)
    decisions = [(0, 1), (0, -1), (1, 1), (1, -1), (-1, 0), (1, 0)]
    found = {int(child_ident(parent, torch.tensor([a]), torch.tensor([b]))) for a, b in decisions}
    assert len(found) == len(decisions)
    assert int(child_ident(parent, torch.tensor([1]))) != int(child_ident(parent + 1, torch.tensor([1])))


def test_identities_use_all_bits() -> None:
    found = child_ident(torch.arange(10000), torch.zeros(10000, dtype=torch.int64))
    share = torch.stack([(found >> bit & 1).double().mean() for bit in range(64)])
    assert ((share - 0.5).abs() < 0.03).all()


def test_smaller_integers_give_the_same_identity() -> None:
    parent = torch.zeros(3, dtype=torch.int64)
    wide, narrow = torch.tensor([-1, 1, 5]), torch.tensor([-1, 1, 5], dtype=torch.int8)
    assert torch.equal(child_ident(parent, wide), child_ident(parent, narrow))


def batch(count: int, columns: int, first: int = 0) -> Domains:
    number = torch.arange(first, first + count)
    values = number[:, None].repeat(1, columns)
    return Domains(
        number.double(), number, number, number, {"values": values, "rows": values[:, None].repeat(1, 2, 1)}
    )


def test_batches_of_different_length_are_put_together() -> None:
    joined = concatenate([batch(2, 1, 1), batch(1, 3, 3)])
    assert joined.ident.tolist() == [1, 2, 3]
    assert joined.state["values"].tolist() == [[1, 0, 0], [2, 0, 0], [3, 3, 3]]
    assert joined.state["rows"].shape == (3, 2, 3)
    assert len(joined) == 3


def test_selection_takes_numbers_masks_and_slices() -> None:
    whole = batch(4, 2)
    for index in (torch.tensor([1, 2]), torch.tensor([False, True, True, False]), slice(1, 3)):
        part = whole.select(index)
        assert part.ident.tolist() == part.state["values"][:, 0].tolist() == [1, 2]
    assert whole.bytes() == 2 * part.bytes()


def test_padding_adds_zeros_at_the_end() -> None:
    value = torch.ones(2, 3, 1)
    assert pad_last(value, 3).tolist() == [[[1, 0, 0]] * 3] * 2
    assert pad_last(value, 1) is value
