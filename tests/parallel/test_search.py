"""Branch and bound over ranks: with `bab.force_synchronous` the same work domain by domain, else the same
verdict."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from abcrown_dist.parallel.group import ALONE
from abcrown_dist.spec.vnnlib1 import load_vnnlib
from tests import flow, models
from tests.parallel import search_jobs
from tests.parallel.pool import Pool
from tests.parallel.search_jobs import Entry, Finished, Layout, Totals, Trial

Pools = Callable[[int], Pool]

DEGREES = ((2, 1), (1, 2), (4, 1), (2, 2), (1, 4))
DEGREES = ((2, 1), (1, 2), (4, 1), (2, 2), (1, 4))
LAYOUTS = [
    Layout("none", 1, 2),
    Layout("none", 1, 4),
    *(Layout(mode, *degrees) for mode in ("fsdp", "tp") for degrees in DEGREES),
]
LONG = (Layout("tp", 1, 4), Layout("fsdp", 1, 4))  # nobody shares weights: the same as none-1x4
QUICK = (Layout("none", 1, 2), Layout("fsdp", 1, 2))  # the others wait for each other most of the time
FORCED = ("--bab.force_synchronous", "true")
SMALL = (
    "--pgd_order", "skip", "--no_incomplete", "--bound_prop_method", "crown", "--batch_size", "8",
    "--init_iteration", "3", "--iteration", "3", "--max_iterations", "25",
)  # fmt: skip
NEURONS = ("--bab.branching.input_split.enable", "false")
INPUTS = ("--bab.branching.input_split.enable", "true", "--bab.branching.input_split.batch_size", "8")


def residual(path: Path) -> Path:
    """4 inputs, 8 neurons, a block of 8 neurons around which its input is added, 2 outputs."""
    build = models.OnnxBuilder(3)
    x = build.op("Relu", build.gemm(build.input("x", [1, 4]), 4, 8))
    inner = build.op("Relu", build.gemm(x, 8, 8))
    x = build.op("Relu", build.op("Add", build.gemm(inner, 8, 8), x))
    build.output(build.gemm(x, 8, 2, name="y"), [1, 2])
    return build.save(path)


def convolutional(path: Path) -> Path:
    """2x6x6 inputs, two convolutions of 4 channels, a dense layer of 10 neurons, 3 outputs."""
    build = models.OnnxBuilder(5)
    x = build.op("Relu", build.conv(build.input("x", [1, 2, 6, 6]), 2, 4, 3, 2, 1))
    x = build.op("Flatten", build.op("Relu", build.conv(x, 4, 4, 3, 1, 1)))
    x = build.op("Relu", build.gemm(x, 36, 10))
    build.output(build.gemm(x, 10, 3, name="y"), [1, 3])
    return build.save(path)


def distances(path: Path) -> Path:
    """y = 1 + |x_0 - 0.1| + |x_1 + 0.2|: its minimum is 1, which the bounds of leaves reach."""
    build = models.OnnxBuilder()
    signs = np.array([[1.0, 0], [-1, 0], [0, 1], [0, -1]])
    weight, bias = build.constant(signs), build.constant(signs @ [-0.1, 0.2])
    x = build.op("Relu", build.op("Gemm", build.input("x", [1, 2]), weight, bias, transB=1))
    ones = build.constant(np.ones((1, 4))), build.constant(np.ones(1))
    build.output(build.op("Gemm", x, *ones, transB=1, name="y"), [1, 1])
    return build.save(path)


def outputs(model: Path, points: np.ndarray) -> np.ndarray:
    """(N, outputs), as onnxruntime computes them."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    entry = session.get_inputs()[0]
    flat = points.astype(np.float32)
    return np.stack([session.run(None, {entry.name: x.reshape(entry.shape)})[0].ravel() for x in flat])


def prepared(model: Path, radius: float, gaps: Sequence[float], *words: str) -> Trial:
    """One disjunct per gap: that output k is below its least sampled value, less the gap times its spread."""
    inputs = {"conv": 72}.get(model.stem, 4)
    random = np.random.default_rng(len(gaps))
    # Minima lie on faces of the box, most of them in corners.
    sampled = outputs(model, random.uniform(-3 * radius, 3 * radius, (4000, inputs)).clip(-radius, radius))
    clauses = []
    for number, gap in enumerate(gaps):
        value = sampled[:, number % sampled.shape[1]]
        bound = float(value.min() - gap * (value.max() - value.min()))
        clauses.append(f"(and (<= Y_{number % sampled.shape[1]} {bound:.6f}))")
    prop = model.with_name(f"{model.stem}_{'_'.join(map(str, gaps))}.vnnlib")
    flow.write_property(prop, [(-radius, radius)] * inputs, sampled.shape[1], f"(or {' '.join(clauses)})")
    return Trial(model, prop, (*SMALL, *words))


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trial]:
    """Small searches, each with something of its own."""
    folder = tmp_path_factory.mktemp("search")
    dense = models.mlp(folder / "dense.onnx", [4, 12, 12, 3], seed=1)
    block, conv = residual(folder / "block.onnx"), convolutional(folder / "conv.onnx")
    doubtful = Trial(distances(folder / "distances.onnx"), folder / "doubtful.vnnlib", (*SMALL, *NEURONS))
    flow.write_property(doubtful.prop, [(-1, 1)] * 2, 1, "(<= Y_0 0.9999998)")
    return {
        "kfsb": prepared(dense, 1.0, [0.4, 0.5, 0.4], *NEURONS),
        "babsr": prepared(dense, 1.0, [1.3, 1.2], *NEURONS, "--branching_method", "babsr"),
        "fsb": prepared(dense, 1.0, [0.4, 0.3], *NEURONS, "--branching_method", "fsb"),
        "levels": prepared(dense, 1.0, [0.5], *NEURONS, "--min_batch_size_ratio", "1"),
        "recompute": prepared(dense, 1.0, [0.4, 0.35], *NEURONS, "--recompute_interm"),
        "sat": prepared(dense, 1.0, [0.4, -0.0001, 0.3], *NEURONS),
        "unknown": prepared(dense, 1.0, [0.02], *NEURONS, "--max_iterations", "5"),
        "residual": prepared(block, 1.0, [0.03, 0.05], *NEURONS),
        "convolutional": prepared(conv, 0.2, [0.65, 0.65], *NEURONS),
        "doubtful": doubtful,
        "inputs": prepared(dense, 1.0, [0.1, 0.2, 0.15], *INPUTS),
        "inputs-sat": prepared(dense, 1.0, [0.1, -0.001], *INPUTS),
    }


@cache
def alone(trial: Trial, mode: str) -> Finished:
    """The search of one process, in one thread, with the chunks of a mode."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return search_jobs.search(ALONE, trial, Layout(mode, 1, 1))
    finally:
        torch.set_num_threads(threads)


def merged(holders: Sequence[Finished]) -> list[Entry]:
    """What all ranks bounded, in an order that does not depend on who did."""
    return sorted(entry for each in holders for entry in each.trace)


def assert_same_work(
    found: Sequence[Finished], layout: Layout, expected: Finished, tolerance: float = 1e-6
) -> None:
    """Every rank tells the same, and all together have bounded what one process did."""
    # Under tp to a part of what is summed up, a unit or more: margins are what is left when it cancels.
    greatest = max(abs(entry.margin) for entry in expected.trace if math.isfinite(entry.margin))
    slack = tolerance * max(1.0, greatest) if layout.mode == "tp" else 0.0
    for each in found:
        assert (each.verdict, each.reason) == (expected.verdict, expected.reason)
        assert each.domains == expected.domains
        assert each.refuted == expected.refuted
        assert_same_rounds(each.rounds, expected.rounds, slack)
    assert_same_traces(merged(layout.holders(found)), merged([expected]), slack)
    if layout.mode == "tp":  # the ranks of a copy hold the same domains
        for rank, each in enumerate(found):
            assert each.trace == found[rank - rank % layout.shards].trace


def assert_same_rounds(found: list[Totals], expected: list[Totals], slack: float) -> None:
    assert [totals[:-1] for totals in found] == [totals[:-1] for totals in expected]
    assert_same_values([totals.worst for totals in found], [totals.worst for totals in expected], slack)


def assert_same_traces(found: list[Entry], expected: list[Entry], slack: float) -> None:
    assert [entry[:-1] for entry in found] == [entry[:-1] for entry in expected]
    assert_same_values([entry.margin for entry in found], [entry.margin for entry in expected], slack)


def assert_same_values(found: list[float], expected: list[float], slack: float) -> None:
    """Within `slack`, and bit for bit without any."""
    if slack:
        np.testing.assert_allclose(found, expected, rtol=0, atol=slack)
    else:
        assert [value.hex() for value in found] == [value.hex() for value in expected]


def assert_violates(trial: Trial, found: Finished) -> None:
    """The witness of a `sat` is a counterexample to onnxruntime, too."""
    assert found.witness is not None
    item = load_vnnlib(trial.prop).disjuncts[found.witness.disjunct]
    x = np.array([float(value) for value in found.witness.inputs])
    low, high = item.box.outward()
    assert (x >= low).all() and (x <= high).all()
    y = outputs(trial.model, x[None])[0].astype(np.float64)
    assert (item.C @ y <= item.rhs).all()


def marked(layouts: Sequence[Layout]) -> list[Any]:
    """What waits at every layer, four ranks on few cores, is left to `make test-huge`."""
    found = []
    for each in layouts:
        hard = pytest.mark.huge if each.shards == 4 or each in LONG else pytest.mark.slow
        found.append(pytest.param(each, id=str(each), marks=() if each in QUICK else hard))
    return found


def suited(trials: dict[str, Trial], layout: Layout) -> list[Trial]:
    """All trials, or a few where ranks that share weights meet at every layer: what differs by mode."""
    names = {1: tuple(trials), 2: ("kfsb", "sat", "convolutional", "doubtful", "inputs")}
    return [trials[name] for name in names.get(layout.shards, ("sat", "convolutional"))]


def forced(trial: Trial) -> Trial:
    return replace(trial, words=(*trial.words, *FORCED))


def test_the_trials_are_worth_it(trials: dict[str, Trial]) -> None:
    """All verdicts occur, batches are full, and what each trial is there for happens."""
    found = {name: alone(forced(trial), "none") for name, trial in trials.items()}
    verdicts = {"sat": "sat", "inputs-sat": "sat", "unknown": "unknown", "doubtful": "unknown"}
    assert {name: each.verdict for name, each in found.items()} == {
        name: verdicts.get(name, "unsat") for name in trials
    }
    for name, each in found.items():
        assert len(each.rounds) >= 2, name
        assert len(each.trace) == each.domains == len({entry[1:3] for entry in each.trace})
    assert max(entry.depth for entry in found["levels"].trace if entry.step == 1) >= 3
    assert Counter(entry.dtype for entry in found["doubtful"].trace).keys() == {"float32", "float64"}
    assert max(totals.open for totals in found["levels"].rounds) > 8  # more than a batch


@pytest.mark.parametrize("layout", marked(LAYOUTS))
def test_forced_ranks_do_the_work_of_one(pools: Pools, trials: dict[str, Trial], layout: Layout) -> None:
    each = [forced(trial) for trial in suited(trials, layout)]
    told = pools(layout.size).run(search_jobs.searches, each, layout, seconds=550)
    for index, trial in enumerate(each):
        found = [rank[index] for rank in told]
        # Boxes are cut where bounds say so: what differs in one goes on in its parts.
        assert_same_work(found, layout, alone(trial, layout.mode), 1e-5 if INPUTS[2] in trial.words else 1e-6)
        for finished in found:
            if finished.verdict == "sat":
                assert_violates(trial, finished)


@pytest.mark.parametrize("layout", marked([each for each in LAYOUTS if each.shards < 4]))
def test_free_ranks_give_the_verdict_of_one(pools: Pools, trials: dict[str, Trial], layout: Layout) -> None:
    each = suited(trials, layout)
    told = pools(layout.size).run(search_jobs.searches, each, layout, seconds=550)
    for index, trial in enumerate(each):
        expected = alone(trial, layout.mode)
        for finished in (rank[index] for rank in told):
            assert finished.verdict == expected.verdict
            if finished.verdict == "unsat":
                assert finished.refuted == expected.refuted
            if finished.verdict == "sat":
                assert_violates(trial, finished)
