"""Searches that end before their time: a rank dies and torchrun starts all again, or time is up and the user
goes on later; and checkpoints that nobody must go on from."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from abcrown_dist.bab.checkpoint import read
from abcrown_dist.bab.crew import Agreement, Crew, Status
from abcrown_dist.outcome import Outcome
from abcrown_dist.spec.property import Verdict
from abcrown_dist.util.errors import ConfigError, LoadError, VerifierError
from tests import flow, models
from tests.parallel.ranks import DIES, ROOT, Ended, launch
from tests.parallel.test_search import FORCED, INPUTS, NEURONS, SMALL, Trial, distances, prepared

# In their first attempts, the program's ranks meet the fate `what` when they agree for the `when`-th time.
FATED = """
import dataclasses, os, signal, sys
sys.path.insert(0, {root!r})
from abcrown_dist.bab.crew import Crew

agree, calls = Crew.agree, []
rank, restart = os.environ["RANK"], int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

def fated(crew, own):
    calls.append(1)
    if rank == "1" and len(calls) == {when} and restart < {attempts}:
        {what}
    return agree(crew, own)

Crew.agree = fated
from abcrown_dist.__main__ import console
console()
"""
LATE = "own = dataclasses.replace(own, late=True)"
CHECKPOINT = "search.ckpt"
EVERY_ROUND = ("--bab.checkpoint_interval", "1e-6")
KEEP = ("--checkpoint", CHECKPOINT, *EVERY_ROUND)
ENOUGH = ("--max_iterations", "-1")
MODES = {
    "none": ("--parallel.mode", "none"),
    "fsdp": ("--parallel.mode", "fsdp"),
    "tp": ("--parallel.mode", "tp"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Holds a network; that of `--onnx_path net.onnx`."""
    models.mlp(tmp_path / "net.onnx", [4, 12, 12, 3], seed=1)
    return tmp_path


@pytest.fixture
def trials(folder: Path) -> dict[str, Trial]:
    """Searches of ten rounds or more, each with its second half."""
    net = folder / "net.onnx"
    doubtful = Trial(distances(folder / "distances.onnx"), folder / "doubtful.vnnlib", (*SMALL, *NEURONS))
    flow.write_property(doubtful.prop, [(-1, 1)] * 2, 1, "(<= Y_0 0.9999998)")
    found = {
        "neurons": prepared(net, 1.0, [0.4, 0.5, 0.4], *NEURONS),
        "inputs": prepared(net, 1.0, [0.1, 0.2, 0.15], *INPUTS),
        "sat": prepared(net, 1.0, [0.4, -0.0001, 0.3], *NEURONS),
        "doubtful": doubtful,
    }
    return {name: dataclasses.replace(trial, words=(*trial.words, *ENOUGH)) for name, trial in found.items()}


def files_left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(f"{CHECKPOINT}*"))


def run(trial: Trial, *words: str) -> Outcome:
    """In this process."""
    return flow.run(trial.model, trial.prop, *trial.words, *words)


def kept(folder: Path) -> tuple[str, ...]:
    """Words for a checkpoint in every round, wherever this process stands."""
    return "--checkpoint", str(folder / CHECKPOINT), *EVERY_ROUND


def resume(folder: Path) -> tuple[str, str]:
    return "--resume", str(folder / CHECKPOINT)


def cut_short(trial: Trial, folder: Path, agreement: int, *words: str) -> Outcome:
    """Run in this process until all ranks agree for that time: then time is up."""
    agree, calls = Crew.agree, [0]

    def late(crew: Crew, own: Status) -> Agreement:
        calls[0] += 1
        return agree(crew, dataclasses.replace(own, late=own.late or calls[0] == agreement))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Crew, "agree", late)
        return run(trial, *kept(folder), *words)


def course(outcome: Outcome) -> list[tuple[float, ...]]:
    """What stands in every round; a search that goes on tells again where it was."""
    rows = [(item.visited, item.verified, item.open, item.worst) for item in outcome.rounds]
    return [row for row, before in zip(rows, [(), *rows], strict=False) if row != before]


def assert_same_work(found: Outcome, expected: Outcome) -> None:
    """Round by round, bit for bit."""
    assert (found.verdict, found.reason) == (expected.verdict, expected.reason)
    assert (found.domains, found.bounds) == (expected.domains, expected.bounds)
    assert course(found) == course(expected)


# In this process -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["neurons", "inputs", "doubtful", "sat"])
@pytest.mark.parametrize("agreement", [1, 2, 6, 10])
def test_what_is_cut_short_goes_on_as_if_nothing_had_been(
    folder: Path, trials: dict[str, Trial], name: str, agreement: int
) -> None:
    """The same rounds with the same bounds, in sum, as in one go."""
    trial = trials[name]
    expected = run(trial, *FORCED)
    agreement = min(agreement, len(course(expected)) - 1)  # before the end
    assert cut_short(trial, folder, agreement, *FORCED).verdict is Verdict.TIMEOUT
    assert files_left(folder)[0] == CHECKPOINT and len(files_left(folder)) == 2
    precise = read(folder / CHECKPOINT).notes["place"]["precise"]
    assert precise == (name == "doubtful" and agreement == 10)
    found = run(trial, *FORCED, *resume(folder), *kept(folder))
    assert_same_work(found, expected)
    assert bool(files_left(folder)) == (found.verdict is Verdict.UNKNOWN)


@pytest.mark.parametrize("batch", ["1", "3", "64"])
@pytest.mark.parametrize("name", ["neurons", "inputs", "sat"])
def test_another_batch_goes_on(folder: Path, trials: dict[str, Trial], name: str, batch: str) -> None:
    trial = trials[name]
    expected = run(trial)
    assert cut_short(trial, folder, 1 if name == "sat" else 2).verdict is Verdict.TIMEOUT
    found = run(
        trial, *resume(folder), "--batch_size", batch, "--bab.branching.input_split.batch_size", batch
    )
    assert found.verdict is expected.verdict
    if found.verdict is Verdict.UNSAT:
        assert found.bounds.keys() == expected.bounds.keys()
    assert files_left(folder)  # nobody asked to keep a checkpoint there, so it is the user's


def test_a_checkpoint_on_which_another_goes_on_stays(folder: Path, trials: dict[str, Trial]) -> None:
    """Only what a run keeps itself is its own."""
    trial = trials["neurons"]
    cut_short(trial, folder, 3)
    before = files_left(folder)
    other = "--checkpoint", str(folder / "other.ckpt"), *EVERY_ROUND
    assert run(trial, *resume(folder), *other).verdict is Verdict.UNSAT
    assert files_left(folder) == before and not list(folder.glob("other*"))


@pytest.mark.parametrize("named", [True, False])
def test_a_restarted_run_that_ends_before_it_saves_leaves_nothing(
    folder: Path, trials: dict[str, Trial], monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    trial = trials["neurons"]
    expected = run(trial)
    cut_short(trial, folder, 4)
    seldom = ("--checkpoint", str(folder / CHECKPOINT), "--bab.checkpoint_interval", "300")
    if not named:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    found = run(trial, *seldom, *(resume(folder) if named else ()))
    assert found.verdict is Verdict.UNSAT
    assert course(found)[:4] == course(expected)[:4]  # it has gone on, not begun anew
    assert files_left(folder) == []


def test_a_first_attempt_does_not_take_up_what_lies_there(folder: Path, trials: dict[str, Trial]) -> None:
    """That is for the user to say; what it keeps itself takes the place of the other."""
    trial = trials["neurons"]
    expected = run(trial, *FORCED)
    cut_short(trial, folder, 4)
    assert_same_work(run(trial, *FORCED, *kept(folder)), expected)
    assert files_left(folder) == []


@pytest.mark.parametrize("damage", ["missing part", "another property"])
def test_a_restarted_run_begins_anew_rather_than_go_on_from_anything(
    folder: Path, trials: dict[str, Trial], monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    if damage == "missing part":
        cut_short(trials["neurons"], folder, 4)
        (folder / read(folder / CHECKPOINT).parts[0].name).unlink()
    else:
        cut_short(trials["inputs"], folder, 4)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    half = "--batch_size", "4"
    found = run(trials["neurons"], *FORCED, *kept(folder))
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    assert course(found) == course(run(trials["neurons"], *FORCED, *half))
    assert found.verdict is Verdict.UNSAT and files_left(folder) == []


def spoil(folder: Path, trials: dict[str, Trial], how: str) -> tuple[Trial, tuple[str, ...]]:
    """A run that must be refused: what is verified, and its words."""
    trial = trials["neurons"]
    words: tuple[str, ...] = ()
    manifest = folder / CHECKPOINT
    if how == "another property":
        trial = trials["sat"]
    elif how == "another network":
        trial = dataclasses.replace(trial, model=models.mlp(folder / "other.onnx", [4, 12, 12, 3], seed=2))
    elif how == "another precision":
        words = ("--double_fp", "true")
    elif how == "another kind":
        words = INPUTS
    elif how == "missing part":
        (folder / read(manifest).parts[-1].name).unlink()
    elif how == "truncated part":
        part = folder / read(manifest).parts[0].name
        part.write_bytes(part.read_bytes()[:-1])
    elif how == "garbage":
        manifest.write_bytes(bytes(range(256)))
    elif how == "nothing":
        manifest.unlink()
    return trial, words


REFUSED: dict[str, tuple[type[VerifierError], str]] = {
    "another property": (LoadError, "the checkpoint is of another property"),
    "another network": (LoadError, "the checkpoint is of another network"),
    "another precision": (LoadError, "in torch.float32, not in torch.float64: see general.double_fp"),
    "another kind": (ConfigError, "a search on neurons was under way, which is not planned now"),
    "missing part": (LoadError, "lacks the part of rank "),
    "truncated part": (LoadError, "is cut off"),
    "garbage": (LoadError, "is no checkpoint"),
    "nothing": (LoadError, "cannot read the checkpoint"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_is_not_resumed_from(folder: Path, trials: dict[str, Trial], how: str) -> None:
    cut_short(trials["neurons"], folder, 3)
    trial, words = spoil(folder, trials, how)
    kind, message = REFUSED[how]
    with pytest.raises(kind, match=message):
        run(trial, *words, *resume(folder))


def test_time_that_was_used_counts(folder: Path, trials: dict[str, Trial]) -> None:
    trial = trials["neurons"]
    slow = flow.Deadline(60)
    slow.spend(50)
    agree = Crew.agree
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Crew, "agree", lambda crew, own: agree(crew, dataclasses.replace(own, late=True)))
        cut = flow.run(trial.model, trial.prop, *trial.words, *kept(folder), deadline=slow)
    assert cut.verdict is Verdict.TIMEOUT
    for seconds in (20, 50):
        with pytest.raises(ConfigError, match=r"5[0-9] s are used up; a larger bab\.timeout lets it go on"):
            flow.run(trial.model, trial.prop, *trial.words, *resume(folder), deadline=flow.Deadline(seconds))
    enough = flow.Deadline(120)
    found = flow.run(trial.model, trial.prop, *trial.words, *resume(folder), deadline=enough)
    assert found.verdict is Verdict.UNSAT and enough.elapsed() > 50


# Under torchrun ------------------------------------------------------------------------------------------


def fated(folder: Path, what: str, when: int, attempts: int = 1) -> Path:
    """A launcher whose rank 1 meets its fate."""
    path = folder / "fated.py"
    path.write_text(FATED.format(root=str(ROOT), what=what, when=when, attempts=attempts))
    return path


def restarting(folder: Path, launcher: Path, words: Sequence[str]) -> Ended:
    """Two ranks that torchrun starts again up to three times, and that log what they do."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone",
               "--max-restarts=3", "--monitor-interval=0.1"]  # fmt: skip
    process = subprocess.run(
        [*command, str(launcher), *words, "--device", "cpu", "--progress", "plain"],
        cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return Ended(process.returncode, process.stdout, process.stderr)


def words_of(trial: Trial, mode: str) -> tuple[str, ...]:
    """For the program, in the folder of the files."""
    files = "--onnx_path", trial.model.name, "--vnnlib_path", trial.prop.name, "--summary_file", "out.json"
    return *files, *trial.words, *MODES[mode], "--parallel.timeout", "45"


def rounds_of(folder: Path) -> list[int]:
    """Domains visited until each round of the last run, without repetitions."""
    summary = json.loads((folder / "out.json").read_text())
    return list(dict.fromkeys(summary["rounds"]["visited"]))


def verdict_in(folder: Path) -> str:
    return (folder / "out.txt").read_text().split("\n", 1)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "name"),
    [
        *(("none", name) for name in ("neurons", "inputs", "sat")),
        *(("fsdp", "neurons"), ("tp", "inputs")),
    ],
)
def test_the_death_of_a_rank_in_a_search(
    folder: Path, trials: dict[str, Trial], mode: str, name: str
) -> None:
    """All start again, and go on from the last round that was kept."""
    when = 2 if name == "sat" else 6
    ended = restarting(folder, fated(folder, DIES, when), [*words_of(trials[name], mode), *KEEP])
    assert ended.code == 0, ended
    assert ended.err.count("resumed from a checkpoint") == 1, ended
    assert verdict_in(folder) == ("sat" if name == "sat" else "unsat")
    assert files_left(folder) == []
    assert ended.out.count("verdict: ") == 1
    assert len(rounds_of(folder)) >= when - 1  # those before it died included


@pytest.mark.slow
def test_three_deaths(folder: Path, trials: dict[str, Trial]) -> None:
    """Each attempt gets a few rounds further, at half the batch of the one before."""
    launcher = fated(folder, DIES, 4, attempts=3)
    ended = restarting(folder, launcher, [*words_of(trials["neurons"], "none"), *KEEP])
    assert ended.code == 0, ended
    assert ended.err.count("resumed from a checkpoint") == 3, ended
    assert verdict_in(folder) == "unsat" and files_left(folder) == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", pytest.param("tp", marks=pytest.mark.huge)])
def test_a_death_before_the_first_checkpoint(folder: Path, trials: dict[str, Trial], mode: str) -> None:
    words = [*words_of(trials["neurons"], mode), "--checkpoint", CHECKPOINT]
    ended = restarting(folder, fated(folder, DIES, 3), words)
    assert ended.code == 0, ended
    assert "resumed" not in ended.err
    assert verdict_in(folder) == "unsat" and files_left(folder) == []


@pytest.mark.slow
def test_a_rank_that_always_dies_is_given_up(folder: Path, trials: dict[str, Trial]) -> None:
    """The checkpoint stays, and whoever finds out why goes on from it."""
    words = words_of(trials["neurons"], "none")
    ended = restarting(folder, fated(folder, DIES, 2, attempts=9), [*words, *KEEP])
    assert ended.code != 0 and len(files_left(folder)) == 3
    assert not (folder / "out.txt").exists() or verdict_in(folder) == "error"
    assert run(trials["neurons"], *resume(folder)).verdict is Verdict.UNSAT


# On other ranks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("writers", "readers", "name"),
    [
        ("none", "tp", "neurons"),
        *(
            pytest.param(*modes, name, marks=pytest.mark.slow)
            for name, modes in (
                ("neurons", ("tp", "none")), ("neurons", ("fsdp", "tp")), ("inputs", ("none", "fsdp")),
                ("inputs", ("tp", "none")), ("sat", ("none", "tp")), ("doubtful", ("fsdp", "tp")),
            )
        ),
    ],
)  # fmt: skip
def test_out_of_time_on_two_ranks(
    folder: Path, trials: dict[str, Trial], writers: str, readers: str, name: str
) -> None:
    """Taken up by one process, and by two ranks in another mode."""
    trial = trials[name]
    expected = run(trial).verdict.value
    launcher = fated(folder, LATE, {"doubtful": 10, "sat": 1}.get(name, 3))
    ended = launch([folder] * 2, [*words_of(trial, writers), *KEEP], launcher=launcher)
    assert [rank.code for rank in ended] == [0, 0], ended
    assert verdict_in(folder) == "timeout"
    assert len(read(folder / CHECKPOINT).parts) == 2
    visited = rounds_of(folder)
    assert run(trial, *resume(folder)).verdict.value == expected
    onwards = "--resume", CHECKPOINT, "--checkpoint", CHECKPOINT
    ended = launch([folder] * 2, [*words_of(trial, readers), *onwards])
    assert [rank.code for rank in ended] == [0, 0], ended
    assert (ended[1].out, ended[1].err) == ("", "")
    assert verdict_in(folder) == expected
    assert rounds_of(folder)[: len(visited)] == visited
    assert bool(files_left(folder)) == (expected == "unknown")


@pytest.mark.parametrize(
    "how",
    [
        "another property",
        *(pytest.param(how, marks=pytest.mark.slow) for how in REFUSED if how != "another property"),
    ],
)
def test_a_refusal_is_told_once(folder: Path, trials: dict[str, Trial], how: str) -> None:
    """By the first of two ranks, on one line, whichever of them found out."""
    cut_short(trials["neurons"], folder, 3)
    trial, words = spoil(folder, trials, how)
    kind, message = REFUSED[how]
    ended = launch([folder] * 2, [*words_of(trial, "none"), *words, "--resume", CHECKPOINT])
    assert [rank.code for rank in ended] == [kind.exit_code] * 2, ended
    assert (ended[1].out, ended[1].err) == ("", "")
    assert message in ended[0].err and len(ended[0].err.splitlines()) == 1
    assert ended[0].out == "" and verdict_in(folder) == "error"
