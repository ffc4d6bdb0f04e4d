"""One rank of one measurement of `bab_scaling.py`: the program's own flow, with the search timed or metered.

Started by torchrun with a job in JSON; writes its figures into a file of the job's folder. Only `Loop.run` is
measured, from when all ranks are there to when the last one leaves: not loading, not the bounds of the root.

How a live tensor is attributed: what exists when loading ends is `weights`, what the root's bounds add
until the search begins is `bounds`. A storage that appears in the search belongs to the innermost function
of the engine that `_OWNERS` lists when it is allocated, whoever holds it later; the optimiser's tensors
(values, moments, gradients, limits, best ones) are alpha where their last axis is a packed row of slopes,
else beta. Under `A` come coefficients, what the way back keeps of them for gradients, and the points that the
same sweep yields. `domains` are the states (alpha, beta, decisions) that wait or wander between rounds. The
rest is `other`: identities, margins, scores, points for the probe.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from bab_scaling_tables import Figures, Job
from torch import Tensor, nn

from abcrown_dist import branching
from abcrown_dist.bab.loop import Loop
from abcrown_dist.bab.search import Start
from abcrown_dist.bab.split_relu import ReluSplitter
from abcrown_dist.config.load import load_config
from abcrown_dist.outcome import Outcome
from abcrown_dist.parallel.clock import AgreedDeadline
from abcrown_dist.parallel.group import Group
from abcrown_dist.parallel.launch import World, open_store, start_group, stop_group
from abcrown_dist.problem import Instance, load
from abcrown_dist.report.progress import Progress
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.util.memory import MemoryMeter, _Storages
from abcrown_dist.util.numerics import use_full_precision
from abcrown_dist.util.resident import peak_rss_bytes
from abcrown_dist.verify import decide

_PACKAGE = str(Path(branching.__file__).parent) + "/"
_SLOPES_OR_MULTIPLIERS = "alpha or beta"
# By file, and by function where one file does several things; "" stands for all others of the file.
_OWNERS: dict[str, dict[str, str]] = {
    "bab/store.py": {"": "domains"},
    "bab/domains.py": {"": "domains"},
    "bab/crew.py": {"_empty": "domains"},
    "bab/split_relu.py": {"roots": "domains", "_children": "domains", "_without_gaps": "domains"},
    "bounds/ascent.py": {"": _SLOPES_OR_MULTIPLIERS},
    "bounds/slopes.py": {"": "alpha"},
    "bounds/beta.py": {
        **dict.fromkeys(("gradients", "maximise", "__init__", "drop"), _SLOPES_OR_MULTIPLIERS),
        **dict.fromkeys(("finish", "_keep_results"), _SLOPES_OR_MULTIPLIERS),
        **dict.fromkeys(("pushes", "_at"), "beta"),
        **dict.fromkeys(("impose", "cut_interval"), "bounds"),
    },
    "bounds/types.py": {"": "bounds"},
    "bounds/intervals.py": {"": "bounds"},
    "bounds/propagate.py": {"": "bounds"},
    "relax/two_piece.py": {"": "bounds"},
    "bounds/backward.py": {"": "A"},
    "bounds/concretize.py": {"": "A"},
    "weights/apart.py": {"": "weights"},
    "weights/fsdp.py": {"": "weights"},
}


@dataclass
class _Ledger(_Storages):
    """Live bytes by owner, now and at the peak.

    Args:
        slopes: length of a packed row of slopes.
    """

    slopes: int

    def __post_init__(self) -> None:
        self.owners: dict[int, str] = {}
        self.by_owner: Counter[str] = Counter()
        self.at_peak: dict[str, int] = {}
        super().__init__(())

    def enter(self, tensors: list[Tensor], owner: str) -> None:
        """Count tensors that exist already."""
        for tensor in tensors:
            self.owners.setdefault(tensor.untyped_storage()._cdata, owner)
            self.count(tensor)

    def count(self, tensor: Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        if key not in self.owners:
            self.owners[key] = owner_of(tensor, self.slopes)
        live, peak = self.live, self.peak
        super().count(tensor)
        self.by_owner[self.owners[key]] += self.live - live
        if self.peak > peak:
            self.at_peak = dict(self.by_owner)

    def _forget(self, key: int) -> None:
        live = self.live
        super()._forget(key)
        self.by_owner[self.owners.pop(key)] += self.live - live


def owner_of(tensor: Tensor, slopes: int) -> str:
    """Who has just allocated a tensor, by the functions that are running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_PACKAGE):
            functions = _OWNERS.get(code.co_filename[len(_PACKAGE) :], {})
            owner = functions.get(code.co_name) or functions.get("")
            if owner == _SLOPES_OR_MULTIPLIERS:
                return "alpha" if tensor.ndim and tensor.shape[-1] == slopes else "beta"
            if owner is not None:
                return owner
        frame = frame.f_back
    return "other"


class Gauge:
    """Measures every `Loop.run` of this process.

    Attributes:
        figures: of this rank, all searches together.
        loaded: tensors that existed when loading ended.
    """

    def __init__(self, group: Group, metered: bool) -> None:
        self.group, self.metered = group, metered
        self.figures = Figures()
        self.loaded: list[Tensor] = []

    def run(self, loop: Loop, start: Start | None, search: Any) -> None:
        """One search, as `search` carries it out."""
        figures = self.figures
        self.group.any_true(False)  # until all are here
        waited, begun, cpu = self.group.traffic.seconds, time.perf_counter(), time.process_time()
        if self.metered:
            self._meter(loop, lambda: search(loop, start))
        else:
            search(loop, start)
        self.group.any_true(False)
        figures.seconds += time.perf_counter() - begun
        figures.cpu += time.process_time() - cpu
        figures.waited += self.group.traffic.seconds - waited
        figures.domains, figures.rounds = loop.search.visited, loop.rounds
        figures.worst = loop.search.rounds[-1].worst

    def _meter(self, loop: Loop, search: Any) -> None:
        assert isinstance(loop.splitter, ReluSplitter)
        lower, _ = loop.splitter.neurons.movable.limits(loop.splitter.relaxed, 1)
        ledger = _Ledger(lower.shape[-1])
        del lower
        ledger.enter(self.loaded, "weights")
        ledger.enter(alive(), "bounds")
        meter = MemoryMeter()
        meter._source = ledger  # a meter that keeps books as well
        with meter:
            search()
        if meter.peak_bytes > self.figures.peak:
            self.figures.peak, self.figures.owners = meter.peak_bytes, ledger.at_peak


def alive() -> list[Tensor]:
    """Every tensor that exists on the CPU now."""
    kinds = (Tensor, nn.Parameter)
    return [item for item in gc.get_objects() if type(item) in kinds and item.device.type == "cpu"]


def measure(job: Job, group: Group) -> Figures:
    """Load, bound the root and search; figures of this rank's search."""
    config = load_config(list(job.words))
    instance = Instance(Path(job.onnx), Path(job.vnnlib), job.limit)
    deadline = AgreedDeadline(job.limit, None, group) if group.size > 1 else Deadline(job.limit)
    gauge, search = Gauge(group, job.metered), Loop.run
    torch.manual_seed(config.general.seed)
    problem = load(config, instance, group)
    gc.collect()
    gauge.loaded = alive() if job.metered else []

    def run(loop: Loop, start: Start | None = None) -> None:
        gauge.run(loop, start, search)

    with mock.patch.object(Loop, "run", run), torch.no_grad():
        decide(problem.config, problem, deadline, Progress(mode="none"), Outcome())
    gauge.figures.rss = peak_rss_bytes()
    return gauge.figures


def main() -> None:
    """Measure the job on the command line."""
    job = Job.from_json(sys.argv[1])
    torch.set_num_threads(1)
    use_full_precision()
    world = World.from_environment()
    device = torch.device("cpu")
    group = start_group(world, open_store(world) if world.size > 1 else None, device, "auto", job.limit)
    figures = measure(job, group)
    stop_group(group)
    Path(job.folder, f"{world.rank}.json").write_text(json.dumps(asdict(figures)), encoding="utf-8")
    os._exit(0)  # as the program ends: torn down in order, gloo's threads abort now and then


if __name__ == "__main__":
    main()
