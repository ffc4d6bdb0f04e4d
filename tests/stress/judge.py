"""What a run may leave behind, whatever happened to it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from abcrown_dist.bab import checkpoint
from abcrown_dist.util.errors import LoadError
from tests.stress.trial import CHECKPOINT, Trial

UNDECIDED = ("unknown", "timeout", "error")
_LOST = 4  # exit code of a rank that lost another one
_OWN_TEMPORARY = re.compile(r"\.out\.txt\.\d+\.tmp")  # bears the number of the process that was killed


class Wrong(Exception):
    """A run did what none may do."""


def judge(trial: Trial, folder: Path, codes: list[int], *, died: bool) -> str:
    """The verdict of a run; empty if it was killed before it had one.

    Args:
        codes: exit codes of all ranks, or torchrun's alone.
        died: a rank was killed.

    Raises:
        Wrong: a wrong verdict, a truncated file, a file too many, or an exit code that does not fit.
    """
    verdict = _results(trial, folder)
    if verdict not in (trial.verdict, "", *UNDECIDED):
        raise Wrong(f"verdict {verdict}, which is wrong")
    listed = _listed(folder)
    if died and trial.kill is None:
        raise Wrong(f"exit codes {codes}, though nobody was to die")
    if died and trial.kill is not None and not trial.kill.restarted:
        if strange := [code for code in codes if code not in (0, _LOST, -trial.kill.sent)]:
            raise Wrong(f"exit codes {strange} of ranks that lost one")
        return verdict if verdict not in UNDECIDED else ""
    if any(codes) or not verdict:
        what = "in spite of restarts" if died else "though nobody died"
        raise Wrong(f"exit codes {codes}, verdict '{verdict}', {what}")
    _leavings(folder, listed, ended=verdict in ("sat", "unsat"), died=died)
    return verdict


def _results(trial: Trial, folder: Path) -> str:
    """The word in the results file; of a `sat` the witness is checked."""
    path = folder / "out.txt"
    if not path.exists():
        return ""
    text = path.read_text()
    word, _, rest = text.partition("\n")
    if word not in ("sat", "unsat", *UNDECIDED) or not text.endswith("\n") or (word != "sat" and rest):
        raise Wrong(f"results file {text!r}")
    if word == "sat":
        _witness(trial, rest)
    return word


def _witness(trial: Trial, text: str) -> None:
    """The values are inputs that violate the property, and the outputs that belong to them."""
    case = trial.case
    if not re.fullmatch(r"\((\([XY]_\d+ \S+\)\s*)+\)\n", text):
        raise Wrong(f"witness {text!r}")
    values = {name: float(value) for name, value in re.findall(r"\(([XY]_\d+) (\S+?)\)", text)}
    inputs = len(case.disjuncts[0].lower)
    names = [f"X_{i}" for i in range(inputs)] + [f"Y_{i}" for i in range(case.outputs)]
    if list(values) != names:
        raise Wrong(f"the witness has {list(values)}, not {names}")
    x, y = (np.array([values[name] for name in part]) for part in (names[:inputs], names[inputs:]))
    if not np.allclose(y, case.evaluate(x), rtol=1e-4, atol=1e-5):
        raise Wrong(f"the network does not give {y} at {x}")
    for item, margin in zip(case.disjuncts, trial.margins, strict=True):
        inside = (item.lower - 1e-9 <= x).all() and (x <= item.upper + 1e-9).all()
        room = 1e-4 * item.scale
        if inside and (item.C @ y <= item.base + item.least + margin * item.scale + room).all():
            return
    raise Wrong(f"{x} violates nothing")


def _listed(folder: Path) -> set[str]:
    """The parts of the checkpoint that is there, all of them whole."""
    path = folder / CHECKPOINT
    if not path.exists():
        return set()
    try:
        return {part.name for part in checkpoint.read(path).parts}
    except LoadError as error:
        raise Wrong(f"the checkpoint is not whole: {error}") from None


def _leavings(folder: Path, listed: set[str], *, ended: bool, died: bool) -> None:
    """No temporary file, and no part that no manifest lists; where nobody can go on, no checkpoint."""
    names = {path.name for path in folder.iterdir()}
    if left := sorted(
        name for name in names if name.endswith(".tmp") and not (died and _OWN_TEMPORARY.fullmatch(name))
    ):
        raise Wrong(f"left over: {left}")
    parts = {name for name in names if name.startswith(f"{CHECKPOINT}.")}
    if parts != listed:
        raise Wrong(f"the manifest lists {sorted(listed)}, but there are {sorted(parts)}")
    if ended and (folder / CHECKPOINT).exists():
        raise Wrong("a checkpoint is left of a run that has its answer")
