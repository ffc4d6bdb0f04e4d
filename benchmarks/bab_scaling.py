"""Speed and memory of branch and bound over several ranks.

    python benchmarks/bab_scaling.py                        # a generated 256x6 network; an hour or so
    python benchmarks/bab_scaling.py --quick                # two minutes
    python benchmarks/bab_scaling.py --onnx NET.onnx --vnnlib PROP.vnnlib --markdown

Every line is a group of processes of its own under torchrun, one thread each, gloo on the CPU, and goes
through the program's main flow; figures are of the search alone, from when all ranks begin to when the last
one ends.
The attack is skipped, pre-activations are bounded by CROWN, slopes and multipliers take 20 steps.

Speed: the same work whatever the number of ranks (bab.force_synchronous, --rounds rounds of --batch
domains), all layouts in turn, --repeat times. Columns, medians over repetitions:

    domains      bounded by all ranks
    to P=1       domains per second to those of one process in the same repetition; lowest and highest of them
    cpu          processor's seconds of all ranks together
    waited       seconds that each rank spent in collectives

Memory: searches as users run them (bab.force_synchronous false), --memory-rounds rounds of each of
--batches; solver.batch_size counts the domains of all ranks. Columns, MiB of the rank that has most:

    peak         most bytes of live tensors, weights included, at any time of the search
    alpha, beta  slopes and multipliers in the optimisation, with moments, gradients, best values
    bounds       pre-activation bounds and lines, of the root and of every domain
    A            coefficients, and what the backward pass keeps of them
    domains      states of domains that wait or are being dealt out (their slopes included)
    rss          largest resident set of a process, libraries included

benchmarks/bab_scaling_worker.py says how a tensor is attributed. Counting slows the search down: the memory
table's seconds are not its speed. A group that does not end within --limit seconds is killed and
counts as a failure (exit code 1); missed targets are printed. Ranks share this machine's cores: with fewer
free cores than ranks, times say little.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from bab_scaling_tables import (
    ALONE,
    MEMORY,
    SPEED,
    Figures,
    Job,
    Layout,
    head,
    line,
    memory_cells,
    memory_targets,
    speed_cells,
    speed_targets,
)

ROOT = Path(__file__).resolve().parent.parent
COMMON = (
    "--device", "cpu", "--pgd_order", "skip", "--complete_verifier", "bab", "--no_incomplete",
    "--bound_prop_method", "crown", "--bab.branching.input_split.enable", "false",
    "--init_iteration", "20", "--iteration", "20", "--lr_beta", "0.03",
)  # fmt: skip


_OUTPUTS = [f"Y_{i}" for i in range(10)]
RADIUS = 0.02  # by which every input of the generated property may change
_SLACK = 0.1  # share of the gap between attack and CROWN by which it lies beyond what the attack reaches


_GRACE = 60  # seconds; torchrun grants its ranks half of it


class Failed(Exception):
    """A group of ranks that did not do its work; the message says why in one line."""


def run(job: Job, size: int, limit: float) -> list[Figures]:
    """Figures of every rank of a fresh group of processes.

    Raises:
        Failed: some rank failed, or the group was still running after `limit` seconds and has been killed.
    """
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={size}"]
    words += [str(ROOT / "benchmarks" / "bab_scaling_worker.py"), job.to_json()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    group = subprocess.Popen(
        words, env=environment, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        _, errors = group.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        raise Failed(f"did not end within {limit:g} s: a deadlock, or --limit is too low") from None
    finally:
        _end(group)
    files = [Path(job.folder, f"{rank}.json") for rank in range(size)]
    if group.returncode or not all(file.is_file() for file in files):
        raise Failed(reason(errors) or f"ended with {group.returncode}")
    return [Figures(**json.loads(file.read_text(encoding="utf-8"))) for file in files]


def _end(group: subprocess.Popen[str]) -> None:
    """Stop a group that still runs. torchrun takes its ranks along when asked to end, not when killed."""
    if group.poll() is None:
        group.terminate()
        try:
            group.communicate(timeout=_GRACE)
        except subprocess.TimeoutExpired:
            group.kill()
            group.wait()  # its ranks may still hold the pipe


def reason(errors: str) -> str:
    """The line of the ranks' standard error that tells what went wrong, and not what torchrun made of it."""
    lines = [text.partition(":")[2] if text.startswith("[rank") else text for text in errors.splitlines()]
    wrong = [text.strip() for text in lines if re.match(r"[\w.]*(Error|Exception|RankLost)\b", text)]
    own = [text for text in wrong if not text.startswith("torch.distributed.elastic")]
    signals = re.findall(r"exitcode: (-\d+)", errors)
    return own[0] if own else f"a rank was killed ({signals[0]})" if signals else "".join(wrong[:1])


def generated(folder: Path) -> tuple[str, str]:
    """A network 784 - 6 x 256 - 10, and a property that an attack finds true but that takes a deep tree.

    It is about one output, whose value must not fall below a tenth of the way from the least value that
    gradient descent finds down to CROWN's bound.
    """
    import torch
    from torch import nn

    from abcrown_dist.api import compute_bounds

    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise([784, *[256] * 6, 10]):
        linear = nn.Linear(inputs, outputs)
        nn.init.kaiming_uniform_(linear.weight, nonlinearity="relu")
        layers += [linear, nn.ReLU()]
    net, x = nn.Sequential(*layers[:-1]).requires_grad_(False), torch.rand(1, 784)
    low, high = x - RADIUS, x + RADIUS
    point = low + (high - low) * torch.rand(64, 784)
    for _ in range(100):
        point.requires_grad_(True)
        (slope,) = torch.autograd.grad(net(point)[:, 0].sum(), point)
        point = (point.detach() - RADIUS / 10 * slope.sign()).clamp(low, high)
    least = float(net(point)[:, 0].min())
    bound = float(compute_bounds(net, x, low, high, method="crown")[0][0, 0])
    model, prop = folder / "mlp_256x6.onnx", folder / "mlp_256x6.vnnlib"
    torch.onnx.export(net, (x,), str(model), dynamo=False, input_names=["x"], output_names=["y"])
    lines = [f"(declare-const {name} Real)" for name in [*(f"X_{i}" for i in range(784)), *_OUTPUTS]]
    for i, value in enumerate(x[0].tolist()):
        lines += [f"(assert (>= X_{i} {value - RADIUS:.6f}))", f"(assert (<= X_{i} {value + RADIUS:.6f}))"]
    lines.append(f"(assert (<= Y_0 {least - _SLACK * (least - bound):.6f}))")
    prop.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(model), str(prop)


class Benchmark:
    """All runs on one network.

    Attributes:
        failures: groups that did not end well.
    """

    def __init__(self, options: argparse.Namespace, onnx: str, vnnlib: str) -> None:
        self.options, self.onnx, self.vnnlib = options, onnx, vnnlib
        self.failures = 0

    def speed(self) -> None:
        """The table of speed, and its targets."""
        options = self.options
        words = ["--batch_size", str(options.batch), "--max_iterations", str(options.rounds)]
        words += ["--bab.force_synchronous", "true"]
        runs: dict[Layout, list[list[Figures]]] = {}
        several = [size for size in options.worlds if size > 1]
        layouts = [ALONE, *(Layout(mode, size) for mode in options.modes for size in several)]
        for _ in range(options.repeat):  # in turn: what disturbs the machine meets all of them
            for layout in layouts:
                found = self._run(layout, words, metered=False)
                if found is not None:
                    runs.setdefault(layout, []).append(found)
        print(f"\nspeed, batch {options.batch}\n" + head(SPEED, options.markdown))
        for layout in runs:
            print(line(speed_cells(runs, layout), SPEED, options.markdown))
        self._conclude(speed_targets(runs))

    def memory(self) -> None:
        """The table of memory, and its targets."""
        options = self.options
        print("\nmemory\n" + head(MEMORY, options.markdown), flush=True)
        modes = [mode for mode in options.modes if mode != "tp"]
        layouts = [ALONE, *(Layout(mode, size) for size in options.worlds if size > 1 for mode in modes)]
        every: list[object] = []
        for batch in options.batches:
            words = ["--batch_size", str(batch), "--max_iterations", str(options.memory_rounds)]
            peaks: dict[Layout, list[Figures]] = {}
            for layout in layouts:
                found = self._run(layout, words, metered=True)
                if found is not None:
                    peaks[layout] = found
                    print(line(memory_cells(batch, peaks, layout), MEMORY, options.markdown), flush=True)
            every += memory_targets(batch, peaks)
        self._conclude(every)

    def _run(self, layout: Layout, words: Sequence[str], metered: bool) -> list[Figures] | None:
        options = self.options
        with tempfile.TemporaryDirectory() as folder:
            files = ("--onnx_path", self.onnx, "--vnnlib_path", self.vnnlib, "--timeout", str(options.limit))
            all_words = (*files, *COMMON, "--parallel.mode", layout.mode, *words, *options.words)
            job = Job(self.onnx, self.vnnlib, all_words, metered, options.limit, folder)
            try:
                return run(job, layout.size, options.limit)
            except Failed as failure:
                self.failures += 1
                print(f"FAILED {layout}: {failure}", flush=True)
                return None

    def _conclude(self, targets: Iterable[object]) -> None:
        print()
        for target in targets:
            print(("- " if self.options.markdown else "  ") + str(target), flush=True)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain, allow_abbrev=False)
    modes = ("none", "fsdp", "tp")
    parser.add_argument("--onnx", help="network (default: a generated one)")
    parser.add_argument("--vnnlib", help="its property")
    parser.add_argument("--only", choices=("speed", "memory"), help="one of the tables")
    parser.add_argument("--modes", nargs="+", choices=modes, default=modes, help="(default: all)")
    parser.add_argument("--worlds", nargs="+", type=int, metavar="P", help="default: 1 2 4")
    parser.add_argument("--batch", type=int, help="domains of a round, for speed (default 256)")
    parser.add_argument("--rounds", type=int, help="rounds, for speed (default 16)")
    parser.add_argument("--repeat", type=int, help="repetitions, for speed (default 5)")
    parser.add_argument("--batches", nargs="+", type=int, help="for memory (default 512 4096)")
    parser.add_argument("--memory-rounds", type=int, help="rounds, for memory (default 10)")
    parser.add_argument("--quick", action="store_true", help="small rounds, P = 1 and 2, no tp")
    parser.add_argument("--limit", type=float, default=900, help="seconds for one group (default 900)")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument("words", nargs="*", help="options of the program, after --")
    options = parser.parse_args(words)
    if (options.onnx is None) != (options.vnnlib is None):
        parser.error("--onnx and --vnnlib go together")
    for name, full, quick in (
        ("worlds", [1, 2, 4], [1, 2]), ("batch", 256, 32), ("rounds", 16, 8), ("repeat", 5, 1),
        ("batches", [512, 4096], [32]), ("memory_rounds", 10, 8),
    ):  # fmt: skip
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else full)
    if options.quick:
        options.modes = [mode for mode in options.modes if mode != "tp"]
    return options


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print the tables; 1 if some group of ranks failed or hung."""
    options = parse(words)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        onnx, vnnlib = options.onnx, options.vnnlib
        if onnx is None:
            onnx, vnnlib = generated(Path(folder))
        benchmark = Benchmark(options, str(Path(onnx).resolve()), str(Path(vnnlib).resolve()))
        tables: dict[str, Callable[[], None]] = {"speed": benchmark.speed, "memory": benchmark.memory}
        for name, table in tables.items():
            if options.only in (None, name):
                table()
    cores, (load, *_) = os.cpu_count(), os.getloadavg()
    minutes = (time.monotonic() - begun) / 60
    print(f"\n{cores} cores, load average {load:.1f} at the end, {minutes:.1f} minutes in all")
    return min(1, benchmark.failures)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
