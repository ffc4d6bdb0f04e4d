"""Leaves: all neurons decided, so that every constraint is a linear function of the input.

A bound with multipliers refutes a leaf by one clause at a time. Here all clauses and all decisions are
put into one linear program (`exact.leaf`): a leaf can be empty though no single clause shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from abcrown_dist.bab.flat import flat, flat_rows
from abcrown_dist.bab.goals import Goals
from abcrown_dist.bab.splitter import Examined
from abcrown_dist.bounds.backward import Start, back_substitute, concretize
from abcrown_dist.bounds.beta import Splits, impose
from abcrown_dist.bounds.concretize import Box
from abcrown_dist.bounds.types import OneHot, Relaxed
from abcrown_dist.spec import junctions
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.weights.base import Weights

if TYPE_CHECKING:
    from abcrown_dist.exact.leaf import Leaf as Answer


@dataclass(frozen=True)
class Leaf:
    """One domain in which all neurons are decided.

    Attributes:
        goal: which it is about.
        relaxed: bounds of all pre-activations, over the whole box or the leaf.
        splits: its decisions, B = 1: with them, nothing is left to relax.
    """

    goal: int
    relaxed: Relaxed
    splits: Splits


class LeafPrograms:
    """Linear programs of the leaves of one box (B = 1), in float64 where the weights allow it."""

    def __init__(self, weights: Weights, box: Box, goals: Goals) -> None:
        self.weights = weights.to(torch.float64) or weights
        self.goals, dtype = goals, self.weights.dtype
        self.box = Box(
            {name: side.to(dtype) for name, side in box.lower.items()},
            {name: side.to(dtype) for name, side in box.upper.items()},
        )

    def examine(self, leaves: Sequence[Leaf], deadline: Deadline) -> Examined:
        """Decide leaves, one linear program each.

        Raises:
            DeadlineExceeded: between two of them.
        """
        proven, margins, points = [], [], []
        for leaf in leaves:
            deadline.check()
            found = self._solve(leaf, deadline)
            proven.append(found.refuted)
            margins.append(found.violation)
            points.append(torch.from_numpy(found.point))
        device = self.weights.device
        return Examined(
            torch.tensor(proven, dtype=torch.bool, device=device),
            torch.tensor(margins, dtype=torch.float64, device=device),
            torch.stack(points).to(device),
        )

    def _solve(self, leaf: Leaf, deadline: Deadline) -> Answer:
        relaxed = impose(leaf.relaxed.map(lambda value: value.to(self.weights.dtype)), leaf.splits)
        parts = [
            self._functions(self._decisions(name, split.index[0], split.sign[0]), relaxed)
            for name, split in leaf.splits.items()
        ]
        real = self.goals.rhs[leaf.goal].isfinite()
        rows = {name: part[leaf.goal][real][None] for name, part in self.goals.rows.items()}
        A, b, slack = self._functions({k: v.to(self.weights.dtype) for k, v in rows.items()}, relaxed)
        rhs = self.goals.rhs[leaf.goal][real].cpu().numpy()
        slack = slack + self._lost(leaf, real, relaxed) + 2.0**-52 * (np.abs(b) + np.abs(rhs))
        parts.append((A, b - rhs, slack))
        A, b, slack = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        decided = np.arange(len(b) - len(rhs))
        # Columns of other nodes' decisions say nothing.
        decided = decided[(A[decided] != 0).any(axis=1) | (b[decided] != 0)]
        groups = self.goals.of_domains(torch.tensor([leaf.goal], device=real.device))
        joined = None if groups is None else groups[:, 0, real].cpu().numpy()
        lower, upper = (
            flat(self.weights, side)[0].double().cpu().numpy() for side in (self.box.lower, self.box.upper)
        )
        with np.errstate(invalid="ignore", over="ignore"):  # what is not finite decides nothing
            scale = np.abs(A) @ np.maximum(np.abs(lower), np.abs(upper)) + np.abs(b)
        scale = np.maximum(scale, np.finfo(float).tiny * 1e10)
        from abcrown_dist.exact.leaf import least_violation  # scipy: few runs ever come to a leaf

        def answer(clauses: np.ndarray) -> Answer:
            pick = np.concatenate([decided, len(b) - len(rhs) + clauses])
            functions = (part[pick] for part in (A, b, scale, slack))
            return least_violation(lower, upper, *functions, time_limit=deadline.remaining())

        # Of ranks that share the weights one asks for all: their clocks differ, and so might the answers.
        return self.weights.group.first(lambda: _over_cases(answer, len(rhs), joined))

    def _decisions(self, name: str, index: Tensor, sign: Tensor) -> Start:
        """The functions  -sign z_index, which a point of the leaf makes <= 0."""
        return {name: OneHot(index, -sign.to(self.weights.dtype))}

    def _functions(self, start: Start, relaxed: Relaxed) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows as functions A x + b of the flat input, and by how much they may be off."""
        linear = back_substitute(self.weights, start, relaxed)
        slack = concretize(self.weights, linear, self.box).error
        bias = self.weights.total(linear.bias)
        A = flat_rows(self.weights, linear, 1)[0].double().cpu().numpy()
        return A, bias[0].double().cpu().numpy(), slack[0].double().cpu().numpy()

    def _lost(self, leaf: Leaf, real: Tensor, relaxed: Relaxed) -> np.ndarray:
        """What rounding the clauses' coefficients to the bounds' dtype may have moved, (M,)."""
        total = torch.zeros(int(real.sum()), dtype=torch.float64, device=self.weights.device)
        for name, part in self.goals.lost.items():
            interval = relaxed.intervals.get(name) or self.box.interval(name)
            total += part[leaf.goal][real].flatten(1).double() @ interval.magnitude.flatten().double()
        return self.weights.total(total).cpu().numpy()


def _over_cases(answer: Callable[[np.ndarray], Answer], count: int, groups: np.ndarray | None) -> Answer:
    """The answer for `count` rows of which some are alternatives: the weakest over all choices of these.

    A choice is made factor by factor, and no further where the rows chosen so far are refuted.
    """
    pending: list[tuple[np.ndarray, np.ndarray | None]] = [(np.arange(count), groups)]
    weakest: Answer | None = None
    while pending:
        rows, joined = pending.pop()
        found = answer(rows[junctions.direct(joined, len(rows))])
        if joined is not None and not found.refuted:
            cases = [(rows[kept], rest) for kept, rest in junctions.branch(joined)]
            pending += reversed(cases)
            continue
        if weakest is None or found.violation < weakest.violation:
            weakest = found
        if not found.refuted:
            break
    assert weakest is not None
    return weakest
