"""Where the time of a trivial verification goes, from the start of the process to its end.

    python benchmarks/startup.py [--repeat 5] [--markdown] [-- PROGRAM ARGUMENTS]

Every figure comes from processes of their own. The first part is what importing torch and onnx2pytorch
costs anybody; the second follows one run of the program through its stages, without the graph cache and
with a filled one; these are medians. The last part sees whole runs from outside and takes the smallest
of each kind, since a busy machine only ever adds: what is beyond `import torch` shall be below 0.8 s with a
filled cache. The shipped example is verified unless other arguments are given.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ["--config", "digits_mlp.yaml"]
LIMIT = 0.8  # seconds beyond `import torch` for a trivial instance with a filled cache

_IMPORTS = """
import json, time
marks = [time.monotonic()]
import torch
marks.append(time.monotonic())
if {both}:
    import onnx2pytorch
marks.append(time.monotonic())
print(json.dumps(marks), flush=True)
"""

# The program's own steps in its own order, with the clock read in between. CLOCK_MONOTONIC is the same
# for all processes: the parent relates these marks to the start and end that it saw.
_STAGES = """
import json, sys, time
marks = {"interpreter": time.monotonic()}
def mark(name): marks[name] = time.monotonic()
from abcrown_dist import cli
from abcrown_dist.__main__ import console
words = sys.argv[3:]
converts = sys.argv[2] == "cold"
config = cli.load_config(words)
mark("command line and configuration")
with cli._no_collection():
    import torch
    mark("import torch")
    if converts:
        import onnxruntime
        mark("import onnxruntime")
        import onnx
        mark("import onnx")
        from abcrown_dist.graph.converter import import_onnx2pytorch
        import_onnx2pytorch()
        mark("import onnx2pytorch")
    from abcrown_dist import session
    mark("import the rest of abcrown_dist")
phases = {}
class Progress(session.Progress):
    def __exit__(self, *exception):
        super().__exit__(*exception)
        phases.update(self.seconds)
session.Progress = Progress
def main():
    code = session.run(config, time.monotonic())
    mark("run")
    json.dump({"marks": marks, "phases": phases}, open(sys.argv[1], "w"))
    return code
console.__globals__["main"] = main
console()
"""


def run(words: list[str], folder: str) -> tuple[float, float, str]:
    """Run a process in `folder`; its start and end on the monotonic clock, and its standard output.

    Raises:
        SystemExit: it failed.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    result = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    end = time.monotonic()
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(words[:3])} ...: exit code {result.returncode}\n{result.stderr}")
    return start, end, result.stdout


def import_torch(folder: str) -> float:
    """Seconds for importing torch in a process that does nothing else."""
    *_, output = run([sys.executable, "-c", _IMPORTS.format(both=False)], folder)
    begun, torch, _ = json.loads(output)
    return float(torch - begun)


def plain_imports(folder: str) -> dict[str, float]:
    """Seconds for importing torch and then onnx2pytorch, as they come."""
    *_, output = run([sys.executable, "-c", _IMPORTS.format(both=True)], folder)
    begun, torch, onnx2pytorch = json.loads(output)
    found = {"import torch": torch - begun, "import onnx2pytorch": onnx2pytorch - torch}
    return {**found, "sum": onnx2pytorch - begun}


def stages(kind: str, arguments: list[str], folder: str) -> dict[str, float]:
    """Seconds of every stage of one run, `cold` or `filled`; they sum up to the process's wall time."""
    timeline = Path(folder, "timeline.json")
    start, end, _ = run([sys.executable, "-c", _STAGES, str(timeline), kind, *arguments], folder)
    read = json.loads(timeline.read_text())
    marks, phases = read["marks"], read["phases"]
    found: dict[str, float] = {}
    before = start
    for name, moment in marks.items():
        found[name] = moment - before
        before = moment
    whole = found.pop("run")
    load, attack = phases.pop("load", 0.0), phases.pop("attack", 0.0)
    bounds = sum(phases.values())
    found |= {"load and check the network": load, "attack": attack, "bounds": bounds}
    found["write results, print"] = whole - load - attack - bounds
    return {**found, "end of the process": end - before, "sum": end - start}


def end_to_end(arguments: list[str], folder: str) -> float:
    """Wall time of the program itself, without any measuring inside."""
    start, end, _ = run([sys.executable, "-m", "abcrown_dist", *arguments], folder)
    return end - start


def median(runs: list[dict[str, float]]) -> dict[str, float]:
    """Median of every figure; a figure that some run lacks counts as 0 there."""
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: statistics.median(run.get(name, 0.0) for run in runs) for name in names}


def show(title: str, rows: dict[str, float], markdown: bool) -> None:
    """Print one part of the table."""
    if markdown:
        print(f"\n| {title} | seconds |\n|---|---:|")
        print("\n".join(f"| {name} | {seconds:.3f} |" for name, seconds in rows.items()))
        return
    print(f"\n{title}")
    print("\n".join(f"  {name:42}{seconds:8.3f}" for name, seconds in rows.items()))


def turn(cold: list[str], filled: list[str], folder: str) -> dict[str, dict[str, float]]:
    """Everything once, in turns, so that a slow minute of the machine hits all parts alike."""
    whole = {
        "import torch alone": import_torch(folder),
        "whole process, without cache": end_to_end(cold, folder),
        "whole process, filled cache": end_to_end(filled, folder),
    }
    return {
        "importing alone": plain_imports(folder),
        "one run without cache, by stage": stages("cold", cold, folder),
        "one run with a filled cache, by stage": stages("filled", filled, folder),
        "smallest": whole,
    }


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5, help="processes per figure (default 5)")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument("arguments", nargs="*", help="arguments of the program, after --")
    options = parser.parse_args()
    cold = options.arguments or EXAMPLE
    with tempfile.TemporaryDirectory() as folder:
        filled = [*cold, "--cache_onnx_conversion", "--cache_dir", folder]
        run([sys.executable, "-m", "abcrown_dist", "prepare", *filled], folder)
        end_to_end(cold, folder)  # warms the file cache
        turns = [turn(cold, filled, folder) for _ in range(options.repeat)]
    for part in turns[0]:
        if part != "smallest":
            show(f"{part} (median)", median([each[part] for each in turns]), options.markdown)
    least = {name: min(each["smallest"][name] for each in turns) for name in turns[0]["smallest"]}
    torch, *wholes = least.values()
    beyond = [f"{name.split(', ')[1]}: beyond import torch" for name in list(least)[1:]]
    least |= {name: whole - torch for name, whole in zip(beyond, wholes, strict=True)}
    show(f"from outside (smallest of {options.repeat})", least, options.markdown)
    print(f"\nfilled cache, beyond import torch: {least[beyond[1]]:.3f} s, limit {LIMIT} s")


if __name__ == "__main__":
    main()
