"""The JSON summary."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from abcrown_dist.report.summary import (
    ClauseBound,
    Summary,
    columns,
    peak_memory,
    thin,
    to_json,
    versions,
    write_summary,
)
from abcrown_dist.spec.property import Verdict
from tests.report.rounds import Round, proof


@dataclass
class Section:
    path: Path
    values: tuple[float, ...]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (math.nan, "nan"),
        (np.float64(-np.inf), "-inf"),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.array([[1.0, np.nan]]), [[1.0, "nan"]]),
        (torch.tensor([1, 2]), [1, 2]),
        (torch.float32, "torch.float32"),
        (Verdict.SAT, "sat"),
        (Decimal("0.10"), "0.10"),
        (Section(Path("a") / "b", (1.0, math.inf)), {"path": "a/b", "values": [1.0, "inf"]}),
        ({1: {None}}, {"1": [None]}),
        (True, True),
    ],
)
def test_everything_becomes_json(value: Any, expected: Any) -> None:
    result = to_json(value)
    assert result == expected
    assert type(result) is type(expected)
    json.dumps(result, allow_nan=False)


def test_a_summary_reads_back(tmp_path: Path) -> None:
    summary = Summary(
        verdict=Verdict.UNKNOWN,
        reason="bounds do not decide",
        bounds=[ClauseBound(0, [0.25, -math.inf], True, "crown")],
        seconds={"load": 0.5},
        memory=peak_memory(),
        versions=versions(),
        seed=7,
        config={"general": {"device": "cpu"}},
    )
    write_summary(tmp_path / "new" / "summary.json", summary)
    read = json.loads((tmp_path / "new" / "summary.json").read_text(), parse_constant=pytest.fail)
    assert list(read) == [
        *("verdict", "reason", "instance", "bounds", "domains", "seconds", "memory"),
        *("versions", "seed", "config", "waited", "rounds"),
    ]
    assert read["verdict"] == "unknown"
    assert read["bounds"] == [{"disjunct": 0, "lower": [0.25, "-inf"], "refuted": True, "method": "crown"}]
    assert read["versions"]["torch"].startswith(torch.__version__.split("+")[0])


def test_rounds_are_written_by_column(tmp_path: Path) -> None:
    rounds = [Round(0.5, 1, 2, 0, 3, -1.5, 1, 64), Round(0.75, 2, 0, 4, 7, math.inf, 2, 0)]
    write_summary(tmp_path / "s.json", Summary(Verdict.UNSAT, "refuted", domains=7, rounds=rounds))
    text = (tmp_path / "s.json").read_text()
    read = json.loads(text, parse_constant=pytest.fail)
    assert read["domains"] == 7
    assert read["rounds"] == {
        "seconds": [0.5, 0.75],
        "number": [1, 2],
        "open": [2, 0],
        "verified": [0, 4],
        "visited": [3, 7],
        "worst": [-1.5, "inf"],
        "depth": [1, 2],
        "memory": [64, 0],
    }
    assert '    "open": [2, 0],\n' in text  # one line a column, however many rounds


def test_without_rounds_every_column_is_there_and_empty(tmp_path: Path) -> None:
    write_summary(tmp_path / "s.json", Summary(Verdict.SAT, "attack"))
    read = json.loads((tmp_path / "s.json").read_text())
    assert read["domains"] == 0
    assert read["rounds"]["worst"] == [] and len(read["rounds"]) == 8


@pytest.mark.parametrize("most", [2, 3, 7, 99, 100, 101])
def test_thinning_keeps_the_ends_and_the_order(most: int) -> None:
    rounds = proof(100, 1000)
    kept = [found.number for found in thin(rounds, most)]
    assert (kept[0], kept[-1], len(kept)) == (1, 100, min(most, 100))
    steps = np.diff(kept)
    assert steps.min() > 0
    assert steps.max() - steps.min() <= 1


def test_a_long_run_has_a_small_file() -> None:
    found = columns(proof(100_000, 5000))
    assert {len(column) for column in found.values()} == {2000}
    assert found["number"][0] == 1 and found["number"][-1] == 100_000


def test_peak_memory_grows_with_what_is_used() -> None:
    before = peak_memory()["peak_rss_bytes"]
    assert before is not None
    block = np.ones(before // 8 + 2**23)  # more than everything so far
    after = peak_memory()["peak_rss_bytes"]
    assert after is not None
    assert after > before
    assert after >= block.nbytes
    assert peak_memory()["peak_cuda_bytes"] is None or torch.cuda.is_available()
