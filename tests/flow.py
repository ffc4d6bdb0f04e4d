"""The whole flow in this process: property texts, runs, and what must hold of every answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from abcrown_dist.config import Config
from abcrown_dist.config.load import load_config
from abcrown_dist.problem import Instance
from abcrown_dist.report.progress import Progress
from abcrown_dist.spec.property import Property, Verdict
from abcrown_dist.spec.vnnlib1 import load_vnnlib
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.verify import Outcome, verify

Range = tuple[object, object]


def declare(inputs: int, outputs: int) -> str:
    """Declarations of X_0 ... and Y_0 ..."""
    names = [f"X_{i}" for i in range(inputs)] + [f"Y_{i}" for i in range(outputs)]
    return "".join(f"(declare-const {name} Real)\n" for name in names)


def box(ranges: Sequence[Range]) -> str:
    """Assertions that bound the inputs; numbers are written as they are given."""
    return "".join(
        f"(assert (>= X_{i} {low}))\n(assert (<= X_{i} {high}))\n" for i, (low, high) in enumerate(ranges)
    )


def write_property(path: Path, ranges: Sequence[Range], outputs: int, *assertions: str) -> Path:
    """A VNN-LIB file: declarations, the box, and one `assert` around each of `assertions`."""
    text = declare(len(ranges), outputs) + box(ranges) + "".join(f"(assert {a})\n" for a in assertions)
    path.write_text(text, encoding="utf-8")
    return path


def configure(model: Path, prop: Path, *words: str) -> Config:
    """The configuration of a quiet run on the CPU."""
    files = ["--onnx_path", str(model), "--vnnlib_path", str(prop)]
    return load_config([*files, "--device", "cpu", "--progress", "none", *words])


def run(model: Path, prop: Path, *words: str, deadline: Deadline | None = None) -> Outcome:
    """Verify two files with command-line words; the answer is checked by `check_outcome`."""
    config = configure(model, prop, *words)
    deadline = deadline or Deadline(60)
    outcome = verify(config, Instance(model, prop, deadline.seconds), deadline, Progress(mode="none"))
    check_outcome(outcome, load_vnnlib(prop))
    return outcome


def check_outcome(outcome: Outcome, prop: Property) -> None:
    """No `unsat` without a positive finite bound per disjunct (0 if strict), no `sat` without a witness."""
    assert (outcome.verdict is Verdict.SAT) == (outcome.witness is not None)
    assert outcome.reason
    for index, bound in outcome.bounds.items():
        strict = prop.disjuncts[index].strict
        least = 0 if strict is not None and strict.any() else math.ulp(0)
        assert not bound.refuted or any(least <= lower < math.inf for lower in bound.lower)
    if outcome.verdict is Verdict.UNSAT:
        refuted = {index for index, bound in outcome.bounds.items() if bound.refuted}
        assert refuted == set(range(len(prop.disjuncts)))
        assert outcome.open == set()
