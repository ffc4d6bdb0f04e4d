"""Run a set of VNN-COMP instances, one process each, and compare with other verifiers.

    python benchmarks/vnncomp.py --set DIR --timeout 60
    python benchmarks/vnncomp.py --set DIR --timeout 60 --peers FILE --cache prepare --markdown
    python benchmarks/vnncomp.py --set DIR --timeout 60 --families acasxu,oval21 -- --complete_verifier bab

DIR/instances.csv lists the instances: VNN-COMP's three columns (onnx, vnnlib, timeout; its timeout is
not used), or a header with the columns benchmark, onnx, vnnlib, expected. FILE has the columns onnx, vnnlib,
expected, NAME_verdict, NAME_seconds, ... for any number of verifiers. What follows `--` goes to every
process. Columns:

    expected    the right verdict, where a list knows it
    verdict     the first line of our results file; `killed` if the process had to be, see --kill-after
    seconds     of the whole process, start-up included, by the clock
    domains     that branch and bound visited
    reason      what decided, or what went wrong
    NAME        a peer's verdict and seconds, as FILE has them
    note        WRONG: against `expected`. DISPUTED: against a peer, `expected` unknown. lost to: solved by
                a peer, not by us. won: solved by us and by no peer that tried. late: more than 1 s over time

The end compares counts and, over what both solved, the geometric mean of our seconds to each peer's, with
targets for the peers that have one. Ctrl-C ends the run and prints what there is. Exit codes: 0, 1 if a
verdict is wrong, 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vnncomp_data import Answer, Instance, Peers, Run, choose, read_peers, read_set, with_expected
from vnncomp_tables import cells, columns, geometric_mean, ratios, show_head, show_line, show_table, totals

ROOT = Path(__file__).resolve().parent.parent


def run_instance(instance: Instance, options: argparse.Namespace, cache: Path) -> Run:
    """Verify one instance in a fresh process; `cache` is the folder for converted networks."""
    with tempfile.TemporaryDirectory() as folder:
        results, summary = Path(folder, "out.txt"), Path(folder, "summary.json")
        words = _words(instance, options, cache)
        words += ["--general.results_file", str(results), "--general.summary_file", str(summary)]
        begun = time.monotonic()
        code, errors = _call(words, options, folder)
        seconds = time.monotonic() - begun
        return _read_run(instance, seconds, code, errors, results, summary)


def prepare(instance: Instance, options: argparse.Namespace, cache: Path) -> None:
    """Convert the network ahead, as vnncomp_scripts/prepare_instance.sh does; not timed.

    Should that fail, the run converts it, and so says what is wrong in its results.
    """
    launcher, *words = _words(instance, options, cache)[1:]
    code, errors = _call([sys.executable, launcher, "prepare", *words], options, str(ROOT))
    if code:
        print(f"not prepared: {instance.onnx}: {_last(code, errors)}", file=sys.stderr, flush=True)


def _words(instance: Instance, options: argparse.Namespace, cache: Path) -> list[str]:
    config = ["--config", str(options.config.resolve())] if options.config else []
    return [
        sys.executable, str(ROOT / "abcrown_dist.py"), *config,
        "--model.onnx_path", str(instance.onnx.resolve()),
        "--specification.vnnlib_path", str(instance.vnnlib.resolve()),
        "--model.cache_onnx_conversion", "true" if options.cache == "prepare" else "false",
        "--model.cache_dir", str(cache), "--bab.timeout", f"{options.timeout}",
        "--general.progress", "none", *options.arguments,
    ]  # fmt: skip


def _call(words: Sequence[str], options: argparse.Namespace, folder: str) -> tuple[int, str]:
    """Exit code and standard error of a process in a session of its own, so that all of it can be killed.

    Ctrl-C therefore reaches this program alone, which then ends the process.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    process = subprocess.Popen(
        words, cwd=folder, env=environment, text=True, errors="replace", start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        _, errors = process.communicate(timeout=options.timeout + options.kill_after)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL, "killed long after its time"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, errors


def _read_run(
    instance: Instance, seconds: float, code: int, errors: str, results: Path, summary: Path
) -> Run:
    """What a process left behind; without a verdict, the last thing that it said."""
    verdict = (results.read_text().splitlines() or [""])[0] if results.is_file() else ""
    if not summary.is_file():
        answer = Answer("killed" if code < 0 else verdict or "error", seconds)
        return Run(instance, answer, _last(code, errors))
    found: dict[str, Any] = json.loads(summary.read_text())
    return Run(
        instance, Answer(verdict, seconds), found["reason"], found["domains"],
        found["seconds"], found["memory"]["peak_rss_bytes"],
    )  # fmt: skip


def _last(code: int, errors: str) -> str:
    return (errors.strip().splitlines() or [f"exit code {code}, no message"])[-1]


def run_set(
    instances: Sequence[Instance], peers: Peers, options: argparse.Namespace, runs: list[Run]
) -> None:
    """Run one instance after another, showing and keeping each result in `runs` as it comes."""
    if options.markdown:
        show_head(columns(peers))
    with tempfile.TemporaryDirectory() as folder:
        for instance in instances:
            if options.cache == "prepare":
                prepare(instance, options, Path(folder))
            runs.append(run_instance(instance, options, Path(folder)))
            show_line(cells(runs[-1], peers, options.timeout), options.markdown)
            if options.json:
                write_json(options.json, runs, peers, options)


def write_json(path: Path, runs: Sequence[Run], peers: Peers, options: argparse.Namespace) -> None:
    """Everything there is so far, whole at any time."""
    entries = []
    for run in runs:
        onnx, vnnlib = run.instance.key
        named = {"number": run.instance.number, "family": run.instance.family, "onnx": onnx, "vnnlib": vnnlib}
        answer = {"expected": run.instance.expected, **asdict(run.answer), "reason": run.reason}
        answer |= {"wrong": run.wrong, "solved": run.solved, "domains": run.domains}
        inside = {"phases": run.phases, "peak_rss_bytes": run.peak_rss_bytes}
        theirs = {name: asdict(answer) for name, answer in peers.of(run.instance).items()}
        entries.append({**named, **answer, **inside, "peers": theirs})
    found = {name: ratios(runs, peers, name) for name in peers.names}
    means = {name: geometric_mean(values) for name, values in found.items() if values}
    shown = {"timeout": options.timeout, "threads": options.threads, "cache": options.cache}
    shown |= {"config": str(options.config or ""), "arguments": options.arguments}
    temporary = path.with_name(f".{path.name}.tmp")
    text = json.dumps({"settings": shown, "geometric_means": means, "runs": entries}, indent=2)
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(path)


def report(runs: Sequence[Run], peers: Peers, options: argparse.Namespace) -> None:
    """The table, unless it is printed already, and the comparison."""
    if not options.markdown and runs:
        print()
        show_table(columns(peers), [cells(run, peers, options.timeout) for run in runs])
    print()
    for line in totals(runs, peers, options.cache):
        print(("- " if options.markdown else "  ") + line)
    load, *_ = os.getloadavg()
    machine = f"{options.threads} threads on {os.cpu_count()} cores, load average {load:.1f} at the end"
    print(f"\n{machine}; {options.timeout:g} s an instance; cache: {options.cache}", flush=True)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--set", type=Path, required=True, metavar="DIR", help="folder with instances.csv")
    parser.add_argument("--timeout", type=float, required=True, metavar="T", help="seconds for an instance")
    parser.add_argument("--peers", type=Path, metavar="FILE", help="CSV of other verifiers' answers")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="(default 2)")
    parser.add_argument("--families", type=_list, metavar="A,B", help="only these (default: all)")
    parser.add_argument("--instances", type=int, nargs="+", metavar="N", help="only these, from 0")
    parser.add_argument(
        "--cache", choices=("prepare", "cold"), default="cold",
        help="prepare: each network is converted ahead, not timed (default cold)",
    )  # fmt: skip
    parser.add_argument(
        "--kill-after", type=float, default=30.0, metavar="S", help="seconds of patience after T (default 30)"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration of every process")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, after every run")
    parser.add_argument("arguments", nargs="*", help="further options of every process, after --")
    return parser


def _list(text: str) -> list[str]:
    return [word for word in text.replace(",", " ").split() if word]


def main(words: Sequence[str] | None = None) -> int:
    """Run and compare; returns the exit code."""
    parser = build_parser()
    options = parser.parse_args(words)
    try:
        peers = read_peers(options.peers) if options.peers else Peers()
        instances = choose(read_set(options.set), options.families, options.instances)
        instances = with_expected(instances, peers)
    except ValueError as error:
        parser.error(str(error))
    runs: list[Run] = []
    code = 0
    try:
        run_set(instances, peers, options, runs)
    except KeyboardInterrupt:
        print(f"\ninterrupted after {len(runs)} of {len(instances)} instances", flush=True)
        code = 130
    report(runs, peers, options)
    return 1 if any(run.wrong for run in runs) else code


if __name__ == "__main__":
    sys.exit(main())
