"""Seconds, peak memory and tightness of every bound method.

    python benchmarks/bounds.py                                   # generated networks
    python benchmarks/bounds.py --bench DIR --oracle DIR          # real ones, beside a reference
    python benchmarks/bounds.py --networks resnet --methods crown --rows 64 256 1024 4096

Lower and upper bounds of every output over the whole input box, one thread. Each method runs in a process
of its own, and once more in another one that counts live tensor bytes: counting slows down.
`--bench` is a folder with `instances.csv` (columns onnx, vnnlib), `--oracle` one with .npz files of another
tool's bounds on the same boxes and its seconds (METHOD_lb, METHOD_ub, METHOD_seconds). Columns:

    rows        most rows of coefficients at once; auto: sized for the processor's cache
    seconds     best of --repeat runs, network already loaded; --clock cpu leaves out what other programs take
    ref         the reference's seconds, and `ratio` ours to theirs
    of crown    this method's seconds to those of the crown line of the same network
    live        most bytes of tensors alive during the pass, without the weights
    rss         most memory of the whole process, libraries included
    width       mean over the outputs of upper - lower, and its ratio to the reference's
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from networks import ROOT, Loaded, Source, load, sources

METHODS = ("ibp", "crown-ibp", "crown", "forward", "forward+backward", "alpha-crown")
REFERENCE = {"ibp": "IBP", "crown-ibp": "CROWN-IBP", "crown": "CROWN", "alpha-crown": "alpha-CROWN"}
CHUNKED = ("crown", "alpha-crown")  # methods with so many rows that their number at once matters
COLUMNS = (
    ("network", 0), ("method", 18), ("rows", 7), ("seconds", 9), ("ref", 9), ("ratio", 7), ("of crown", 9),
    ("live MiB", 10), ("rss MiB", 9), ("width", 11), ("width/ref", 10),
)  # fmt: skip
_AMPLE = 1 << 50
_LONG = 30.0  # seconds after which a run is not repeated


def work(job: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own: bound one network by one method, timed or metered."""
    import torch

    from abcrown_dist.bounds.propagate import bound_outputs
    from abcrown_dist.bounds.settings import BoundSettings
    from abcrown_dist.graph.aten import unsupported
    from abcrown_dist.relax import REGISTRY
    from abcrown_dist.util.errors import LoadError
    from abcrown_dist.util.memory import MemoryMeter, peak_rss_bytes
    from abcrown_dist.weights.local import LocalWeights

    torch.set_num_threads(1)
    try:
        model = load(Source(**job["source"]))
    except LoadError as error:
        return {"failure": str(error)}
    if missing := unsupported(model.graph, REGISTRY):
        return {"failure": f"no relaxation for {'; '.join(missing)}"}
    weights = LocalWeights(model.graph, model.dtype)
    box = _box(model)
    # A budget, here one that binds nothing, switches the sizing for the cache off.
    rows = {} if job["rows"] is None else {"batch_rows": job["rows"], "budget": _AMPLE}
    settings = BoundSettings(method=job["method"], compare_with_ibp=job["compare"], **rows)
    with torch.no_grad():
        if job["metered"]:
            with MemoryMeter() as meter:
                bound_outputs(weights, box, settings)
            return {"live": meter.peak_bytes}
        clock = time.process_time if job["clock"] == "cpu" else time.perf_counter
        seconds: list[float] = []
        while len(seconds) < job["repeat"] and sum(seconds) < _LONG:
            start = clock()
            bounds = bound_outputs(weights, box, settings)
            seconds.append(clock() - start)
    parts = [bounds[name].upper - bounds[name].lower for name in model.graph.outputs]
    width = float(torch.cat([part.double().flatten() for part in parts]).mean())
    own = {"seconds": min(seconds), "width": width, "rss": peak_rss_bytes()}
    return own | _reference(model, job["method"])


def _box(model: Loaded) -> Any:
    """The model's box as a batch of one, rounded outward to its dtype."""
    import torch

    from abcrown_dist.bounds.concretize import Box
    from abcrown_dist.util.numerics import round_down, round_up
    from abcrown_dist.weights.evaluate import split_inputs

    lower, upper = (torch.from_numpy(end).double()[None] for end in (model.lower, model.upper))
    ends = round_down(lower, model.dtype), round_up(upper, model.dtype)
    return Box(*(split_inputs(model.graph, end) for end in ends))


def _reference(model: Loaded, method: str) -> dict[str, float]:
    key, found = REFERENCE.get(method), model.reference
    if key is None or f"{key}_seconds" not in found:
        return {}
    width = (found[f"{key}_ub"].astype(float) - found[f"{key}_lb"].astype(float)).mean()
    return {"ref": float(found[f"{key}_seconds"]), "ref_width": float(width)}


def launch(job: dict[str, Any], limit: float) -> dict[str, Any]:
    """Run `work` in a fresh process; what went wrong stands under `failure`."""
    words = [sys.executable, __file__, "--job", json.dumps(job)]
    try:
        result = subprocess.run(
            words, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, check=False, timeout=limit,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"failure": f"more than {limit:g} s"}
    if result.returncode != 0:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        return {"failure": f"exit code {result.returncode}: {last}"}
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def measure(source: Source, method: str, rows: int | None, options: argparse.Namespace) -> dict[str, Any]:
    """Time one method on one network, then meter it."""
    job = {
        "source": source.to_dict(), "method": method, "rows": rows, "repeat": options.repeat,
        "compare": not options.no_compare, "clock": options.clock, "metered": False,
    }  # fmt: skip
    found = launch(job, options.limit)
    if options.no_memory or "failure" in found:
        return found
    return {**launch({**job, "metered": True}, options.limit), **found}


def cells(head: list[str], found: dict[str, Any], crown: float | None) -> list[str]:
    """One line of the table, `head` its first three columns; `crown` the seconds to compare with."""
    if "seconds" not in found:
        return [*head, f"  {found['failure']}"]
    seconds, width = found["seconds"], found["width"]

    def ratio(value: float, base: float | None) -> str:
        return f"{value / base:.3f}" if base else ""

    return [
        *head, f"{seconds:.4f}", f"{found['ref']:.4f}" if "ref" in found else "",
        ratio(seconds, found.get("ref")), ratio(seconds, crown),
        f"{found['live'] / 2**20:.1f}" if "live" in found else "", f"{found['rss'] / 2**20:.0f}",
        f"{width:.4g}", ratio(width, found.get("ref_width")),
    ]  # fmt: skip


def show(values: list[str], markdown: bool, name_width: int) -> None:
    """Print one line; texts to the left, numbers to the right."""
    if markdown:
        full = values + [""] * (len(COLUMNS) - len(values))
        print("| " + " | ".join(full) + " |", flush=True)
        return
    widths = [name_width, *(width for _, width in COLUMNS[1:])]
    texts = [f"{text:{width}}" for text, width in zip(values[:2], widths, strict=False)]
    numbers = [f"{text:>{width}}" for text, width in zip(values[2:], widths[2:], strict=False)]
    print("".join(texts + numbers).rstrip(), flush=True)


def table(chosen: list[Source], options: argparse.Namespace) -> None:
    """Measure and print line by line."""
    line = partial(show, markdown=options.markdown, name_width=max(len(source.name) for source in chosen) + 2)
    line([name for name, _ in COLUMNS])
    if options.markdown:
        line(["---", "---", *["---:"] * (len(COLUMNS) - 2)])
    # crown first, if it is asked for: the others are compared with it.
    methods = sorted(options.methods, key=lambda method: method != "crown")
    for source in chosen:
        crown: float | None = None
        for method in methods:
            for rows in options.rows if options.rows and method in CHUNKED else [None]:
                found = measure(source, method, rows, options)
                if method == "crown":
                    crown = crown or found.get("seconds")
                head = [source.name, method, "auto" if rows is None else str(rows)]
                line(cells(head, found, crown))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--bench", type=Path, help="folder of networks and properties, with instances.csv")
    parser.add_argument("--oracle", type=Path, help="folder of .npz files: a reference's bounds and times")
    parser.add_argument("--networks", nargs="+", metavar="TEXT", help="only those whose name contains a TEXT")
    parser.add_argument("--methods", nargs="+", metavar="METHOD", choices=METHODS, default=METHODS)
    parser.add_argument("--rows", nargs="+", type=int, metavar="N", help="rows at once (default: auto)")
    parser.add_argument("--repeat", type=int, default=3, help="best of so many runs (default 3)")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="(default wall)")
    parser.add_argument("--limit", type=float, default=300, help="seconds per process (default 300)")
    parser.add_argument("--no_compare", action="store_true", help="do not intersect with interval bounds")
    parser.add_argument("--no_memory", action="store_true", help="leave out the metered runs")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure and print the table."""
    options = parse()
    if options.job is not None:
        print(json.dumps(work(json.loads(options.job))))
        return
    wanted = options.networks or [""]
    known = sources(options.bench, options.oracle)
    chosen = [source for source in known if any(text in source.name for text in wanted)]
    if not chosen:
        raise SystemExit(f"no network matches; there are {', '.join(source.name for source in known)}")
    table(chosen, options)


if __name__ == "__main__":
    main()
