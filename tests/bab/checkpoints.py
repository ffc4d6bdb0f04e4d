"""Checkpoints to save and to compare, for tests; some on every rank of a pool."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from abcrown_dist.bab import checkpoint_files
from abcrown_dist.bab.checkpoint import Checkpoint, read
from abcrown_dist.parallel.group import ALONE, Group

NOTES = {"round": 7, "worst": -0.1, "open": float("inf"), "names": ["ä", None], "inner": {"1": True}}


def bits(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Random bit patterns, those that are not numbers included."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    size = (*shape, dtype.itemsize) if shape else (dtype.itemsize,)
    raw = torch.randint(256, size, generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def collection(rank: int = 0) -> dict[str, Tensor]:
    """Every dtype, with no element, one, and many, and tensors whose memory has gaps."""
    found = {
        f"{name}/{i}": bits(dtype, *shape, seed=rank)
        for name, dtype in checkpoint_files._DTYPES.items()
        for i, shape in enumerate([(), (0,), (3, 0, 2), (5,), (2, 3, 4 + rank)])
    }
    wide = bits(torch.float32, 6, 8, seed=rank + 1)
    return found | {
        "transposed": wide.T,
        "every other": wide[::2, 1::3],
        "expanded": wide[0].expand(4, 8),
        "of autograd": torch.ones(3, requires_grad=True),
    }


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert not found[name].requires_grad
        raw, wanted = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (found[name], tensor))
        assert torch.equal(raw, wanted), name


def state(value: float) -> dict[str, Tensor]:
    return {"x": torch.full((100,), value), "n": torch.tensor(7)}


def value(path: Path) -> float:
    """Which `state` a checkpoint of one rank holds."""
    saved = read(path)
    tensors = saved.part(0)
    assert saved.notes == {"value": float(tensors["x"][0])}
    assert_same(tensors, state(float(tensors["x"][0])))
    return float(tensors["x"][0])


def save(path: Path, number: float) -> bool:
    return Checkpoint(path, ALONE).save(state(number), {"value": number})


def saved_file(folder: Path) -> Path:
    """A checkpoint of one rank."""
    assert save(folder / "a", 1.0)
    return folder / "a"


def part_of(path: Path, rank: int = 0) -> Path:
    return path.with_name(read(path).parts[rank].name)


def save_collection(group: Group, path: str) -> bool:
    return Checkpoint(Path(path), group).save(collection(group.rank), NOTES | {"rank": group.rank})
