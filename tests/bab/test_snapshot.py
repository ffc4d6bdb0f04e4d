"""Searches as tensors: whoever writes and whoever takes them up, domains and root bounds stay bit for bit."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import pytest
import torch
from torch import Tensor

from abcrown_dist.bab.domains import Domains, concatenate
from abcrown_dist.bab.snapshot import domain_tensors, own_domains, root_bounds, root_tensors
from abcrown_dist.bab.splitter import Splitter
from abcrown_dist.bounds.propagate import bound_intermediate
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.bounds.types import Relaxed
from abcrown_dist.util.errors import LoadError
from abcrown_dist.weights.local import LocalWeights
from tests.bab.checkpoints import assert_same, bits
from tests.bab.splitters import input_splitter, one_batch, relu_splitter, weights_of
from tests.searches import FAMILIES, draw

Part = dict[str, Tensor]

DISJUNCTS = (2, 3, 5)
NEURONS = (1, 4, 5, 7, 8, 12, 13)  # numbers of the loose ones


@dataclass
class Holder:
    """What a snapshot asks of a splitter, on a rank that owns some of the loose neurons."""

    disjuncts: tuple[int, ...] = DISJUNCTS
    numbers: Sequence[int] = NEURONS

    def columns(self) -> Mapping[str, Tensor]:
        return {"alpha": torch.tensor(self.numbers, dtype=torch.int64)}


def splitter(*, disjuncts: tuple[int, ...] = DISJUNCTS, numbers: Sequence[int] = NEURONS) -> Splitter:
    return cast(Splitter, Holder(disjuncts, numbers))


def random_domains(count: int, decisions: int = 3, seed: int = 0) -> Domains:
    """Random bit patterns in all that is no number of a goal; slopes of all `NEURONS`."""
    random = torch.Generator().manual_seed(seed)
    return Domains(
        margin=bits(torch.float64, count, seed=seed),
        goal=torch.randint(len(DISJUNCTS), (count,), generator=random),
        ident=bits(torch.int64, count, seed=seed + 1),
        depth=torch.randint(9, (count,), generator=random),
        state={
            "neuron": torch.randint(14, (count, decisions), generator=random, dtype=torch.int32),
            "sign": torch.randint(-1, 2, (count, decisions), generator=random, dtype=torch.int8),
            "alpha": bits(torch.float32, count, 2, len(NEURONS), seed=seed + 2),
            "beta": bits(torch.float32, count, 2, decisions, seed=seed + 3),
            "row": torch.randint(2, (count, 1), generator=random),
        },
    )


def cut(domains: Domains, numbers: Sequence[int]) -> Domains:
    """The same domains on a rank that owns some of `NEURONS`."""
    places = [NEURONS.index(number) for number in numbers]
    state = dict(domains.state)
    return dataclasses.replace(domains, state={**state, "alpha": state["alpha"][..., places]})


def rows(blocks: Sequence[Domains]) -> list[bytes]:
    """Every domain as bytes, sorted: a multiset that can be compared bit for bit."""
    found = []
    for block in blocks:
        tensors = [block.margin, block.goal, block.ident, block.depth]
        tensors += [block.state[name] for name in sorted(block.state)]
        flat = [value.reshape(len(block), -1).contiguous().view(torch.uint8) for value in tensors]
        found += [bytes(row.tolist()) for row in torch.cat(flat, dim=1)]
    return sorted(found)


def taken_up(
    holders: Sequence[Sequence[int]], parts: Sequence[Part], count: int, numbers: Sequence[int] = NEURONS
) -> list[list[Domains]]:
    """What each of `count` holders gets."""
    own = splitter(numbers=numbers)
    return [
        own_domains(holders, lambda number: dict(parts[number]), DISJUNCTS, own, (place, count))
        for place in range(count)
    ]


@pytest.mark.parametrize("counts", [(1, 2, 4, 1), (4, 3, 1, 2), (1, 7, 1)], ids=str)
@pytest.mark.parametrize("total", [1, 5, 46])
def test_domains_from_holders_to_other_holders(counts: tuple[int, ...], total: int) -> None:
    """Each time all domains are there once, evenly dealt out, with all their tensors."""
    whole = random_domains(total)
    held = [[whole.select(slice(i, None, counts[0]))] for i in range(counts[0])]
    expected = rows([whole])
    for count in counts[1:]:
        parts = [domain_tensors(blocks, splitter()) for blocks in held]
        held = taken_up([[number] for number in range(len(parts))], parts, count)
        assert rows([block for blocks in held for block in blocks]) == expected
        shares = [sum(map(len, blocks)) for blocks in held]
        assert max(shares) - min(shares) <= 1


def test_blocks_of_a_rank_become_one() -> None:
    """Fewer decisions are filled up, and what a rank writes in several blocks is not lost."""
    blocks = [random_domains(3, decisions=2, seed=1), random_domains(4, decisions=5, seed=2)]
    part = domain_tensors(blocks, splitter())
    (found,) = own_domains([[0]], lambda _: part, DISJUNCTS, splitter(), (0, 1))
    assert rows([found]) == rows([concatenate(blocks)])
    assert found.state["neuron"].shape == (7, 5)


def test_a_holder_without_domains() -> None:
    whole = random_domains(6)
    parts: list[Part] = [{}, domain_tensors([whole], splitter()), {}]
    assert domain_tensors([], splitter()) == {}
    held = taken_up([[0], [1], [2]], parts, 2)
    assert rows([block for blocks in held for block in blocks]) == rows([whole])
    assert taken_up([[0], [2]], parts, 2) == [[], []]


HALVES = ((1, 5, 8), (4, 7, 12, 13))
CUTS = [HALVES, ((), NEURONS), tuple((number,) for number in NEURONS)]


@pytest.mark.parametrize("pieces", CUTS, ids=str)
def test_columns_that_ranks_own(pieces: tuple[tuple[int, ...], ...]) -> None:
    """Parts of the slopes become whole, whole ones are cut, and parts are cut in another way."""
    whole = random_domains(9)
    parts = [domain_tensors([cut(whole, own)], splitter(numbers=own)) for own in pieces]
    members = list(range(len(pieces)))
    (found,) = taken_up([members], parts, 1)
    assert rows(found) == rows([whole])
    for own in (*pieces, *HALVES):
        at_once = taken_up([[0]], [domain_tensors([whole], splitter())], 1, own)[0]
        assert rows(at_once) == rows([cut(whole, own)])
        assert rows(taken_up([members], parts, 1, own)[0]) == rows([cut(whole, own)])


def test_columns_of_two_copies_whose_ranks_cut_them_differently() -> None:
    """Two copies of two ranks each; taken up by two copies, of which a rank owns one half."""
    first, second = random_domains(5), random_domains(8, seed=4)
    parts = [domain_tensors([cut(first, own)], splitter(numbers=own)) for own in HALVES]
    parts += [domain_tensors([cut(second, own)], splitter(numbers=own)) for own in reversed(HALVES)]
    held = taken_up([[0, 1], [2, 3]], parts, 2, HALVES[1])
    expected = rows([cut(domains, HALVES[1]) for domains in (first, second)])
    assert rows([block for blocks in held for block in blocks]) == expected


def test_fewer_columns_may_be_wanted_than_there_are() -> None:
    """Better root bounds leave fewer neurons loose."""
    whole = random_domains(4)
    (found,) = taken_up([[0]], [domain_tensors([whole], splitter())], 1, (12, 4))
    assert rows(found) == rows([cut(whole, (12, 4))])


@pytest.mark.parametrize(
    ("held", "wanted"), [(NEURONS, (1, 2)), (NEURONS, (14,)), ((), (1,)), (HALVES[0], NEURONS)]
)
def test_columns_that_are_missing_are_refused(held: Sequence[int], wanted: Sequence[int]) -> None:
    part = domain_tensors([cut(random_domains(4), held)], splitter(numbers=held))
    with pytest.raises(LoadError, match="other neurons"):
        taken_up([[0]], [part], 1, wanted)


@pytest.mark.parametrize("order", list(itertools.permutations(DISJUNCTS)), ids=str)
def test_goals_are_renumbered(order: tuple[int, ...]) -> None:
    """A domain stays with its disjunct, wherever that stands now."""
    whole = random_domains(30)
    part = domain_tensors([whole], splitter())
    (found,) = own_domains([[0]], lambda _: part, DISJUNCTS, splitter(disjuncts=order), (0, 1))
    assert torch.equal(found.ident, whole.ident)
    assert [order[goal] for goal in found.goal] == [DISJUNCTS[goal] for goal in whole.goal]


@pytest.mark.parametrize("others", [(), (2, 3), (2, 3, 4), (2, 3, 5, 7)], ids=str)
def test_other_disjuncts_are_refused(others: tuple[int, ...]) -> None:
    part = domain_tensors([random_domains(3)], splitter())
    with pytest.raises(LoadError, match="other disjuncts"):
        own_domains([[0]], lambda _: part, DISJUNCTS, splitter(disjuncts=others), (0, 1))


@pytest.mark.parametrize("kind", ["relu", "input"])
def test_domains_of_a_real_search(kind: str) -> None:
    """What splitters hold, after some rounds; bounds computed from what is taken up are the same."""
    case = draw("mlp", 3)
    case = dataclasses.replace(case, disjuncts=case.disjuncts[:1])
    make = relu_splitter if kind == "relu" else input_splitter
    own: Splitter = make(weights_of(case), case.property([-0.01]))
    domains = own.bound(own.roots()).domains
    for _ in range(3):
        domains = own.bound(own.branch(domains, 1).children).domains
    part = domain_tensors([domains], own)
    found = [own_domains([[0]], lambda _: part, own.disjuncts, own, (place, 2))[0] for place in range(2)]
    assert len(domains) >= 4 and rows(found) == rows([domains])
    again = [own.bound(block).domains for block in found]
    expected = own.bound(domains).domains
    order, wanted = torch.cat([block.ident for block in again]).argsort(), expected.ident.argsort()
    margins = torch.cat([block.margin for block in again])[order]
    torch.testing.assert_close(margins, expected.margin[wanted], rtol=1e-5, atol=1e-6)


def root_of(family: str, dtype: torch.dtype = torch.float32) -> tuple[LocalWeights, Relaxed]:
    case = draw(family, 1)
    weights = weights_of(case, dtype)
    clauses = one_batch(weights, case.property([-0.01] * len(case.disjuncts)))
    box = clauses.select(torch.tensor([0])).box
    return weights, bound_intermediate(weights, box, BoundSettings(method="crown"))


def as_tensors(relaxed: Relaxed) -> dict[str, Tensor]:
    """All bounds, sensitivities and lines by name."""
    found: dict[str, Tensor] = {}
    for name, item in relaxed.intervals.items():
        found |= {f"{side} of {name}": getattr(item, side) for side in ("lower", "upper")}
    found |= {f"execution of {name}": rate for name, rate in relaxed.execution.items()}
    found |= {f"own of {name}": rate for name, rate in relaxed.own.items()}
    found |= {f"peak of {name}": peak for name, peak in relaxed.peak.items()}
    for name, node in relaxed.nodes.items():
        for key, value in vars(node.lines).items():
            values = value if isinstance(value, tuple) else (value,)
            found |= {f"line {key} {i} of {name}": x for i, x in enumerate(values) if x is not None}
    return dict(sorted(found.items()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_root_bounds_come_back_bit_for_bit(family: str, dtype: torch.dtype) -> None:
    weights, relaxed = root_of(family, dtype)
    found = root_bounds(weights, root_tensors(weights, relaxed) | {"margin": torch.zeros(2)})
    expected = as_tensors(relaxed)
    assert sum(name.startswith("line ") for name in expected) >= 2
    assert_same(as_tensors(found), expected)
    assert {name: node.node for name, node in found.nodes.items()} == {
        name: node.node for name, node in relaxed.nodes.items()
    }


class UpperHalf(LocalWeights):
    """Weights of a rank that owns the upper half of the neurons of every tensor."""

    def own(self, name: str, whole: Tensor) -> Tensor:
        return whole.flatten(1)[:, self.graph[name].size // 2 :]


def test_root_bounds_are_cut_as_the_weights_are() -> None:
    """Each tensor by its own node, lines included."""
    weights, relaxed = root_of("mlp")
    half = UpperHalf(weights.graph, weights.dtype)
    found = as_tensors(root_bounds(half, root_tensors(weights, relaxed)))
    for key, value in as_tensors(relaxed).items():
        name = key.partition(" of ")[2]
        assert_same({key: found[key]}, {key: value if key.startswith("peak") else half.own(name, value)})


def test_root_bounds_of_another_precision_are_refused() -> None:
    weights, relaxed = root_of("mlp")
    tensors = root_tensors(weights, relaxed)
    with pytest.raises(LoadError, match="another network or precision"):
        root_bounds(weights_of(draw("mlp", 1), torch.float64), tensors)
    key = next(key for key in tensors if key.startswith("root/own/"))
    with pytest.raises(LoadError, match="another network or precision"):
        root_bounds(weights, tensors | {key: tensors[key].double()})


@pytest.mark.parametrize("key", ["root/lower/nobody", "root/side/{}", "root/lower"])
def test_root_bounds_of_another_network_are_refused(key: str) -> None:
    weights, relaxed = root_of("mlp")
    name = next(iter(relaxed.intervals))
    tensors = root_tensors(weights, relaxed) | {key.format(name): torch.zeros(1)}
    with pytest.raises(LoadError, match="another network or precision"):
        root_bounds(weights, tensors)
