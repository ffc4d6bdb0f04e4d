"""Domains of branch and bound, many at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MIX = 0x9E3779B97F4A7C15  # the odd constant of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Domains:
    """N domains: what the store orders them by, and what a splitter keeps of each.

    Attributes:
        margin: (N,) float64, greatest of the lower bounds minus right-hand sides of a domain's rows: it
            is refuted when that is positive beyond its rounding error.
        goal: (N,) int64, which disjunct a domain is about (see `goals.Goals`).
        ident: (N,) int64, a hash of the decisions that lead here: the same in every run, whatever the order.
        depth: (N,) int64, number of decisions.
        state: the splitter's tensors (N, ..., n) by name. Where the last axes of two batches differ in length
            (decisions and their multipliers), the shorter is filled up with zeros.
    """

    margin: Tensor
    goal: Tensor
    ident: Tensor
    depth: Tensor
    state: Mapping[str, Tensor]

    def __len__(self) -> int:
        return len(self.margin)

    def select(self, index: Tensor | slice) -> Domains:
        """The domains `index` (integers, a mask, or a slice)."""
        return Domains(
            self.margin[index],
            self.goal[index],
            self.ident[index],
            self.depth[index],
            {name: value[index] for name, value in self.state.items()},
        )

    def to(self, device: torch.device) -> Domains:
        """The same domains on another device."""
        return Domains(
            self.margin.to(device),
            self.goal.to(device),
            self.ident.to(device),
            self.depth.to(device),
            {name: value.to(device) for name, value in self.state.items()},
        )

    def bytes(self) -> int:
        """Memory that the tensors take."""
        tensors = [self.margin, self.goal, self.ident, self.depth, *self.state.values()]
        return sum(value.numel() * value.element_size() for value in tensors)


def concatenate(parts: Sequence[Domains]) -> Domains:
    """All domains of several batches, one after the other."""
    if len(parts) == 1:
        return parts[0]
    return Domains(
        torch.cat([part.margin for part in parts]),
        torch.cat([part.goal for part in parts]),
        torch.cat([part.ident for part in parts]),
        torch.cat([part.depth for part in parts]),
        {name: _concatenate([part.state[name] for part in parts]) for name in parts[0].state},
    )


def _concatenate(values: Sequence[Tensor]) -> Tensor:
    longest = max(value.shape[-1] for value in values)
    return torch.cat([pad_last(value, longest) for value in values])


def pad_last(value: Tensor, length: int) -> Tensor:
    """`value` with zeros appended on its last axis, up to `length`."""
    missing = length - value.shape[-1]
    return torch.nn.functional.pad(value, (0, missing)) if missing > 0 else value


def child_ident(parent: Tensor, *decision: Tensor) -> Tensor:
    """Identities (N,) of children, given those of their parents and the integers of the decision, (N,) each.

    SplitMix64's finaliser over the sum; int64 arithmetic wraps around, which is what is wanted.
    """
    value = parent.clone()
    for part in decision:
        value = _mix(value + part.to(torch.int64) * _signed(_MIX) + _signed(_MIX))
    return value


def _mix(value: Tensor) -> Tensor:
    value = (value ^ _shift_right(value, 30)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shift_right(value, 27)) * _signed(0x94D049BB133111EB)
    return value ^ _shift_right(value, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's own keeps the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word > _MASK >> 1 else word
