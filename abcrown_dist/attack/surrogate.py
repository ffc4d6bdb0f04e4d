"""Gradients for step functions, which have none of use: `sign`, `round`, `floor`, `ceil`.

A quantised network's derivative is zero almost everywhere, so gradient steps would stand still. The
straight-through idea (Bengio, Leonard and Courville, "Estimating or Propagating Gradients Through
Stochastic Neurons", 2013) keeps the value and replaces the derivative by that of a smooth stand-in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def _soft_sign(z: torch.Tensor) -> torch.Tensor:
    """A sigmoid as wide as the data, so that its slope vanishes for few of them."""
    width = z.detach().abs().mean() + torch.finfo(z.dtype).tiny
    return z / (width + z.abs())


def _identity(z: torch.Tensor) -> torch.Tensor:
    return z


_STAND_INS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sign": _soft_sign,
    "round": _identity,
    "floor": _identity,
    "ceil": _identity,
}


def _spellings(name: str) -> list[Callable[..., torch.Tensor]]:
    packet = getattr(torch.ops.aten, name)
    return [getattr(torch, name), getattr(torch.Tensor, name), packet, packet.default]


_BY_FUNCTION = {spelling: name for name in _STAND_INS for spelling in _spellings(name)}


class SurrogateGradients(TorchFunctionMode):
    """Context in which step functions keep their values and get the derivative of their stand-in."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        value = func(*args, **(kwargs or {}))
        name = _BY_FUNCTION.get(func)
        if name is None or not torch.is_grad_enabled():
            return value
        smooth = _STAND_INS[name](args[0])
        return value.detach() + (smooth - smooth.detach())
