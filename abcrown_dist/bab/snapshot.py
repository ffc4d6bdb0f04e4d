"""A search as tensors: what a checkpoint holds of it, whatever ranks it is later taken up by.

Tensors that tensor parallelism cuts by neuron are written with the whole numbers of their columns, or
whole, so that they can be cut anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from abcrown_dist.bab.domains import Domains, concatenate
from abcrown_dist.bab.splitter import Splitter
from abcrown_dist.bounds.types import Interval, Relaxed, RelaxedNode
from abcrown_dist.relax import REGISTRY
from abcrown_dist.util.errors import LoadError
from abcrown_dist.weights.base import Weights

_HOST = torch.device("cpu")
_STATE, _COLUMNS, _ROOT = "state/", "columns/", "root/"
_SIDES = ("lower", "upper")
Part = Mapping[str, Tensor]


def domain_tensors(blocks: Sequence[Domains], splitter: Splitter) -> dict[str, Tensor]:
    """The domains of one rank; nothing where it has none."""
    if not blocks:
        return {}
    domains = concatenate([block.to(_HOST) for block in blocks])
    found = {
        "margin": domains.margin,
        "goal": domains.goal,
        "ident": domains.ident,
        "depth": domains.depth,
    }
    found |= {_STATE + name: value for name, value in domains.state.items()}
    return found | {_COLUMNS + name: value.to(_HOST) for name, value in splitter.columns().items()}


def own_domains(
    holders: Sequence[Sequence[int]],
    part: Callable[[int], Part],
    goals: Sequence[int],
    splitter: Splitter,
    place: tuple[int, int],
) -> list[Domains]:
    """This rank's share of all domains of a checkpoint, dealt out one by one.

    Args:
        holders: for each set of ranks that held the same domains, the numbers of their parts.
        part: reads one.
        goals: the disjunct of every goal, as it was written.
        place: this holder, and how many there are now.

    Raises:
        LoadError: the domains are not of this search.
    """
    if sorted(goals) != sorted(splitter.disjuncts):
        raise LoadError("the checkpoint is about other disjuncts of the property")
    numbers = torch.tensor([splitter.disjuncts.index(disjunct) for disjunct in goals])
    found, seen = [], 0
    for members in holders:
        parts = [part(number) for number in members]
        count = len(parts[0].get("margin", ()))
        mine = (torch.arange(count) + seen) % place[1] == place[0]
        seen += count
        if bool(mine.any()):
            found.append(_assembled(parts, mine, numbers, splitter))
    return found


def _assembled(parts: Sequence[Part], mine: Tensor, goals: Tensor, splitter: Splitter) -> Domains:
    """Some domains of one holder, whose ranks may each have a part of the columns."""
    first, columns = parts[0], splitter.columns()
    state = {}
    for key, value in first.items():
        if not key.startswith(_STATE):
            continue
        name = key.removeprefix(_STATE)
        if name in columns:
            pieces = [(part[_COLUMNS + name], part[key][mine]) for part in parts]
            state[name] = _columns(pieces, columns[name])
        else:
            state[name] = value[mine]
    margin, ident, depth = (first[name][mine] for name in ("margin", "ident", "depth"))
    return Domains(margin, goals[first["goal"][mine]], ident, depth, state)


def _columns(pieces: Sequence[tuple[Tensor, Tensor]], wanted: Tensor) -> Tensor:
    """The columns `wanted` out of pieces of (numbers, values); no piece may lack what it claims to have."""
    numbers = torch.cat([number for number, _ in pieces])
    values = torch.cat([value for _, value in pieces], dim=-1)
    order = numbers.argsort()
    place = torch.searchsorted(numbers[order], wanted.to(_HOST)).clamp(max=max(0, len(numbers) - 1))
    if len(wanted) and (not len(numbers) or not torch.equal(numbers[order][place], wanted.to(_HOST))):
        raise LoadError("the checkpoint is about other neurons: its root bounds do not fit")
    return values[..., order[place]] if len(wanted) else values[..., :0]


def root_tensors(weights: Weights, relaxed: Relaxed) -> dict[str, Tensor]:
    """Bounds of a whole box over all neurons; every rank that shares the weights must ask."""
    found = {}
    for name, item in relaxed.intervals.items():
        for side in _SIDES:
            found[f"{_ROOT}{side}/{name}"] = weights.whole(name, getattr(item, side)).to(_HOST)
    for kind, rates in (("execution", relaxed.execution), ("own", relaxed.own)):
        for name, rate in rates.items():
            found[f"{_ROOT}{kind}/{name}"] = weights.whole(name, rate).to(_HOST)
    for name, peak in relaxed.peak.items():
        parts = weights.group.gather_all(peak) if weights.parts > 1 else peak[None]
        found[f"{_ROOT}peak/{name}"] = parts.amax(0).to(_HOST)
    return found


def root_bounds(weights: Weights, tensors: Part) -> Relaxed:
    """What `root_tensors` wrote, cut as these weights are.

    Raises:
        LoadError: it was written of another network, or in another precision.
    """
    kinds: dict[str, dict[str, Tensor]] = {kind: {} for kind in ("execution", "own", "peak", *_SIDES)}
    for key, value in tensors.items():
        if key.startswith(_ROOT):
            kind, _, name = key.removeprefix(_ROOT).partition("/")
            dtype = torch.float64 if kind == "peak" else weights.dtype
            if value.dtype != dtype or kind not in kinds or name not in weights.graph:
                raise LoadError("the checkpoint's root bounds are of another network or precision")
            value = value.to(weights.device)
            kinds[kind][name] = value if kind == "peak" else weights.own(name, value)
    intervals = {name: Interval(*(kinds[side][name] for side in _SIDES)) for name in kinds["lower"]}
    nodes = {}
    for node in weights.graph:
        if node.op in REGISTRY and node.inputs[0] in intervals:
            known = intervals[node.inputs[0]]
            lines = REGISTRY[node.op].lines(node.attrs, known.lower, known.upper)
            nodes[node.name] = RelaxedNode(node, lines)
    return Relaxed(intervals, nodes, kinds["execution"], kinds["own"], kinds["peak"])
