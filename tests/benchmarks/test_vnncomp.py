"""The comparison with other verifiers: a stand-in for ours does what each property file says."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The stand-in for the verifier finds in the property what to answer, after `sleep` seconds.
PROGRAM = """
import json, os, sys, time
words = sys.argv[1:]
prepare = words[:1] == ["prepare"]
words = words[prepare:]
options = dict(zip(words[::2], words[1::2]))
task = json.load(open(options["--specification.vnnlib_path"]))
with open(os.environ["RECORD"], "a") as record:
    record.write(json.dumps([options, os.environ["OMP_NUM_THREADS"], os.getpid(), prepare]) + "\\n")
if prepare:
    sys.exit("no such operator" if task.get("unconvertible") else 0)
time.sleep(task.get("sleep", 0))
if task.get("crash"):
    sys.exit("a message\\nthe last words")
with open(options["--general.results_file"], "w") as results:
    results.write(task["verdict"] + "\\n" + "(X_0 1)" * (task["verdict"] == "sat"))
if task.get("crash late"):
    sys.exit("no summary")
with open(options["--general.summary_file"], "w") as summary:
    json.dump({"reason": "because", "domains": task.get("domains", 0), "seconds": {"load": 0.25},
               "memory": {"peak_rss_bytes": 4096}}, summary)
"""


class Harness:
    """A repository that holds the benchmark and a stand-in for the verifier, and a set of instances."""

    def __init__(self, folder: Path) -> None:
        self.root, self.set, self.record = folder / "a repository", folder / "a set", folder / "record"
        (self.root / "benchmarks").mkdir(parents=True)
        for script in (ROOT / "benchmarks").glob("vnncomp*.py"):
            shutil.copy(script, self.root / "benchmarks")
        (self.root / "abcrown_dist.py").write_text(PROGRAM)
        self.set.mkdir()
        self.rows: list[dict[str, str]] = []
        self.peers: list[dict[str, Any]] = []

    def add(
        self, family: str, name: str, expected: str, task: dict[str, Any], **peers: tuple[str, float]
    ) -> None:
        """An instance, what our stand-in does with it, and what peers have said."""
        (self.set / f"{name}.vnnlib").write_text(json.dumps(task))
        row = {"benchmark": family, "onnx": f"{family}/net.onnx", "vnnlib": f"{name}.vnnlib"}
        row["expected"] = expected
        self.rows.append(row)
        answers = {f"{peer}_verdict": verdict for peer, (verdict, _) in peers.items()}
        answers |= {f"{peer}_seconds": str(seconds) for peer, (_, seconds) in peers.items()}
        self.peers.append({**row, **answers})

    def words(self, *words: str) -> list[str]:
        write_csv(self.set / "instances.csv", self.rows)
        write_csv(self.set / "peers.csv", self.peers)
        script, peers = str(self.root / "benchmarks" / "vnncomp.py"), str(self.set / "peers.csv")
        return [sys.executable, script, "--set", str(self.set), "--peers", peers, *words]

    @property
    def recorded(self) -> list[str]:
        """A line for every process that ran."""
        return self.record.read_text().splitlines()

    def assert_all_ended(self) -> None:
        for line in self.recorded:
            with pytest.raises(ProcessLookupError):
                os.kill(json.loads(line)[2], 0)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "RECORD": str(self.record), "COLUMNS": "300"}

    def run(self, *words: str, timeout: str = "5") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.words("--timeout", timeout, *words),
            env=self.environment, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


def test_the_whole_comparison(harness: Harness, tmp_path: Path) -> None:
    task = {"verdict": "unsat", "domains": 12}
    harness.add("one", "both", "unsat", task, abcrown=("unsat", 8), other=("unsat", 2))
    harness.add("one", "won", "sat", {"verdict": "sat"}, abcrown=("timeout", 60), other=("unknown", 50))
    harness.add("two", "lost", "unsat", {"verdict": "timeout"}, abcrown=("unsat", 3), other=("none", 9))
    harness.add("two", "crash", "unsat", {"crash": True}, abcrown=("sat", 3), other=("unknown", 9))
    harness.add("two", "late crash", "unsat", {"crash late": True, "verdict": "unsat"})
    ran = harness.run("--json", str(tmp_path / "all.json"), "--threads", "3")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert [words.split()[0] for words in ran.stdout.splitlines()[:5]] == [
        *("unsat", "sat", "timeout", "error", "unsat")
    ]
    read = json.loads((tmp_path / "all.json").read_text())
    seconds = read["runs"][0]["seconds"]
    assert seconds > 0
    assert read["runs"][0] == {
        "number": 0,
        "family": "one",
        "onnx": "one/net.onnx",
        "vnnlib": "both.vnnlib",
        "expected": "unsat",
        "verdict": "unsat",
        "seconds": seconds,
        "reason": "because",
        "wrong": False,
        "solved": True,
        "domains": 12,
        "phases": {"load": 0.25},
        "peak_rss_bytes": 4096,
        "peers": {
            "abcrown": {"verdict": "unsat", "seconds": 8.0},
            "other": {"verdict": "unsat", "seconds": 2.0},
        },
    }
    assert read["runs"][3]["reason"] == "the last words"
    assert read["geometric_means"] == pytest.approx({"abcrown": seconds / 8, "other": seconds / 2})
    said = ran.stdout
    assert "solved: ours 3 of 5" in said
    assert "solved: abcrown 2 of 4 that it has tried" in said  # its sat of an unsat instance does not count
    assert "solved: other 1 of 4" in said
    assert "solved by abcrown, not by us: two net lost (timeout: because)" in said
    assert f"geometric mean {seconds / 8:.3f} over 1 that both solved; target 0.8 met" in said
    assert "WRONG" not in said
    notes, *_ = json.loads(harness.recorded[0])
    assert notes["--bab.timeout"] == "5.0"
    assert notes["--model.cache_onnx_conversion"] == "false"
    assert notes["--model.onnx_path"] == str(harness.set / "one/net.onnx")
    assert {json.loads(line)[1] for line in harness.recorded} == {"3"}


@pytest.mark.parametrize(("expected", "code"), [("unsat", 1), ("", 0)])
def test_a_wrong_verdict_is_loud(harness: Harness, expected: str, code: int) -> None:
    harness.add("f", "fine", "sat", {"verdict": "sat"}, peer=("sat", 1))
    harness.add("f", "bad", expected, {"verdict": "sat"}, peer=("unsat", 1))
    ran = harness.run("--markdown")
    assert ran.returncode == code
    line = next(line for line in ran.stdout.splitlines() if line.startswith("| f | net | bad"))
    assert ("WRONG" in line) == (code == 1)
    assert ("DISPUTED by peer" in line) == (code == 0)
    assert ("WRONG: f net bad: sat, expected unsat" in ran.stdout) == (code == 1)
    assert ("1 verdicts of ours are of instances whose answer nobody knows" in ran.stdout) == (code == 0)
    head, rule, *_ = ran.stdout.splitlines()
    assert head.count("|") == rule.count("|") == line.count("|")


def test_the_peers_file_may_know_what_the_list_does_not(harness: Harness) -> None:
    harness.add("f", "bad", "unsat", {"verdict": "sat"}, peer=("unknown", 1))
    harness.rows[0] = {"onnx": "f/net.onnx", "vnnlib": "bad.vnnlib"}
    assert harness.run().returncode == 1


def test_vnncomps_own_lists(harness: Harness) -> None:
    """Three columns, no header, compressed files; the family is the folder."""
    harness.add("f", "prop", "unsat", {"verdict": "unsat"}, peer=("unsat", 1))
    words = harness.words("--timeout", "5", "--markdown")
    (harness.set / "prop.vnnlib.gz").write_text(json.dumps({"verdict": "unsat"}))
    (harness.set / "instances.csv").write_text("./f/net.onnx.gz,./prop.vnnlib.gz,300\n")
    ran = subprocess.run(words, env=harness.environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "| a set | net | prop | unsat | unsat |" in ran.stdout
    assert "over 1 that both solved" in ran.stdout


def test_a_process_that_does_not_end_is_killed(harness: Harness) -> None:
    harness.add("f", "endless", "unsat", {"sleep": 50}, peer=("unsat", 1))
    harness.add("f", "fine", "sat", {"verdict": "sat"}, peer=("sat", 1))
    ran = harness.run("--kill-after", "0.5", timeout="0.5")
    assert ran.returncode == 0
    assert [line.split()[0] for line in ran.stdout.splitlines()[:2]] == ["killed", "sat"]
    assert "lost to peer" in ran.stdout
    harness.assert_all_ended()


def test_a_verdict_after_the_time_is_marked(harness: Harness) -> None:
    harness.add("f", "slow", "unsat", {"verdict": "unsat", "sleep": 1.3})
    harness.add("f", "fast", "unsat", {"verdict": "unsat"}, peer=("unsat", 1))
    slow, fast, *_ = harness.run("--kill-after", "30", timeout="0.1").stdout.splitlines()
    assert slow.endswith("late")
    assert "late" not in fast or float(fast.split()[1]) > 1.1  # a slow machine


def test_interrupted_it_prints_what_there_is(harness: Harness) -> None:
    harness.add("f", "first", "unsat", {"verdict": "unsat"}, peer=("unsat", 1))
    harness.add("f", "endless", "unsat", {"sleep": 50}, peer=("unsat", 1))
    process = subprocess.Popen(
        harness.words("--timeout", "50"), env=harness.environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        # What runs in the background may have been told to ignore interrupts, and its children with it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("unsat")
        while len(harness.recorded) < 2:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, errors) == (130, "")
    harness.assert_all_ended()
    assert "interrupted after 1 of 2 instances" in said
    assert "solved: ours 1 of 1" in said


def test_networks_are_converted_before_and_not_timed(harness: Harness) -> None:
    harness.add("one", "a", "unsat", {"verdict": "unsat"}, abcrown=("unsat", 100))
    harness.add("two", "b", "unsat", {"verdict": "error", "unconvertible": True}, abcrown=("unsat", 100))
    ran = harness.run("--cache", "prepare", "--", "--model.input_shape", "3")
    assert ran.returncode == 0
    assert "target 0.6 met" in ran.stdout
    assert ran.stderr.endswith("two/net.onnx: no such operator\n")
    recorded = [json.loads(line) for line in harness.recorded]
    assert [prepared for *_, prepared in recorded] == [True, False, True, False]
    for (ahead, *_), (timed, *_) in zip(recorded[::2], recorded[1::2], strict=True):
        assert timed["--model.cache_onnx_conversion"] == ahead["--model.cache_onnx_conversion"] == "true"
        assert {name: timed[name] for name in ahead} == ahead  # the cache is asked for the same thing
    cache = Path(recorded[0][0]["--model.cache_dir"])
    assert recorded[3][0]["--model.cache_dir"] == str(cache)
    assert not cache.exists()


def test_options_reach_every_process(harness: Harness, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.touch()
    harness.add("f", "a", "unsat", {"verdict": "unsat"}, peer=("unsat", 1))
    assert harness.run("--config", str(config), "--", "--complete_verifier", "bab").returncode == 0
    options, *_ = json.loads(harness.recorded[0])
    assert options["--complete_verifier"] == "bab"
    assert options["--config"] == str(config)


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        (["--families", "two,three"], ["c", "d"]),
        (["--instances", "3", "0"], ["a", "d"]),
        (["--families", "one", "--instances", "1", "2"], ["b"]),
    ],
)
def test_a_part_of_the_set(harness: Harness, words: list[str], chosen: list[str]) -> None:
    for family, name in zip(("one", "one", "two", "three"), "abcd", strict=True):
        harness.add(family, name, "sat", {"verdict": "sat"}, peer=("sat", 1))
    assert harness.run(*words).returncode == 0
    ran = [json.loads(line)[0]["--specification.vnnlib_path"] for line in harness.recorded]
    assert [Path(name).stem for name in ran] == chosen


def refusals() -> Iterator[tuple[list[str], str]]:
    yield ["--families", "three"], "no family three: there are one"
    yield ["--instances", "7"], "no instance 7: the list has 1"
    yield ["--instances", "-1"], "no instance -1"
    yield ["--peers", "/nowhere.csv"], "cannot read /nowhere.csv"
    yield ["--set", "/nowhere"], "cannot read /nowhere/instances.csv"


@pytest.mark.parametrize(("words", "message"), list(refusals()), ids=lambda value: str(value)[:30])
def test_bad_usage_is_refused_before_anything_runs(harness: Harness, words: list[str], message: str) -> None:
    harness.add("one", "a", "sat", {"verdict": "sat"}, peer=("sat", 1))
    ran = harness.run(*words)
    assert ran.returncode == 2
    assert message in ran.stderr
    assert not harness.record.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("onnx,vnnlib,expected\n", "has no column that ends in _verdict"),
        ("onnx,vnnlib,a_verdict\n", "has no column a_seconds"),
        ("onnx,vnnlib,a_verdict,a_seconds\none/net.onnx,a.vnnlib,sat,soon\n", "not a number of seconds > 0"),
        ("onnx,vnnlib,a_verdict,a_seconds\none/net.onnx,a.vnnlib\n", "2 cells under 4 columns"),
        ("onnx,vnnlib,a_verdict,a_seconds\nother.onnx,a.vnnlib,sat,1\n", "names none of these instances"),
        (
            "onnx,vnnlib,expected,a_verdict,a_seconds\none/net.onnx,a.vnnlib,unsat,sat,1\n",
            "the list expects sat, the peers' file unsat",
        ),
    ],
)
def test_bad_lists_of_peers(harness: Harness, text: str, message: str) -> None:
    harness.add("one", "a", "sat", {"verdict": "sat"}, peer=("sat", 1))
    words = harness.words("--timeout", "5")
    (harness.set / "peers.csv").write_text(text)
    ran = subprocess.run(words, env=harness.environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert message in ran.stderr


def test_the_mean_is_geometric() -> None:
    from vnncomp_tables import geometric_mean

    assert geometric_mean([0.5, 2.0, 8.0]) == pytest.approx(2.0)
    assert geometric_mean([]) != geometric_mean([])


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["prepare", "cold"])
def test_the_real_program(cache: str, tmp_path: Path) -> None:
    """Its options, results and summary are those that the benchmark knows."""
    script, digits = ROOT / "benchmarks" / "vnncomp.py", ROOT / "examples" / "digits"
    words = ["--set", str(digits), "--timeout", "60", "--instances", "0", "2", "--cache", cache]
    ran = subprocess.run(
        [sys.executable, str(script), *words, "--json", str(tmp_path / "all.json")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, "")
    runs = json.loads((tmp_path / "all.json").read_text())["runs"]
    assert [run["verdict"] for run in runs] == ["unsat", "sat"]
    assert all(run["reason"] and run["phases"]["load"] > 0 and run["peak_rss_bytes"] > 2**20 for run in runs)
