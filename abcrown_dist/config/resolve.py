"""Choices that need to know the machine or the terminal."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, TextIO

from abcrown_dist.config.schema import Bab
from abcrown_dist.util.errors import ConfigError

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)


def resolve_device(name: str) -> torch.device:
    """Device for `general.device`.

    Raises:
        ConfigError: a CUDA device is asked for that torch does not find.
    """
    import torch

    if name == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        if count == 0:
            _say_cpu()
        return torch.device("cuda" if count else "cpu")
    device = torch.device(name)
    if (device.index or 0) >= count:
        raise ConfigError(f"general.device: {name} asked for, but torch finds {count or 'no'} CUDA device(s)")
    return device


@cache
def _say_cpu() -> None:
    """Once a process, however often the device is asked for."""
    _log.info("no CUDA device found: computing on the CPU")


def resolve_dtype(double_fp: bool) -> torch.dtype:
    """Number type for `general.double_fp`."""
    import torch

    return torch.float64 if double_fp else torch.float32


def resolve_progress(choice: str, stream: TextIO) -> str:
    """`live`, `plain` or `none` for `general.progress`, given where progress is written."""
    if choice != "auto":
        return choice
    return "live" if stream.isatty() else "plain"


def instance_timeout(bab: Bab, listed: float | None = None) -> float:
    """Seconds for an instance; `listed` is the CSV's own timeout, which replaces `bab.timeout`."""
    if bab.override_timeout is not None:
        return bab.override_timeout
    return (bab.timeout if listed is None else listed) * bab.timeout_scale
