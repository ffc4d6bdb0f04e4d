"""One rank of one measurement of `sharding.py`: build, place, bound, time, meter.

Started as a process of its own with torchrun's variables and a job in JSON; prints its figures as
one line of JSON. The bounds are timed first; then the same pass runs once more with every live tensor
counted, which slows it down.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import torch
from sharding_types import Job
from torch import Tensor, nn

from abcrown_dist.bounds.backward import identity_rows
from abcrown_dist.bounds.concretize import Box
from abcrown_dist.bounds.propagate import bound_intermediate, bound_outputs, bound_rows
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.graph.ir import Graph
from abcrown_dist.graph.load_onnx import load_onnx
from abcrown_dist.graph.load_torch import load_torch
from abcrown_dist.parallel.group import Group
from abcrown_dist.parallel.launch import World, local_device, open_store, start_group, stop_group
from abcrown_dist.util.memory import MemoryMeter, peak_rss_bytes
from abcrown_dist.util.numerics import use_full_precision
from abcrown_dist.weights.base import Weights
from abcrown_dist.weights.fsdp import without_values
from abcrown_dist.weights.place import place_weights
from examples import cifar100_resnet_large

SEED = 42
EPS = 0.02
PAIR_ENDS = 4096  # inputs and outputs of the two-layer network
PAIR_ROWS = 2048  # of its outputs, bounded at once
_AMPLE = 1 << 60  # a budget that binds nothing: chunks are as the job says
_LONG = 10.0  # seconds after which a pass is not repeated
_KINDS = (Tensor, nn.Parameter)


def build(job: Job) -> tuple[Graph, Tensor]:
    """The network, and the centre (1, *shape) of its box; torch's default weights from a fixed seed."""
    if job.network == "standin":
        return _standin()
    torch.manual_seed(SEED)
    if job.network == "pair":
        module = nn.Sequential(nn.Linear(PAIR_ENDS, job.width), nn.ReLU(), nn.Linear(job.width, PAIR_ENDS))
        centre = torch.rand(1, PAIR_ENDS)
    else:
        layers: list[nn.Module] = [nn.Flatten(), nn.Linear(784, job.width), nn.ReLU()]
        for _ in range(job.depth - 1):
            layers += [nn.Linear(job.width, job.width), nn.ReLU()]
        module = nn.Sequential(*layers, nn.Linear(job.width, 10))
        centre = torch.rand(1, 1, 28, 28)
    return load_torch(module.requires_grad_(False), centre).graph, centre


def _standin() -> tuple[Graph, Tensor]:
    """The shipped example's network and image."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "standin.onnx"
        onnx.save(cifar100_resnet_large.build_model(), str(path))
        return load_onnx(path).graph, cifar100_resnet_large.make_image()


def radius(job: Job) -> float:
    """By how much every input may change."""
    return float(cifar100_resnet_large.DISTANCE) if job.network == "standin" else EPS


def place(job: Job, group: Group, device: torch.device) -> tuple[Weights, Tensor]:
    """Weights as the job's mode says, read by the first rank, whose full copy ends here; the centre."""
    mine: list[Graph] = []

    def read() -> tuple[Graph, Tensor]:
        graph, centre = build(job)
        mine.append(graph)
        return without_values(graph), centre

    graph, centre = group.first(read)
    weights = place_weights(
        mine.pop() if mine else graph, job.mode, group, torch.float32, device,
        prefetch=job.prefetch, shard_rows=job.shard_rows,
    )  # fmt: skip
    gc.collect()
    return weights, centre


def make_pass(job: Job, weights: Weights, centre: Tensor) -> Callable[[], Tensor]:
    """The pass to measure; it gives lower and, but for `pair`, upper bounds as one flat tensor."""
    name = weights.graph.inputs[0]
    centre = centre[None].to(weights.device)
    lower, upper = (centre - radius(job)).clamp(0, 1), (centre + radius(job)).clamp(0, 1)
    box = Box({name: weights.own(name, lower)}, {name: weights.own(name, upper)})
    settings = BoundSettings(
        method="crown",
        batch_rows=job.rows or 1_000_000_000,
        budget=_AMPLE,
        shard_rows=job.shard_rows or job.dealt,
    )
    output = weights.graph.outputs[0]

    def outputs() -> Tensor:
        found = bound_outputs(weights, box, settings)[output]
        return torch.cat([weights.whole(output, end).flatten() for end in (found.lower, found.upper)])

    def some_rows() -> Tensor:
        index = torch.arange(PAIR_ROWS, device=weights.device)
        start = identity_rows(weights, output, index, torch.ones_like(index))
        return bound_rows(weights, box, bound_intermediate(weights, box, settings), start, settings).lower[0]

    return some_rows if job.network == "pair" else outputs


def measure(job: Job, group: Group, device: torch.device) -> dict[str, Any]:
    """Figures of this rank, in bytes and seconds; `bounds` on the first rank."""
    imported = _resident()
    weights, centre = place(job, group, device)
    run = make_pass(job, weights, centre)
    loading = peak_rss_bytes() - imported
    _forget_peak()
    found = _time(job, group, run, device)
    found |= {"loading": loading, "rss": peak_rss_bytes() - imported}
    with MemoryMeter(device, already=_alive(device)) as meter:
        run()
    found |= {"rest": meter.baseline, "peak": meter.peak_bytes, "largest": _largest_layer(weights.graph)}
    return found


def _time(job: Job, group: Group, run: Callable[[], Tensor], device: torch.device) -> dict[str, Any]:
    """The fastest of several passes, with what it spent on collectives."""
    best: dict[str, Any] = {}
    count, spent = 0, 0.0
    while group.any_true(count < job.repeat and spent < _LONG):
        bounds = None  # before the next pass makes its own
        group.traffic.reset()
        begun, begun_cpu = time.perf_counter(), time.process_time()
        bounds = run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        cpu = time.process_time() - begun_cpu
        count, spent = count + 1, spent + seconds
        if not best or seconds < best["seconds"]:
            traffic = group.traffic
            best = {"seconds": seconds, "cpu": cpu}
            best |= {"waited": traffic.seconds, "moved": traffic.bytes}
            best["bounds"] = bounds.tolist() if group.rank == 0 else []
    return best


def _alive(device: torch.device) -> list[Tensor]:
    """Every tensor that exists on the CPU now: what counts as at rest."""
    if device.type == "cuda":
        return []  # the allocator knows
    return [item for item in gc.get_objects() if type(item) in _KINDS and item.device.type == "cpu"]


def _largest_layer(graph: Graph) -> int:
    """Bytes of the largest node's constants in float32."""
    return max(sum(graph.constants[key].numel() for key in node.constants()) for node in graph) * 4


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _forget_peak() -> None:
    """Let the peak of the resident set begin anew, so that loading does not count (Linux 4.0)."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        pass  # then the peak is that of loading and bounding together


def main() -> None:
    """Measure the job on the command line."""
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    use_full_precision()
    world = World.from_environment()
    device = local_device(torch.device(job.device), world)
    group = start_group(world, open_store(world) if world.size > 1 else None, device, "auto", 3600)
    with torch.no_grad():
        found = measure(job, group, device)
    stop_group(group)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
