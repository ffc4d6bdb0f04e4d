"""The benchmark of several ranks: its judgement, its books on memory, and one small run of it all."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import bab_scaling
import bab_scaling_tables as tables
import pytest
import torch
from bab_scaling_tables import ALONE, Figures, Job, Layout
from bab_scaling_worker import _Ledger

from abcrown_dist.bab.domains import pad_last
from abcrown_dist.bounds.ascent import Ascent, Variable
from abcrown_dist.util.memory import MemoryMeter

HANGING = """
import os, pathlib, time
folder = pathlib.Path(__file__).parents[1]
(folder / f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
time.sleep(600)
"""
ROOT = Path(__file__).resolve().parents[2]
TWO, FOUR, SHARDED = Layout("none", 2), Layout("none", 4), Layout("fsdp", 2)


def timed(*seconds: float, domains: int = 100, worst: float = -1.0) -> list[Figures]:
    """One run: a rank for each time."""
    return [Figures(seconds=value, domains=domains, worst=worst, rounds=3) for value in seconds]


def missed(targets: list[tables.Target]) -> list[str]:
    return [target.text for target in targets if str(target).startswith("MISSED")]


def test_gains_compare_runs_of_one_repetition_by_their_slowest_rank() -> None:
    runs = {ALONE: [timed(4), timed(8)], TWO: [timed(1, 2), timed(5, 3)]}
    assert tables.gains(runs, TWO) == [2.0, 1.6]
    cells = tables.speed_cells(runs, TWO)
    assert cells[:8] == ["none", "2", "3", "100", "3.50", "35", "1.80", "1.60"]


@pytest.mark.parametrize(("seconds", "met"), [(2.49, True), (2.51, False)])
def test_two_ranks_must_be_at_least_1_6_times_as_fast(seconds: float, met: bool) -> None:
    found = missed(list(tables.speed_targets({ALONE: [timed(4)], TWO: [timed(seconds, 1)]})))
    assert (not found) == met


@pytest.mark.parametrize("other", [timed(1, 1, domains=101), timed(1, 1, worst=-1.0000001)])
def test_ranks_that_do_other_work_miss_a_target(other: list[Figures]) -> None:
    assert len(missed(list(tables.speed_targets({ALONE: [timed(4)], TWO: [other]})))) == 1


def test_peaks_are_those_of_the_fullest_rank() -> None:
    def peaks(*bytes: int) -> list[Figures]:
        return [Figures(peak=count) for count in bytes]

    good = {ALONE: peaks(1000), TWO: peaks(500, 550), SHARDED: peaks(550, 561), FOUR: peaks(1, 320, 2, 3)}
    found = missed(list(tables.memory_targets(8, good)))
    assert found == ["batch 8, fsdp P=2: peak to that of one process"]  # 0.561, within 2 % of mode none's
    bad = {ALONE: peaks(1000), TWO: peaks(1, 500), SHARDED: peaks(520, 1), FOUR: peaks(321, 1, 1, 1)}
    assert missed(list(tables.memory_targets(8, bad))) == [
        "batch 8, fsdp P=2: peak to that of mode none",
        "batch 8, none P=4: peak to that of one process",
    ]


def test_nothing_is_judged_without_one_process_to_compare_with() -> None:
    assert not list(tables.speed_targets({TWO: [timed(1, 1)]}))
    assert not list(tables.memory_targets(8, {TWO: [Figures(peak=1)]}))


def test_jobs_survive_the_command_line() -> None:
    job = Job("a b.onnx", "p.vnnlib", ("--batch_size", "8"), True, 3.5, "folder")
    assert Job.from_json(job.to_json()) == job


def test_the_reason_of_a_failure_is_the_rank_s_own() -> None:
    errors = (
        "Traceback (most recent call last):\n  raise ValueError('x')\n[rank1]:ValueError: no such thing\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
    )
    assert bab_scaling.reason(errors) == "ValueError: no such thing"
    assert bab_scaling.reason("quiet\n") == ""
    killed = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n  exitcode: -9 (pid: 7)\n"
    assert bab_scaling.reason(killed) == "a rank was killed (-9)"


def test_books_are_kept_by_who_allocates() -> None:
    ledger, weights = _Ledger(6), torch.zeros(10)
    ledger.enter([weights], "weights")
    meter = MemoryMeter()
    meter._source = ledger
    with meter:
        slopes, multipliers = torch.zeros(2, 1, 6), torch.zeros(2, 1, 3)
        variables = {"alpha": Variable(slopes, 0.1), "beta": Variable(multipliers, 0.1)}
        ascent = Ascent(variables, decay=0.9, patience=3, keep=True)
        waiting = pad_last(multipliers, 5)
        assert sum(ledger.by_owner.values()) == ledger.live
        assert ledger.by_owner["weights"] == 40
        assert ledger.by_owner["domains"] == waiting.numel() * 4
        assert ledger.by_owner["other"] >= (slopes.numel() + multipliers.numel()) * 4
        assert ledger.by_owner["alpha"] == 2 * ledger.by_owner["beta"] > 0
        del ascent, waiting
        assert ledger.by_owner["alpha"] == ledger.by_owner["beta"] == ledger.by_owner["domains"] == 0
    assert sum(ledger.at_peak.values()) == meter.peak_bytes


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> Job:
    """A job whose ranks run a program in place of the worker."""
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "bab_scaling_worker.py").write_text(program)
    monkeypatch.setattr(bab_scaling, "ROOT", folder)
    return Job("", "", (), False, 1, str(folder))


@pytest.mark.slow
def test_a_group_that_hangs_is_killed_with_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = stand_in(tmp_path, monkeypatch, HANGING)
    with pytest.raises(bab_scaling.Failed, match="did not end within 12 s"):
        bab_scaling.run(job, 2, 12)
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid{rank}").read_text()), 0)


def test_a_rank_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = stand_in(tmp_path, monkeypatch, "raise ValueError('no such thing')")
    with pytest.raises(bab_scaling.Failed, match=r"^ValueError: no such thing$"):
        bab_scaling.run(job, 1, 60)


@pytest.mark.slow
def test_a_quick_run_of_everything() -> None:
    words = [sys.executable, str(ROOT / "benchmarks" / "bab_scaling.py"), "--quick", "--modes", "none"]
    ran = subprocess.run(words, capture_output=True, text=True, check=False, timeout=600)
    assert ran.returncode == 0, ran.stderr + ran.stdout
    speed, memory = ran.stdout.split("\nmemory\n")
    rows = re.findall(r"^ +none +([12]) +8 +(\d+) ", speed, re.MULTILINE)
    assert [size for size, _ in rows] == ["1", "2"]
    assert rows[0][1] == rows[1][1]  # the same work
    assert int(rows[0][1]) > 100
    assert "met    none P=2: domains or bounds that differ" in speed
    for line in re.findall(r"^ +32 +none .*", memory, re.MULTILINE):
        peak, _, *owners = map(float, line.split()[4:13])
        assert sum(owners) == pytest.approx(peak, abs=0.5)
        assert all(owners[:5])  # alpha, beta, bounds, A and weights
    assert len(re.findall(r"^ +32 +none ", memory, re.MULTILINE)) == 2
