"""No false verdict when time or memory runs out, a bound is no number, or a part fails, at any moment."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import abcrown_dist.flow as flow_module
import abcrown_dist.verify as verify_module
from abcrown_dist.attack.confirm import Confirmer
from abcrown_dist.bab import root
from abcrown_dist.bab.root import Refutation
from abcrown_dist.bab.split_input import InputSplitter
from abcrown_dist.bab.split_relu import ReluSplitter
from abcrown_dist.bounds.types import RowBounds
from abcrown_dist.graph import load_onnx as front_end
from abcrown_dist.spec.property import Verdict
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.util.errors import DeadlineExceeded, LoadError
from tests import flow
from tests.models import identity, mlp

BOX: list[flow.Range] = [(-1, 1)] * 3
REFUTABLE = "(or (<= Y_0 -2) (>= Y_1 2) (>= (+ Y_0 Y_1) 3) (and (<= Y_2 -3) (<= Y_0 0)))"
BOUNDS_ONLY = ("--complete_verifier", "skip")
UNAIDED = ("--no_incomplete", "--pgd_order", "skip", "--bab.max_iterations", "2")  # nothing but a search
# No bound refutes the second, whose decimals are rounded outward; no input fulfils it.
OPEN = "(or (<= Y_0 -2) (and (<= Y_1 0.1) (<= Y_2 0.2) (> (+ (* 3.0 Y_1) (* 3.0 Y_2)) 0.9)))"


@pytest.fixture
def net(tmp_path: Path) -> Path:
    return identity(tmp_path / "net.onnx", 3)


@pytest.fixture
def unsat(tmp_path: Path) -> Path:
    """Four disjuncts, each refuted by a bound of its own."""
    return flow.write_property(tmp_path / "unsat.vnnlib", BOX, 3, REFUTABLE)


@pytest.fixture
def sat(tmp_path: Path) -> Path:
    """Three disjuncts of which the last one can be fulfilled."""
    return flow.write_property(tmp_path / "sat.vnnlib", BOX, 3, "(or (<= Y_0 -2) (>= Y_1 2) (>= Y_2 0.9))")


@pytest.fixture
def undecided(tmp_path: Path) -> Path:
    return flow.write_property(tmp_path / "open.vnnlib", BOX, 3, OPEN)


# Time


class Countdown(Deadline):
    """Out of time when it has been looked at so many times."""

    def __init__(self, looks: float) -> None:
        super().__init__(1000.0)
        self.looks = looks
        self.seen = 0

    def expired(self) -> bool:
        self.seen += 1
        return self.seen > self.looks

    def remaining(self) -> float:
        return 1000.0


def every_moment(run: Callable[[Countdown], Verdict]) -> Iterator[Verdict]:
    """Verdicts with the time running out at the first look, the second, ... up to the last one."""
    whole = Countdown(math.inf)
    yield run(whole)
    assert whole.seen
    for looks in range(whole.seen):
        yield run(Countdown(looks))


WAYS = {
    "auto": ("--pgd_order", "auto", "--complete_verifier", "skip"),
    "after": ("--pgd_order", "after", "--complete_verifier", "skip"),
    "skip": ("--pgd_order", "skip", "--complete_verifier", "skip"),
    "neurons": (*UNAIDED, "--bab.branching.input_split.enable", "false"),
    "inputs": (*UNAIDED, "--bab.branching.input_split.enable", "true"),
    "mip": (*UNAIDED, "--complete_verifier", "mip"),
    "refine": (*UNAIDED, "--complete_verifier", "bab-refine"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["sat", "unsat", "open"])
def test_time_that_runs_out_at_any_moment(
    net: Path, unsat: Path, sat: Path, undecided: Path, name: str, way: str
) -> None:
    """Never a false verdict, never an error, and no `unknown` for what more time might have decided."""
    prop = {"sat": sat, "unsat": unsat, "open": undecided}[name]
    words = (*WAYS[way], "--batch_size", "1", "--pgd_steps", "3", "--pgd_restarts", "2")
    first, *others = every_moment(lambda deadline: flow.run(net, prop, *words, deadline=deadline).verdict)
    assert first.value == {"open": "unknown"}.get(name, name)
    assert set(others) <= {first, Verdict.TIMEOUT}
    assert others[0] is Verdict.TIMEOUT


def test_the_alarm_ends_a_conversion_that_catches_everything(
    net: Path, unsat: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time that runs out inside a library is no message about the model."""

    def convert(*arguments: object) -> None:
        while True:
            try:
                time.sleep(0.01)
            except Exception as error:
                raise RuntimeError("conversion failed") from error

    monkeypatch.setattr(front_end, "convertible_copy", convert)
    outcome = flow.run(net, unsat, deadline=Deadline(0.05))
    assert (outcome.verdict, outcome.reason) == (Verdict.TIMEOUT, "time limit of 0.05 s reached")


def test_an_alarm_after_the_answer_changes_nothing(
    net: Path, sat: Path, unsat: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide = verify_module.decide

    def late(*arguments: Any) -> None:
        decide(*arguments)
        raise DeadlineExceeded("too late to matter")

    monkeypatch.setattr(verify_module, "decide", late)
    assert flow.run(net, sat).verdict is Verdict.SAT
    assert flow.run(net, unsat).verdict is Verdict.UNSAT


def test_more_work_than_time_is_a_timeout(tmp_path: Path) -> None:
    """A second for a million steps of optimisation."""
    model = mlp(tmp_path / "net.onnx", [20, 200, 200, 200, 1])
    ranges: list[flow.Range] = [(-1, 1)] * 20
    prop = flow.write_property(tmp_path / "p.vnnlib", ranges, 1, "(<= Y_0 -30)")
    words = ("--pgd_order", "skip", "--bound_prop_method", "alpha-crown", "--lr_init_alpha", "0.0001")
    patience = ("--init_iteration", "1000000", "--early_stop_patience", "1000000")
    assert flow.run(model, prop, *words, *patience, deadline=Deadline(1.0)).verdict is Verdict.TIMEOUT


# What breaks on the way

Refute = Callable[..., Refutation]


def watch_refute(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[int, Refute], Refutation | None] | None = None
) -> list[list[int]]:
    """Record which disjuncts each call of `refute` is asked for.

    Args:
        change: called with the number of the call and the real function, bound to its arguments;
            what it returns (unless None) or raises takes the place of the answer.
    """
    asked: list[list[int]] = []

    def refute(weights: Any, prop: Any, wanted: list[int], *rest: Any, **named: Any) -> Refutation:
        asked.append(list(wanted))

        def real() -> Refutation:
            return root.refute(weights, prop, wanted, *rest, **named)

        changed = change(len(asked) - 1, real) if change else None
        return real() if changed is None else changed

    monkeypatch.setattr(flow_module, "refute", refute)
    return asked


def raising(error: BaseException, at: int) -> Callable[[int, Refute], None]:
    def change(call: int, real: Refute) -> None:
        if call == at:
            raise error

    return change


CPU_FULL = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: not enough memory: "
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes."
)
FULL = [MemoryError(), CPU_FULL, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")]


@pytest.mark.parametrize("call", [0, 1])
@pytest.mark.parametrize("error", FULL, ids=["python", "cpu", "cuda"])
def test_no_memory_is_unknown(
    net: Path, undecided: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, call: int
) -> None:
    asked = watch_refute(monkeypatch, raising(error, call))
    outcome = flow.run(net, undecided, "--pgd_order", "skip", *BOUNDS_ONLY)
    assert (outcome.verdict, outcome.reason) == (Verdict.UNKNOWN, "out of memory")
    assert len(asked) == call + 1


@pytest.mark.parametrize("error", FULL, ids=["python", "cpu", "cuda"])
@pytest.mark.parametrize("place", ["load", "plan", "find_counterexamples", "refute"])
def test_no_memory_anywhere_is_unknown(
    net: Path, unsat: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: BaseException
) -> None:
    def full(*arguments: Any, **named: Any) -> None:
        raise error

    module = verify_module if place in ("load", "plan") else flow_module
    monkeypatch.setattr(module, place, full)
    outcome = flow.run(net, unsat)
    assert (outcome.verdict, outcome.reason) == (Verdict.UNKNOWN, "out of memory")


@pytest.mark.parametrize("error", FULL, ids=["python", "cpu", "cuda"])
@pytest.mark.parametrize("way", ["neurons", "inputs"])
def test_no_memory_for_a_single_domain_is_unknown(
    net: Path, unsat: Path, monkeypatch: pytest.MonkeyPatch, way: str, error: BaseException
) -> None:
    def full(*arguments: Any) -> None:
        raise error

    for splitter in (ReluSplitter, InputSplitter):
        monkeypatch.setattr(splitter, "bound", full)
        monkeypatch.setattr(splitter, "examine", full)
    outcome = flow.run(net, unsat, *WAYS[way])
    assert (outcome.verdict, outcome.reason) == (Verdict.UNKNOWN, "out of memory")


def test_any_other_failure_goes_up(net: Path, unsat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch_refute(monkeypatch, raising(RuntimeError("a defect"), 0))
    with pytest.raises(RuntimeError, match="a defect"):
        flow.run(net, unsat)


def test_a_part_that_is_skipped_is_open(net: Path, unsat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that answers for some disjuncts only proves nothing about the rest."""

    def some(call: int, real: Refute) -> Refutation:
        answer = real()
        return Refutation(refuted=answer.refuted - {2}, margins=answer.margins)

    watch_refute(monkeypatch, some)
    outcome = flow_outcome_without_check(net, unsat)
    assert (outcome.verdict, outcome.open) == (Verdict.UNKNOWN, {2})


def flow_outcome_without_check(model: Path, prop: Path) -> flow_module.Outcome:
    """Bounds that are made up here need not agree with what is refuted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flow, "check_outcome", lambda outcome, prop: None)
        return flow.run(model, prop, *BOUNDS_ONLY)


@pytest.mark.parametrize("again", [set(), {1}, {0, 1}])
def test_doubtful_disjuncts_are_bounded_again_in_float64(
    net: Path, unsat: Path, monkeypatch: pytest.MonkeyPatch, again: set[int]
) -> None:
    """Only a second answer in float64 counts, and only for what it names."""
    dtypes: list[torch.dtype] = []

    def refute(weights: Any, prop: Any, wanted: list[int], *rest: Any, **named: Any) -> Refutation:
        dtypes.append(weights.dtype)
        if weights.dtype == torch.float64:
            assert len(dtypes) > 2 or wanted == [0, 1]
            return Refutation(refuted=set(again))
        return Refutation(refuted={2, 3} & set(wanted), doubtful={0, 1} & set(wanted))

    monkeypatch.setattr(flow_module, "refute", refute)
    outcome = flow_outcome_without_check(net, unsat)
    assert dtypes[:2] == [torch.float32, torch.float64]
    assert outcome.open == {0, 1} - again
    assert (outcome.verdict is Verdict.UNSAT) == (again == {0, 1})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("error", [0.0, math.nan, math.inf])
def test_a_bound_that_is_no_number_refutes_nothing(
    net: Path, unsat: Path, monkeypatch: pytest.MonkeyPatch, value: float, error: float
) -> None:
    def broken(weights: Any, box: Any, relaxed: Any, rows: dict[str, torch.Tensor], *rest: Any) -> RowBounds:
        shape = next(iter(rows.values())).shape[:2]
        return RowBounds(torch.full(shape, value), torch.full(shape, error))

    monkeypatch.setattr(root, "bound_rows", broken)
    monkeypatch.setattr(root, "refute_combined", lambda *_: ({}, set()))
    outcome = flow.run(net, unsat, *BOUNDS_ONLY)
    assert (outcome.verdict, outcome.open) == (Verdict.UNKNOWN, {0, 1, 2, 3})


@pytest.mark.parametrize("error", [math.nan, math.inf])
def test_an_error_that_is_no_number_refutes_nothing(
    net: Path, unsat: Path, monkeypatch: pytest.MonkeyPatch, error: float
) -> None:
    def broken(*arguments: Any) -> RowBounds:
        bounds = bound_rows(*arguments)
        return RowBounds(bounds.lower, torch.full_like(bounds.lower, error))

    bound_rows = root.bound_rows
    monkeypatch.setattr(root, "bound_rows", broken)
    assert flow.run(net, unsat, *BOUNDS_ONLY).verdict is Verdict.UNKNOWN


def test_one_broken_box_of_a_batch_is_open_alone(
    tmp_path: Path, net: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three boxes at once; the bounds of the second are lost."""
    boxes = [(-1, -0.5), (-0.5, 0.5), (0.5, 1)]
    clauses = " ".join(f"(and (>= X_0 {low}) (<= X_0 {high}) (>= Y_0 2))" for low, high in boxes)
    prop = flow.write_property(tmp_path / "p.vnnlib", BOX, 3, f"(or {clauses})")
    assert flow.run(net, prop).verdict is Verdict.UNSAT

    def broken(*arguments: Any) -> RowBounds:
        bounds = bound_rows(*arguments)
        lower = bounds.lower.clone()
        if len(lower) == 3:
            lower[1] = math.nan
        return RowBounds(lower, bounds.error)

    bound_rows = root.bound_rows
    monkeypatch.setattr(root, "bound_rows", broken)
    outcome = flow.run(net, prop, "--bound_prop_method", "crown", "--pgd_order", "skip", *BOUNDS_ONLY)
    assert (outcome.verdict, outcome.open) == (Verdict.UNKNOWN, {1})


def test_without_confirmation_there_is_no_sat(net: Path, sat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Confirmer, "confirm", lambda self, x, disjunct: None)
    for words in (BOUNDS_ONLY, *WAYS.values()):
        outcome = flow.run(net, sat, "--bab.max_iterations", "2", *words)
        assert (outcome.verdict, 2 in outcome.open) == (Verdict.UNKNOWN, True), words


def test_a_model_that_onnxruntime_cannot_run_any_more_is_an_error(
    net: Path, sat: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Confirmer, x: np.ndarray, disjunct: int) -> None:
        raise LoadError("onnxruntime cannot run the model")

    monkeypatch.setattr(Confirmer, "confirm", broken)
    with pytest.raises(LoadError):
        flow.run(net, sat)
