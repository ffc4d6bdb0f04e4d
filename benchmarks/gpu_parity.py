"""Do CUDA bounds agree with those of the CPU, and does NCCL work? Called by gpu_smoke.sh.

    python benchmarks/gpu_parity.py

Every bound method on a multilayer perceptron, a convolutional and a residual network, float32 and
float64: the largest difference must stay below 1e-4 (float32) or 1e-10 (float64) of the largest bound.
Then each collective of a group of one rank under NCCL. Exit code 0 if all hold, 1 if not, 2 without a
CUDA device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from abcrown_dist.bounds.alpha import AlphaSettings
from abcrown_dist.bounds.concretize import Box
from abcrown_dist.bounds.propagate import bound_outputs
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.graph.ir import Graph
from abcrown_dist.graph.load_torch import load_torch
from abcrown_dist.util.numerics import use_full_precision
from abcrown_dist.weights.local import LocalWeights

METHODS = ("ibp", "crown-ibp", "crown", "forward", "alpha-crown")
LIMITS = {torch.float32: 1e-4, torch.float64: 1e-10}
RADIUS = 0.01
ALPHA = AlphaSettings(iteration=5)  # more steps let rounding grow into different paths of the optimiser


class Residual(nn.Module):
    """A small network with a strided residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.branch = nn.Sequential(
            nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)
        )
        self.shortcut = nn.Conv2d(8, 16, 1, stride=2)
        self.head = nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(16 * 4 * 4, 10))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        return self.head(self.branch(x) + self.shortcut(x))


def networks() -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Name, network and centre of its box; weights are torch's from a fixed seed."""
    torch.manual_seed(42)
    layers = [nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    yield (
        "mlp",
        nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), *layers),
        torch.rand(1, 1, 28, 28),
    )
    convolutions = [
        nn.Conv2d(3, 8, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 4, stride=2),
        nn.ReLU(),
    ]
    yield "cnn", nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(16 * 49, 10)), torch.rand(1, 3, 32, 32)
    yield "residual", Residual(), torch.rand(1, 3, 16, 16)


def bounds(graph: Graph, centre: Tensor, method: str, dtype: torch.dtype, device: str) -> Tensor:
    """Lower and upper bounds of all outputs, flat, on the CPU."""
    name = graph.inputs[0]
    at = centre[None].to(device, dtype)
    box = Box({name: at - RADIUS}, {name: at + RADIUS})
    weights = LocalWeights(graph, dtype, device)
    # One chunk grid for both devices; left to itself the CPU's follows its cache.
    settings = BoundSettings(method=method, alpha=ALPHA, batch_rows=1024, budget=1 << 60)
    found = bound_outputs(weights, box, settings)[graph.outputs[0]]
    return torch.cat([found.lower.flatten(), found.upper.flatten()]).cpu()


def parity() -> bool:
    """Print a line for every network, method and type; whether all agree."""
    fine = True
    for name, module, centre in networks():
        graph = load_torch(module.requires_grad_(False), centre).graph
        for method in METHODS:
            for dtype, limit in LIMITS.items():
                on_cpu, on_cuda = (bounds(graph, centre, method, dtype, at) for at in ("cpu", "cuda"))
                difference = float((on_cpu - on_cuda).abs().max() / on_cpu.abs().max())
                agrees = difference <= limit  # False for NaN
                fine &= agrees
                kind = str(dtype).removeprefix("torch.")
                print(f"{'ok    ' if agrees else 'DIFFER'} {name:9}{method:13}{kind:9}{difference:.1e}")
    return fine


def nccl() -> bool:
    """Whether the collectives that sharded weights use give a group of one its own values back."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    own = torch.arange(1000.0, device="cuda")
    gathered, reduced, total = torch.empty_like(own), torch.empty_like(own), own.clone()
    dist.all_gather_into_tensor(gathered, own)
    dist.reduce_scatter(reduced, [own])
    dist.all_reduce(total)
    dist.broadcast(total, 0)
    torch.cuda.synchronize()
    fine = all(torch.equal(value, own) for value in (gathered, reduced, total))
    dist.destroy_process_group()
    print("ok     NCCL" if fine else "DIFFER NCCL")
    return fine


def main() -> None:
    """Run both checks."""
    if not torch.cuda.is_available():
        print("gpu_parity: torch sees no CUDA device here", file=sys.stderr)
        sys.exit(2)
    use_full_precision()
    with torch.no_grad():
        agree = parity()
    sys.exit(0 if nccl() and agree else 1)


if __name__ == "__main__":
    main()
