"""Real networks with reference bounds from auto_LiRPA, read from files that are not part of the project."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from abcrown_dist.bounds.concretize import Box
from abcrown_dist.graph.aten import unsupported
from abcrown_dist.graph.ir import Graph
from abcrown_dist.graph.load_onnx import load_onnx
from abcrown_dist.relax import REGISTRY

NAMES = (
    "acasxu__ACASXU_run2a_3_7_batch_2000", "acasxu__ACASXU_run2a_4_9_batch_2000",
    "acasxu__ACASXU_run2a_5_4_batch_2000", "cifar10_resnet__resnet_2b", "cifar10_resnet__resnet_4b",
    "eran__ffnnSIGMOID__Point_6x200", "eran__mnist_relu_9_200", "marabou-cifar10__cifar10_small",
    "mnist_fc__mnist-net_256x2", "mnist_fc__mnist-net_256x4", "mnist_fc__mnist-net_256x6",
    "oval21__cifar_base_kw", "oval21__cifar_wide_kw", "verivital__Convnet_avgpool",
    "verivital__Convnet_maxpool",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Case:
    """One network, its box (one domain) and the reference bounds by method, each (outputs,)."""

    graph: Graph
    box: Box
    data: dict[str, np.ndarray]

    def boxes(self, dtype: torch.dtype) -> Box:
        lower, upper = self.box.lower, self.box.upper
        return Box({k: v.to(dtype) for k, v in lower.items()}, {k: v.to(dtype) for k, v in upper.items()})

    def reference(self, method: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Lower and upper bounds (outputs,) in float64; skips where the file has none."""
        if f"{method}_lb" not in self.data:
            pytest.skip(f"no reference for {method}")
        low, high = (
            torch.from_numpy(self.data[f"{method}_{side}"].astype(float)).flatten() for side in ("lb", "ub")
        )
        return low, high

    def preactivations(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Reference pre-activation bounds of CROWN in topological order."""
        keys = [key[:-3] for key in self.data if key.startswith("CROWN_pre_") and key.endswith("_lb")]
        return [self.reference(key) for key in keys]


@cache
def load(folder: Path, bench: Path, name: str) -> Case:
    """Skips networks with ops that have no relaxation yet."""
    data = dict(np.load(folder / f"{name}.npz", allow_pickle=True))
    graph = load_onnx(bench / str(data["onnx"])).graph
    missing = unsupported(graph, REGISTRY)
    if missing:
        pytest.skip("no relaxation for " + ", ".join(missing))
    (key,) = graph.inputs
    low, high = (torch.from_numpy(data[end]).reshape(1, *graph[key].shape) for end in ("x_lo", "x_hi"))
    return Case(graph, Box({key: low}, {key: high}), data)
