"""How much memory a rank has."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Capacity:
    """Bytes for a single process and for each of several, and where the figure comes from."""

    alone: int
    each: int
    source: str

    def of(self, alone: bool) -> int:
        """Bytes for one process: the only one, or one of several."""
        return self.alone if alone else self.each


def capacity(device: torch.device, ranks_here: int, given: int | None = None) -> Capacity:
    """Memory for bounds on `device`.

    Args:
        ranks_here: ranks on this machine, which share its memory if they compute on the CPU.
        given: the user's figure for one device.
    """
    if given is not None:
        return Capacity(given, given, "--device-memory")
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return Capacity(total, total, f"the memory of {torch.cuda.get_device_name(device)}")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    share = f", shared by {ranks_here} ranks" if ranks_here > 1 else ""
    return Capacity(total, total // ranks_here, f"this machine's memory{share}")
