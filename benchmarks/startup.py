"""Where the time of a trivial verification goes, from the start of the process to its end.

    python benchmarks/startup.py [--repeat 7] [--markdown] [-- PROGRAM ARGUMENTS]

Every figure is a median over processes of their own. The first part is what importing torch and
onnx2pytorch costs anybody; the second follows one run of the program through its stages; the third is
that run seen from outside. The shipped example is verified unless other arguments are given.
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

_IMPORTS = """
import json, time
marks = [time.monotonic()]
import torch
marks.append(time.monotonic())
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
words = sys.argv[2:]
config = cli.load_config(words)
mark("command line and configuration")
with cli._no_collection():
    import torch
    mark("import torch")
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


def plain_imports(folder: str) -> dict[str, float]:
    """Seconds for importing torch and then onnx2pytorch, as they come."""
    *_, output = run([sys.executable, "-c", _IMPORTS], folder)
    begun, torch, onnx2pytorch = json.loads(output)
    return {"import torch": torch - begun, "import onnx2pytorch": onnx2pytorch - torch}


def stages(arguments: list[str], folder: str) -> dict[str, float]:
    """Seconds of every stage of one run; they sum up to the process's wall time."""
    timeline = Path(folder, "timeline.json")
    start, end, _ = run([sys.executable, "-c", _STAGES, str(timeline), *arguments], folder)
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
    found["end of the process"] = end - before
    return found


def end_to_end(arguments: list[str], folder: str) -> dict[str, float]:
    """Wall time of the program itself, without any measuring inside."""
    start, end, _ = run([sys.executable, "-m", "abcrown_dist", *arguments], folder)
    return {"whole process": end - start}


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
    print("\n".join(f"  {name:34}{seconds:8.3f}" for name, seconds in rows.items()))


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeat", type=int, default=7, help="processes per figure (default 7)")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument("arguments", nargs="*", help="arguments of the program, after --")
    options = parser.parse_args()
    arguments = options.arguments or EXAMPLE
    with tempfile.TemporaryDirectory() as folder:
        end_to_end(arguments, folder)  # warms the file cache
        # Taken in turns, so that a slow minute of the machine hits all parts alike.
        turns = [
            (plain_imports(folder), stages(arguments, folder), end_to_end(arguments, folder))
            for _ in range(options.repeat)
        ]
    imports, parts, whole = (median([turn[part] for turn in turns]) for part in range(3))
    base = sum(imports.values())
    show("importing alone", {**imports, "sum": base}, options.markdown)
    show("one run, by stage", {**parts, "sum": sum(parts.values())}, options.markdown)
    beyond = {**whole, "beyond the two imports alone": whole["whole process"] - base}
    show("the program from outside", beyond, options.markdown)


if __name__ == "__main__":
    main()
