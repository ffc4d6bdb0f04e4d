"""Choices made per machine."""

from __future__ import annotations

import io
import logging

import pytest
import torch

from abcrown_dist.config import resolve
from abcrown_dist.config.resolve import instance_timeout, resolve_device, resolve_dtype, resolve_progress
from abcrown_dist.config.schema import Bab
from abcrown_dist.util.errors import ConfigError


def set_cuda(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_auto_takes_cuda_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    set_cuda(monkeypatch, 2)
    assert resolve_device("auto").type == "cuda"
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    assert resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"general\.device: cuda:2 asked for, but torch finds 2 CUDA"):
        resolve_device("cuda:2")


def test_without_cuda(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    set_cuda(monkeypatch, 0)
    resolve._say_cpu.cache_clear()
    with caplog.at_level(logging.INFO, logger="abcrown_dist"):
        assert resolve_device("cpu") == torch.device("cpu")
        assert caplog.messages == []
        assert resolve_device("auto") == torch.device("cpu")
        assert resolve_device("auto") == torch.device("cpu")
        assert caplog.messages == ["no CUDA device found: computing on the CPU"]  # once a process
    with pytest.raises(ConfigError, match="torch finds no CUDA device"):
        resolve_device("cuda")


def test_dtype() -> None:
    assert resolve_dtype(True) is torch.float64
    assert resolve_dtype(False) is torch.float32


def test_progress() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert resolve_progress("auto", Terminal()) == "live"
    assert resolve_progress("auto", io.StringIO()) == "plain"
    assert resolve_progress("none", Terminal()) == "none"


def test_timeout() -> None:
    assert instance_timeout(Bab(timeout=10, timeout_scale=2)) == 20
    assert instance_timeout(Bab(timeout=10, timeout_scale=2), listed=7) == 14
    assert instance_timeout(Bab(timeout=10, timeout_scale=2, override_timeout=3), listed=7) == 3
