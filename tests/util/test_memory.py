"""The memory meter against allocations whose size is known."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from abcrown_dist.util import memory
from abcrown_dist.util.memory import MemoryMeter, peak_rss_bytes

KIB = 1024


def block(kib: int) -> torch.Tensor:
    return torch.zeros(kib * KIB // 4)


def test_allocations_and_frees() -> None:
    with MemoryMeter() as meter:
        first = block(100)
        assert meter.live_bytes == 100 * KIB
        second = block(50)
        del first
        assert meter.live_bytes == 50 * KIB
        third = block(20)
        assert (meter.live_bytes, meter.peak_bytes, meter.baseline) == (70 * KIB, 150 * KIB, 0)
    assert second.numel() and third.numel()


def test_temporaries_of_an_expression_count() -> None:
    with MemoryMeter() as meter:
        x = block(10)
        y = (x + 1) * 2  # x, x + 1 and the product at once
        del x
        assert meter.live_bytes == 10 * KIB
    assert meter.peak_bytes == 30 * KIB
    assert y.numel()


def test_views_share_and_in_place_calls_allocate_nothing() -> None:
    with MemoryMeter() as meter:
        x = block(100)
        views = [x[:10], x.view(-1, 4).T, x.expand(3, -1), x.detach()]
        x.mul_(2).add_(1)
        torch.add(x, 1, out=x)
        assert meter.peak_bytes == 100 * KIB
        del x
        assert meter.live_bytes == 100 * KIB, "the views still hold it"
        del views
        assert meter.live_bytes == 0


def test_tensors_from_before_count_only_when_passed() -> None:
    ours, foreign = block(10), block(40)
    with MemoryMeter(already=[ours, ours[3:]]) as meter:
        assert meter.baseline == meter.live_bytes == 10 * KIB
        foreign.add_(1)
        view = foreign.view(2, -1)
        torch.mul(foreign, 2, out=foreign)
        assert meter.peak_bytes == 10 * KIB
        copy = foreign.clone()
        assert meter.live_bytes == 50 * KIB
        del ours
        assert meter.live_bytes == 40 * KIB
    assert view.numel() and copy.numel()


def test_resized_and_literal_tensors() -> None:
    with MemoryMeter() as meter:
        literal = torch.tensor([1.0] * 256)
        assert meter.live_bytes == KIB
        literal.resize_(1024)
        assert meter.live_bytes == 4 * KIB
        literal.resize_(16)  # keeps its storage
        assert meter.live_bytes == 4 * KIB


def test_several_results_of_one_call() -> None:
    x = torch.randn(64, 8)
    with MemoryMeter() as meter:
        values, index = x.max(dim=1)
        assert meter.live_bytes == 64 * 4 + 64 * 8
        halves = x.split(32)
        assert meter.live_bytes == 64 * 12, "views of a foreign tensor"
    assert len(values) == len(index) == len(halves[0]) * 2


def test_functional_transforms_are_seen_through() -> None:
    """vmap of a vector-Jacobian product: exactly the buffers that plain calls would make."""
    x, A = torch.zeros(256), torch.ones(8, 256)
    with MemoryMeter() as meter:
        pull_back = torch.func.vjp(lambda z: z * 3, x)[1]
        kept = torch.func.vmap(pull_back)(A)
        del pull_back
        gc.collect()
        live = meter.live_bytes
    assert live == 8 * KIB, "the result alone"
    assert torch.equal(kept[0], 3 * A)
    assert meter.peak_bytes >= 9 * KIB


def test_autograd_keeps_what_it_saves() -> None:
    with MemoryMeter() as meter:
        x = block(4).requires_grad_()
        y = (x.exp()).square().sum()
        held = meter.live_bytes
        y.backward()
        del y
        assert x.grad is not None
        assert meter.live_bytes == 8 * KIB  # x and its gradient
    assert held >= 8 * KIB


def test_stops_after_an_exception_and_at_the_exit() -> None:
    meter = MemoryMeter()
    kept = []

    def fail() -> None:
        with meter:
            kept.append(block(3))
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    outside = block(100)
    assert meter.live_bytes == meter.peak_bytes == 3 * KIB
    kept.clear()
    del outside
    assert meter.live_bytes == 3 * KIB, "frozen at the exit"


def test_nested_meters() -> None:
    with MemoryMeter() as outer:
        x = block(8)
        with MemoryMeter() as inner:
            y = x + 1
        del y
        z = block(1)
    assert (inner.peak_bytes, outer.peak_bytes, outer.live_bytes) == (8 * KIB, 16 * KIB, 9 * KIB)
    assert z.numel()


def test_peak_rss_grows_with_touched_memory_and_has_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    before = peak_rss_bytes()
    with MemoryMeter() as meter:
        big = torch.ones(max(before, 1 << 26) // 4 + (1 << 24))  # more than all that was resident
    assert meter.peak_rss_bytes >= before + (1 << 24)
    assert big[-1] == 1
    status = Path("/proc/self/status")
    if status.exists():
        precise = peak_rss_bytes()

        def missing(*_: object, **__: object) -> None:
            raise OSError("no such file")

        monkeypatch.setattr(memory, "open", missing, raising=False)
        assert abs(peak_rss_bytes() - precise) <= 0.05 * precise
