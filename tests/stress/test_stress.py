"""A short version of `make stress`; that its judge, its watchdog and its dice are as they must be."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from abcrown_dist.bab.checkpoint import Checkpoint
from abcrown_dist.parallel.group import ALONE
from tests.searches import Case, Constraints
from tests.stress.judge import Wrong, judge
from tests.stress.runner import run, said
from tests.stress.stress import WRONG, stress
from tests.stress.trial import CHECKPOINT, Kill, Trial, trial

SHORT = (3, 6, 104, 107, 111, 126, 69, 149, 19, 159)
"""Seeds: six runs without a death in all modes, two of a death without restarts, of which the second
is taken up by hand, and two of a death with a restart."""


def silent(line: str) -> None:
    """Say nothing."""


@pytest.mark.slow
def test_random_runs_of_which_some_lose_a_rank() -> None:
    complaints: list[str] = []
    found = stress(SHORT, complaints.append, silent)
    assert not found[WRONG], "\n".join(complaints)
    assert found["sat"] + found["unsat"] == 6, complaints
    # Deaths that come to nothing would leave the rest untested.
    assert found["killed"] == 1 and found["unsat resumed by hand"] == 1, found
    assert found["unsat after a restart"] == 2, found


@pytest.mark.slow
def test_a_hang_is_told_with_stacks_and_ends_all_ranks(tmp_path: Path) -> None:
    one = replace(trial(69), kill=Kill(1, "round", 1, sent=signal.SIGSTOP))
    with pytest.raises(Wrong, match="hung for 12 s"):
        run(one, tmp_path, limit=12)
    ranks = sorted(tmp_path.glob("pid.*"))
    assert len(ranks) == one.ranks == 2
    for path in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)
    stacks = said(tmp_path).split("--- ")[1:]
    assert len(stacks) == 2
    assert "in gather_all" in stacks[0] and "in stepping" in stacks[1]


def line(margin: float, kill: Kill | None = None) -> Trial:
    """y = x over [-1, 1], where  y <= -1 + 2 margin  is asked for."""
    module = nn.Linear(1, 1)
    with torch.no_grad():
        module.weight.fill_(1.0)
        module.bias.fill_(0.0)
    one = np.ones(1)
    item = Constraints(-one, one, np.eye(1), np.zeros(1), -1.0, 2.0)
    return Trial(0, Case(module, (1,), [item], 0), (margin,), 2, (), kill)


def witness(x: float, y: float) -> str:
    return f"sat\n((X_0 {x})\n(Y_0 {y}))\n"


def keep(folder: Path) -> Path:
    """A checkpoint; returns its only part."""
    assert Checkpoint(folder / CHECKPOINT, ALONE).save({"x": torch.arange(9)}, {})
    return next(folder.glob("*.part"))


ONCE = Kill(0, "round", 1)
AGAIN = Kill(0, "round", 1, restarted=True)


@pytest.mark.parametrize(
    ("one", "text", "codes", "died", "verdict"),
    [
        (line(-0.1), "unsat\n", [0, 0], False, "unsat"),
        (line(0.1), witness(-0.9, -0.9), [0, 0], False, "sat"),
        (line(0.1), "unknown\n", [0, 0], False, "unknown"),
        (line(-0.1, ONCE), "unsat\n", [0, 0], False, "unsat"),
        (line(-0.1, ONCE), None, [-9, 4], True, ""),
        (line(-0.1, ONCE), "error\n", [4, -9], True, ""),
        (line(-0.1, ONCE), "unsat\n", [0, -9], True, "unsat"),
        (line(-0.1, AGAIN), "unsat\n", [0], True, "unsat"),
    ],
)
def test_what_a_run_may_leave(
    tmp_path: Path, one: Trial, text: str | None, codes: list[int], died: bool, verdict: str
) -> None:
    if text is not None:
        (tmp_path / "out.txt").write_text(text)
    assert judge(one, tmp_path, codes, died=died) == verdict


@pytest.mark.parametrize(
    ("one", "text", "codes", "died", "message"),
    [
        (line(0.1), "unsat\n", [0, 0], False, "verdict unsat, which is wrong"),
        (line(-0.1), witness(-0.9, -0.9), [0, 0], False, "violates nothing"),
        (line(0.1), witness(-0.7, -0.7), [0, 0], False, "violates nothing"),
        (line(0.1), witness(-1.1, -1.1), [0, 0], False, "violates nothing"),
        (line(0.1), witness(-0.7, -0.9), [0, 0], False, "network does not give"),
        (line(0.1), "sat\n((X_0 -0.9))\n", [0, 0], False, "the witness has"),
        (line(0.1), "sat\n", [0, 0], False, "witness ''"),
        (line(0.1), witness(-0.9, -0.9)[:-2], [0, 0], False, "results file"),
        (line(0.1), "sat\n((X_0 -0.9)\n", [0, 0], False, "witness"),
        (line(-0.1), "unsa", [0, 0], False, "results file"),
        (line(-0.1), "", [0, 0], False, "results file"),
        (line(-0.1), "unsat\nunsat\n", [0, 0], False, "results file"),
        (line(-0.1), "unsat\n", [0, 4], False, "nobody died"),
        (line(-0.1), None, [0, 0], False, "nobody died"),
        (line(-0.1), None, [-9, 4], True, "nobody was to die"),
        (line(-0.1, ONCE), "sat\n", [-9, 4], True, "witness"),
        (line(0.1, ONCE), "unsat\n", [-9, 4], True, "verdict unsat, which is wrong"),
        (line(-0.1, ONCE), "unsa", [-9, 4], True, "results file"),
        (line(-0.1, ONCE), None, [-9, -11], True, r"exit codes \[-11\]"),
        (line(-0.1, AGAIN), "error\n", [1], True, "in spite of restarts"),
    ],
)
def test_what_no_run_may_leave(
    tmp_path: Path, one: Trial, text: str | None, codes: list[int], died: bool, message: str
) -> None:
    if text is not None:
        (tmp_path / "out.txt").write_text(text)
    with pytest.raises(Wrong, match=message):
        judge(one, tmp_path, codes, died=died)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda part: part.write_bytes(part.read_bytes()[:-1]), "not whole.*cut off"),
        (lambda part: part.unlink(), "not whole.*lacks the part"),
        (lambda part: part.with_name(CHECKPOINT).write_text(""), "not whole.*no checkpoint"),
        (lambda part: part.with_name(f"{CHECKPOINT}.7.0of1.part").touch(), "the manifest lists"),
        (lambda part: part.with_name(f"{CHECKPOINT}.7.manifest.tmp").touch(), "left over"),
        (lambda part: part.with_name(".out.txt.77.tmp").touch(), "left over"),
    ],
)
def test_files_that_no_run_may_leave(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    (tmp_path / "out.txt").write_text("timeout\n")
    part = keep(tmp_path)
    assert judge(line(-0.1), tmp_path, [0, 0], died=False) == "timeout"
    damage(part)
    with pytest.raises(Wrong, match=message):
        judge(line(-0.1), tmp_path, [0, 0], died=False)


def test_nobody_goes_on_from_an_answer(tmp_path: Path) -> None:
    (tmp_path / "out.txt").write_text("unsat\n")
    keep(tmp_path)
    with pytest.raises(Wrong, match="a checkpoint is left"):
        judge(line(-0.1), tmp_path, [0, 0], died=False)


def test_the_dead_may_leave_their_temporary_file_but_no_half_checkpoint(tmp_path: Path) -> None:
    part = keep(tmp_path)
    part.with_name(f"{CHECKPOINT}.7.0of1.part.tmp").touch()
    assert judge(line(-0.1, ONCE), tmp_path, [-9, 4], died=True) == ""
    part.unlink()
    with pytest.raises(Wrong, match="not whole"):
        judge(line(-0.1, ONCE), tmp_path, [-9, 4], died=True)


def test_a_seed_draws_the_same_run_each_time(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for seed in (3, 19, 49):
        for folder in folders:
            folder.mkdir(exist_ok=True)
            trial(seed).write(folder)
        for name in ("net.onnx", "p.vnnlib"):
            assert len({(folder / name).read_bytes() for folder in folders}) == 1
        assert trial(seed).describe() == trial(seed).describe()
        assert trial(seed).resumed().describe() == trial(seed).resumed().describe()
    assert len({trial(seed).describe() for seed in range(20)}) == 20


def test_a_tenth_of_the_runs_lose_a_rank_and_half_of_those_are_restarted() -> None:
    runs = [trial(seed) for seed in [*range(40), *range(49, 200, 10)]]
    kills = [(one, one.kill) for one in runs if one.kill is not None]
    assert len(kills) == 20 and sum(kill.restarted for _, kill in kills) == 10
    assert {kill.moment for _, kill in kills} == {"round", "collective", "file", "seconds"}
    for one, kill in kills:
        assert 0 <= kill.rank < one.ranks >= 2
        assert not (kill.restarted or kill.moment == "file") or "--checkpoint" in one.words
    assert {one.ranks for one in runs} == {1, 2, 3, 4}
    assert {one.verdict for one in runs} == {"sat", "unsat"}
