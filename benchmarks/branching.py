"""Speed and memory of branch and bound on neurons: domains per second, bytes per domain.

    python benchmarks/branching.py                                       # a generated 256x6 network
    python benchmarks/branching.py --onnx NET.onnx --vnnlib PROP.vnnlib --batches 64 512 4096

From the root, bounded by CROWN, whole rounds of a fixed number of domains are split and bounded, --rounds
of them, after enough rounds to fill a batch. Each line is a process of its own; memory comes from one more
process that counts the bytes of all live tensors. Columns:

    batch       domains split in a round; twice as many are bounded
    domains/s   children bounded per second
    live        most bytes of tensors alive in a round, weights and the store included
    per domain  of that, what the round itself took, over the number of children bounded at once
    stored      bytes of one waiting domain
    rss         most memory of the process, libraries included
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = (
    *(("batch", 7), ("domains/s", 11), ("live MiB", 10)),
    *(("KiB per domain", 16), ("KiB stored", 12), ("rss MiB", 9)),
)


def work(job: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own: rounds of one size, timed or metered."""
    import torch

    from abcrown_dist.util.memory import MemoryMeter
    from abcrown_dist.util.resident import peak_rss_bytes

    torch.set_num_threads(job["threads"])
    splitter = _splitter(job)
    batch, iterations = job["batch"], job["rounds"]
    with torch.no_grad():
        domains = _open(splitter.bound(splitter.roots()))
        while len(domains) < batch:
            levels = max(1, min(6, math.ceil(math.log2(batch / len(domains)))))
            domains = _open(splitter.bound(splitter.branch(domains, levels).children))
        domains = domains.select(domains.margin.argsort(stable=True)[:batch])
        result: dict[str, Any] = {"stored": domains.bytes() / len(domains)}
        if job["metered"]:
            with MemoryMeter(already=[*domains.state.values()]) as meter:
                splitter.bound(splitter.branch(domains, 1).children)
            result["live"], result["children"] = meter.peak_bytes, 2 * batch
        else:
            begun = time.perf_counter()
            for _ in range(iterations):
                splitter.bound(splitter.branch(domains, 1).children)
            result["rate"] = 2 * batch * iterations / (time.perf_counter() - begun)
    result["rss"] = peak_rss_bytes()
    return result


def _open(bounded: Any) -> Any:
    return bounded.domains.select(~bounded.proven)


def _splitter(job: dict[str, Any]) -> Any:
    """Neuron splitting on the first disjunct that CROWN leaves open."""
    import torch

    from abcrown_dist.bab.clauses import batches
    from abcrown_dist.bab.goals import Goals
    from abcrown_dist.bab.root import refute
    from abcrown_dist.bab.split_relu import ReluSplitter
    from abcrown_dist.config.load import load_config
    from abcrown_dist.options import bound_settings, neuron_branching
    from abcrown_dist.problem import Instance, read_instance
    from abcrown_dist.util.deadline import Deadline
    from abcrown_dist.weights.local import LocalWeights

    words = ["--onnx_path", job["onnx"], "--vnnlib_path", job["vnnlib"], "--device", job["device"]]
    config = load_config([*words, *job["words"]])
    model, prop = read_instance(config, Instance(Path(job["onnx"]), Path(job["vnnlib"]), math.inf))
    weights = LocalWeights(model.graph, torch.float32, torch.device(job["device"]))
    bounds = bound_settings(config, "crown")
    every = range(len(prop.disjuncts))
    found = refute(weights, prop, every, bounds, batch_size=64, deadline=Deadline(), model_dtype=model.dtype)
    still = sorted(set(every) - found.refuted)[:1]
    clauses = next(batches(prop, weights, still, 64, model.dtype))
    (root,) = found.roots
    settings = neuron_branching(config, bounds).relu
    largest = torch.finfo(model.dtype).max
    return ReluSplitter(
        weights, clauses.box, root.relaxed, Goals.of(clauses, set(still)), largest, settings, Deadline()
    )


def generated(folder: Path) -> tuple[str, str]:
    """A network 784 - 6 x 256 - 10 of torch's own weights, and a property that CROWN leaves open."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    widths = [784, *[256] * 6, 10]
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    net = nn.Sequential(*layers[:-1])
    with torch.no_grad():
        for layer in net:
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
        x = torch.rand(1, 784)
        y = net(x)[0]
    model, prop = folder / "mlp_256x6.onnx", folder / "mlp_256x6.vnnlib"
    torch.onnx.export(net, (x,), str(model), dynamo=False, input_names=["x"], output_names=["y"])
    best, second = y.topk(2).indices.tolist()
    names = [f"X_{i}" for i in range(784)] + [f"Y_{i}" for i in range(10)]
    lines = [f"(declare-const {name} Real)" for name in names]
    for i, value in enumerate(x[0].tolist()):
        lines += [f"(assert (>= X_{i} {value - 0.02:.6f}))", f"(assert (<= X_{i} {value + 0.02:.6f}))"]
    lines.append(f"(assert (>= Y_{second} Y_{best}))")
    prop.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(model), str(prop)


def main() -> int:
    """Print the table."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--onnx")
    parser.add_argument("--vnnlib")
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help="options of the program, after --")
    arguments = parser.parse_args()
    if arguments.work is not None:
        print(json.dumps(work(json.loads(arguments.work))))
        return 0
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        onnx, vnnlib = arguments.onnx, arguments.vnnlib
        if onnx is None or vnnlib is None:
            onnx, vnnlib = generated(Path(folder))
        print("".join(name.rjust(width) for name, width in COLUMNS), flush=True)
        for batch in arguments.batches:
            job = {
                "onnx": onnx, "vnnlib": vnnlib, "batch": batch, "rounds": arguments.rounds,
                "threads": arguments.threads, "device": arguments.device, "words": arguments.words,
            }  # fmt: skip
            timed, metered = (_run({**job, "metered": flag}) for flag in (False, True))
            cells = (
                f"{batch}", f"{timed['rate']:.0f}", f"{metered['live'] / 2**20:.1f}",
                f"{metered['live'] / metered['children'] / 2**10:.1f}", f"{timed['stored'] / 2**10:.1f}",
                f"{timed['rss'] / 2**20:.0f}",
            )  # fmt: skip
            print("".join(c.rjust(w) for c, (_, w) in zip(cells, COLUMNS, strict=True)), flush=True)
    return 0


def _run(job: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--work", json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
