"""Memory and time of sharded bound passes beside one process, after the tables of arXiv 2606.09377.

    python benchmarks/sharding.py                                  # all tables (the better part of an hour)
    python benchmarks/sharding.py --quick                          # small networks, P = 1 and 2, two minutes
    python benchmarks/sharding.py --networks mlp_4096x4 --worlds 1 2 --markdown

Every line is a group of processes of its own, one thread each, gloo on the CPU. CROWN over one image
of which every pixel may change by 0.02, clamped to [0, 1]. mlp_HxD: Flatten, Linear(784, H), ReLU,
(D - 1) x [Linear(H, H), ReLU], Linear(H, 10), bounds of all outputs; pair_H: Linear(4096, H), ReLU,
Linear(H, 4096), lower bounds of 2048 outputs; weights are torch's, from seed 42. standin: the network and
the box of examples/cifar100_resnet_large.py, 1024 rows at once in every mode. Modes:

    single          one process, all rows of a layer at once
    single chunks   one process, 1024 rows at once
    fsdp            weights sharded, the next layer gathered early, all rows at once
    fsdp rows       weights sharded, rows dealt out over ranks (parallel.shard_rows), no early gather
    tp              weights, coefficients and bounds sharded by neuron

Columns; memory and time are the largest of all ranks, MiB and seconds:

    rest, peak      bytes of all live tensors before the pass, and at most during it (a metered second pass)
    of single       peak to the single process's
    reference       the peak that the reference's authors measured after their paper, and its ratio
    paper           the ratio that their paper claims
    rss             largest resident set during the pass, less what importing libraries took
    load            the same while the network was built and dealt out, on the first rank
    seconds         fastest of up to three passes, and the ratio to the single process
    cpu             the processor's seconds of that pass, which other programs do not disturb much
    ref. time       the reference's ratio
    waiting         seconds inside collectives
    moved           MiB that a rank received (fsdp) or passed on (tp)
    deviation       largest |difference| of bounds to those of the single process, over their largest value

P ranks share this machine's cores: with fewer cores than ranks times say little.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from sharding_targets import CLAIMS, REFERENCE, targets
from sharding_types import Job, Measured

ROOT = Path(__file__).resolve().parent.parent
FULL = ("mlp_1024x4", "mlp_4096x4", "mlp_8192x4", "mlp_4096x8", "pair_131072", "standin")
QUICK = ("mlp_1024x4", "pair_4096")
COLUMNS = (
    ("network", 13), ("mode", 15), ("P", 3), ("rest", 9), ("peak", 9), ("of single", 11), ("reference", 11),
    ("of its single", 15), ("paper", 11), ("rss", 9), ("load", 9), ("seconds", 9), ("of single", 11),
    ("cpu", 8), ("of single", 11), ("ref. time", 11), ("waiting", 9), ("moved", 10), ("deviation", 11),
)  # fmt: skip
_LEFT = 2  # columns of text


@dataclass(frozen=True)
class Mode:
    """One way to run a pass, as fields of a `Job`; `single` ones run in one process."""

    name: str
    single: bool
    fields: dict[str, Any] = field(default_factory=dict)


MODES = (
    Mode("single", True),
    Mode("single chunks", True, {"rows": 1024}),
    Mode("fsdp", False, {"mode": "fsdp"}),
    Mode("fsdp rows", False, {"mode": "fsdp", "shard_rows": True, "prefetch": False}),
    Mode("tp", False, {"mode": "tp"}),
)


def job_of(network: str, mode: Mode, options: argparse.Namespace) -> Job:
    """The job that the name of a network and a mode mean.

    Raises:
        SystemExit: the name means nothing.
    """
    found = re.fullmatch(r"(mlp)_(\d+)x(\d+)|(pair)_(\d+)|(standin)", network)
    if found is None:
        raise SystemExit(f"no network {network}: names are mlp_WIDTHxDEPTH, pair_WIDTH and standin")
    kind, *sizes = (part for part in found.groups() if part is not None)
    width, depth = [*map(int, sizes), 0, 0][:2]
    # Untold, the ResNet's layers of 8192 neurons would be bounded all at once in 1.6 GiB.
    # And a single process must cut its few rows as ranks do, if bits are to be compared.
    fields = {"rows": 1024, "dealt": True, **mode.fields} if kind == "standin" else mode.fields
    return Job(kind, width, depth, repeat=options.repeat, device=options.device, **fields)


def run(job: Job, world: int, limit: float) -> list[dict[str, Any]]:
    """Figures of every rank of a fresh group of processes.

    Raises:
        RuntimeError: some rank failed, or the group took too long.
    """
    common = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(world)}
    words = [sys.executable, str(ROOT / "benchmarks" / "sharding_worker.py"), job.to_json()]
    ranks: list[subprocess.Popen[str]] = []
    with ExitStack() as files:
        outputs = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2 * world)]
        try:
            for rank, (out, err) in enumerate(zip(outputs[::2], outputs[1::2], strict=True)):
                own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.append(subprocess.Popen(words, env=own, text=True, stdout=out, stderr=err))
            _wait(ranks, time.monotonic() + limit)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        texts = [_content(output) for output in outputs]
    for rank, process in enumerate(ranks):
        if process.returncode:
            last = (texts[2 * rank + 1].splitlines() or ["no message; was it killed for want of memory?"])[-1]
            raise RuntimeError(f"rank {rank} ended with {process.returncode}: {last}")
    return [json.loads(text.splitlines()[-1]) for text in texts[::2]]


def _content(file: IO[str]) -> str:
    file.seek(0)
    return file.read().strip()


def _wait(ranks: Sequence[subprocess.Popen[str]], deadline: float) -> None:
    """Until all ranks ended, or one failed: the others would wait for it."""
    while any(process.poll() is None for process in ranks):
        if any(process.returncode for process in ranks):
            return
        if time.monotonic() > deadline:
            raise RuntimeError("took too long (--limit)")
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def summarise(found: Sequence[dict[str, Any]], bounds: Sequence[float] | None) -> Measured:
    """The largest figure over the ranks of each kind; `bounds` are the single process's."""
    own = found[0]["bounds"]
    deviation = 0.0
    if bounds is not None:
        scale = max(map(abs, bounds))
        deviation = max(abs(a - b) for a, b in zip(own, bounds, strict=True)) / scale
    largest = {key: max(rank[key] for rank in found) for key in found[0] if key not in ("bounds", "largest")}
    return Measured(**largest, layer=found[0]["largest"], deviation=deviation, bounds=own)


def cells(network: str, mode: str, world: int, found: Measured, single: Measured | None) -> list[str]:
    """One line of the table."""
    reference = REFERENCE.get(network)
    known = None if reference is None else reference.peak(mode, world)

    def mib(count: float) -> str:
        return f"{count / 2**20:.1f}"

    def ratio(value: float | None, base: float | None) -> str:
        return f"{value / base:.2f}" if value and base else ""

    return [
        network, mode, str(world), mib(found.rest), mib(found.peak),
        ratio(found.peak, single.peak if single else None),
        f"{known:.1f}" if known else "", ratio(known, reference.single if reference else None),
        CLAIMS.get((network.partition("_")[0], mode, world), ""), mib(found.rss), mib(found.loading),
        f"{found.seconds:.2f}", ratio(found.seconds, single.seconds if single else None),
        f"{found.cpu:.2f}", ratio(found.cpu, single.cpu if single else None),
        ratio(reference.seconds(mode, world), reference.seconds("single", 1)) if reference else "",
        f"{found.waited:.2f}", mib(found.moved),
        "" if mode == "single" else "0 (bits)" if found.deviation == 0 else f"{found.deviation:.1e}",
    ]  # fmt: skip


def show(values: Sequence[str], markdown: bool) -> None:
    """Print one line; texts to the left, numbers to the right."""
    if markdown:
        print("| " + " | ".join([*values, *[""] * (len(COLUMNS) - len(values))]) + " |", flush=True)
        return
    widths = [width for _, width in COLUMNS]
    line = [f"{text:{width}}" for text, width in zip(values[:_LEFT], widths, strict=False)]
    line += [f"{text:>{width}}" for text, width in zip(values[_LEFT:], widths[_LEFT:], strict=False)]
    print("".join(line).rstrip(), flush=True)


def table(network: str, options: argparse.Namespace) -> None:
    """Measure one network in every mode, line by line, then say which targets are met."""
    results: dict[tuple[str, int], Measured] = {}
    for mode in MODES:
        if mode.name not in options.modes:
            continue
        for world in [1] if mode.single else [size for size in options.worlds if size > 1]:
            single = results.get(("single", 1))
            try:
                ranks = run(job_of(network, mode, options), world, options.limit)
            except RuntimeError as error:
                show([network, mode.name, str(world), f"  {error}"], options.markdown)
                continue
            found = summarise(ranks, single.bounds if single else None)
            results[mode.name, world] = found
            show(cells(network, mode.name, world, found, single), options.markdown)
    print()
    for target in targets(network, results):
        print(("- " if options.markdown else "  ") + str(target))
    print(flush=True)


def parse() -> argparse.Namespace:
    """The command line."""
    names = [mode.name for mode in MODES]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--networks", nargs="+", metavar="NAME", help=f"default: {' '.join(FULL)}")
    parser.add_argument(
        "--modes", nargs="+", choices=names, default=names, metavar="MODE", help="default: all"
    )
    parser.add_argument("--worlds", nargs="+", type=int, metavar="P", help="default: 1 2 4")
    parser.add_argument("--quick", action="store_true", help="small networks, P = 1 and 2, one pass")
    parser.add_argument("--repeat", type=int, help="passes to time, if they are short (default 3)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default cpu)")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for one line (default 1800)")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    options = parser.parse_args()
    options.worlds = options.worlds or ([1, 2] if options.quick else [1, 2, 4])
    options.repeat = options.repeat or (1 if options.quick else 3)
    return options


def main() -> None:
    """Measure and print the tables."""
    options = parse()
    begun = time.monotonic()
    chosen = options.networks or (QUICK if options.quick else FULL)
    for network in chosen:
        job_of(network, MODES[0], options)  # refuse an unknown name before anything is measured
    for network in chosen:
        show([name for name, _ in COLUMNS], options.markdown)
        if options.markdown:
            show(["---"] * _LEFT + ["---:"] * (len(COLUMNS) - _LEFT), True)
        table(network, options)
    cores, (load, *_) = os.cpu_count(), os.getloadavg()
    minutes = (time.monotonic() - begun) / 60
    print(f"{cores} cores, load average {load:.1f} at the end, {minutes:.1f} minutes in all")


if __name__ == "__main__":
    main()
