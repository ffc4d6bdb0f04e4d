"""A property's constraints as rows of coefficients over batches of boxes.

A disjunct is refuted when the minimum of one of its rows over its box is above the row's right-hand side;
where rows are alternatives (`spec.junctions`), when those of all alternatives of a factor are. All disjuncts
that share a box share its bounds, and boxes are bounded B at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
import torch
from torch import Tensor

from abcrown_dist.bounds.concretize import Box
from abcrown_dist.graph.ir import Graph
from abcrown_dist.spec.junctions import fold
from abcrown_dist.spec.property import Box as DecimalBox
from abcrown_dist.spec.property import Disjunct, Property
from abcrown_dist.util.numerics import round_down, round_up
from abcrown_dist.weights.base import Weights
from abcrown_dist.weights.evaluate import split_inputs


@dataclass(frozen=True)
class Clauses:
    """Rows over B boxes, padded to the same number R.

    Attributes:
        box: the boxes in the weights' dtype, rounded outward.
        rows: coefficients (B, R, *shape) by output node (and input node, where some row mentions an
            input), over own neurons.
        lost: what rounding the coefficients to the dtype took from them, in magnitude, likewise.
        rhs: (B, R) float64; infinity in padding, which nothing exceeds.
        disjunct: (B, R) index of the disjunct that a row belongs to, -1 in padding.
        strict: (B, R) bool, rows with < instead of <=.
        groups: (depth, B, R) int64, see `spec.junctions`; None where no disjunct has factors.
    """

    box: Box
    rows: dict[str, Tensor]
    lost: dict[str, Tensor]
    rhs: Tensor
    disjunct: Tensor
    strict: Tensor
    groups: Tensor | None = None

    def refuted(self, proven: Tensor) -> set[int]:
        """Disjuncts with at least one row, or factor, of which the mask `proven` (B, R) holds."""
        proven = fold(proven, self.groups)
        return set(self.disjunct[proven & (self.disjunct >= 0)].tolist())

    def select(self, boxes: Tensor) -> Clauses:
        """The boxes `boxes` (n,)."""
        return Clauses(
            self.box.select(boxes),
            {name: values[boxes] for name, values in self.rows.items()},
            {name: values[boxes] for name, values in self.lost.items()},
            self.rhs[boxes],
            self.disjunct[boxes],
            self.strict[boxes],
            None if self.groups is None else self.groups[:, boxes],
        )

    def content(self, proven: Tensor, rows: Tensor) -> bool:
        """Whether every disjunct of the columns `rows` is refuted by them, given `proven` (B, len(rows))."""
        owners = self.disjunct[:, rows]
        wanted = set(owners[owners >= 0].tolist())
        mask = torch.zeros_like(self.strict)
        mask[:, rows] = proven
        return wanted <= self.refuted(mask)


def batches(
    prop: Property,
    weights: Weights,
    wanted: Sequence[int],
    batch_size: int,
    model_dtype: torch.dtype | None = None,
) -> Iterator[Clauses]:
    """Cut the disjuncts `wanted` into batches of at most `batch_size` boxes.

    Boxes with similar numbers of rows come together, so that padding stays small. Disjuncts without
    constraints have no row that could refute them and do not appear.
    """
    pick = set(wanted)
    groups = []
    for box, members in prop.boxes():
        mine = [index for index in members if index in pick and len(prop.disjuncts[index].rhs)]
        if mine:
            groups.append((sum(len(prop.disjuncts[index].rhs) for index in mine), box, mine))
    groups.sort(key=lambda group: group[0])
    for first in range(0, len(groups), batch_size):
        part = groups[first : first + batch_size]
        yield _stack(prop, weights, [(box, mine) for _, box, mine in part], model_dtype or weights.dtype)


def _stack(
    prop: Property,
    weights: Weights,
    members: list[tuple[DecimalBox, list[int]]],
    model_dtype: torch.dtype,
) -> Clauses:
    count = max(sum(len(prop.disjuncts[index].rhs) for index in mine) for _, mine in members)
    C = np.zeros((len(members), count, prop.num_outputs))
    mentions_inputs = any(prop.disjuncts[index].D is not None for _, mine in members for index in mine)
    D = np.zeros((len(members), count, prop.num_inputs if mentions_inputs else 0))
    rhs = np.full((len(members), count), np.inf)
    disjunct = np.full((len(members), count), -1, dtype=np.int64)
    strict = np.zeros(disjunct.shape, dtype=bool)
    rounded = np.zeros((len(members), count, 1))
    for b, (_, mine) in enumerate(members):
        row = 0
        for index in mine:
            item = prop.disjuncts[index]
            here = slice(row, row + len(item.rhs))
            C[b, here], rhs[b, here], disjunct[b, here] = item.C, item.rhs, index
            if item.D is not None:
                D[b, here] = item.D
            if item.strict is not None:
                strict[b, here] = item.strict
            rounded[b, here, 0] = not _exact(item)
            row = here.stop
    groups = _groups([[prop.disjuncts[index] for index in mine] for _, mine in members], count)
    _normalise(C, D, rhs)
    rows: dict[str, Tensor] = {}
    lost: dict[str, Tensor] = {}
    for values, split in ((C, _split_outputs), (D, split_inputs)):
        if values.shape[2]:
            exact = torch.from_numpy(values)
            cast = exact.to(weights.dtype)
            # 2^-53: C and D were rounded to float64 before.
            before = 2.0**-53 * torch.from_numpy(rounded) * exact.abs()
            gap = (exact - cast.double()).abs() + before
            _accumulate(rows, _own(split(weights.graph, cast), weights))
            _accumulate(lost, _own(split(weights.graph, round_up(gap, weights.dtype)), weights))
    return Clauses(
        box=_cast_boxes([box for box, _ in members], weights, model_dtype),
        rows=rows,
        lost=lost,
        rhs=torch.from_numpy(rhs).to(weights.device),
        disjunct=torch.from_numpy(disjunct).to(weights.device),
        strict=torch.from_numpy(strict).to(weights.device),
        groups=None if groups is None else torch.from_numpy(groups).to(weights.device),
    )


def _groups(boxes: Sequence[Sequence[Disjunct]], count: int) -> np.ndarray | None:
    """The groups (depth, B, count) of the rows of disjuncts that follow one another."""
    depth = max(0 if item.groups is None else len(item.groups) for items in boxes for item in items)
    if depth == 0:
        return None
    groups = np.broadcast_to(np.arange(count), (depth, len(boxes), count)).copy()
    for b, items in enumerate(boxes):
        row = 0
        for item in items:
            if item.groups is not None:
                groups[depth - len(item.groups) :, b, row : row + len(item.rhs)] = item.groups + row
            row += len(item.rhs)
    return groups


def _exact(item: Disjunct) -> bool:
    """Whether coefficients are known to be what was written; asked only where strictness may hang on it."""
    if item.strict is None or not item.strict.any() or not item.terms:
        return False
    return all(Decimal(float(value)) == value for row, _ in item.terms for value in row.values())


def _normalise(C: np.ndarray, D: np.ndarray, rhs: np.ndarray) -> None:
    """Scale rows whose coefficients float32 cannot hold, in place, by powers of two."""
    largest = np.maximum(np.abs(C).max(axis=2, initial=0), np.abs(D).max(axis=2, initial=0))
    extreme = (largest > 0) & ((largest < 1e-20) | (largest > 1e20))
    power = np.where(extreme, np.exp2(-np.floor(np.log2(np.where(extreme, largest, 1)))), 1)
    C *= power[..., None]
    D *= power[..., None]
    rhs *= power


def _cast_boxes(boxes: Sequence[DecimalBox], weights: Weights, model_dtype: torch.dtype) -> Box:
    """Boxes that hold every point of the model's own dtype that a decimal of the box is cast to."""
    ends = [box.outward() for box in boxes]
    lower = round_down(torch.from_numpy(np.stack([low for low, _ in ends])), model_dtype).double()
    upper = round_up(torch.from_numpy(np.stack([high for _, high in ends])), model_dtype).double()
    lower, upper = round_down(lower, weights.dtype), round_up(upper, weights.dtype)
    graph = weights.graph
    return Box(_own(split_inputs(graph, lower), weights), _own(split_inputs(graph, upper), weights))


def _split_outputs(graph: Graph, values: Tensor) -> dict[str, Tensor]:
    parts = torch.split(values, [graph[name].size for name in graph.outputs], dim=-1)
    result: dict[str, Tensor] = {}
    for name, part in zip(graph.outputs, parts, strict=True):
        _accumulate(result, {name: part.reshape(*values.shape[:-1], *graph[name].shape)})
    return result


def _accumulate(total: dict[str, Tensor], parts: dict[str, Tensor]) -> None:
    """Add `parts` to `total`: one node may be an output twice, or an input and an output at once."""
    for name, part in parts.items():
        total[name] = total[name] + part if name in total else part


def _own(parts: dict[str, Tensor], weights: Weights) -> dict[str, Tensor]:
    """The own neurons of tensors (..., *shape) by node, on the weights' device."""
    return {name: weights.own(name, part).to(weights.device) for name, part in parts.items()}
