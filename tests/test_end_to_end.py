"""The program as its users start it: four ways, one verdict, documented exit codes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DIGITS = ROOT / "examples" / "digits"

LAUNCHES: dict[str, list[str]] = {
    "module": [sys.executable, "-m", "abcrown_dist"],
    "launcher": [sys.executable, str(ROOT / "abcrown_dist.py")],
    "console_script": [str(Path(sys.executable).parent / "abcrown-dist")],
    "torchrun": [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1", str(ROOT / "abcrown_dist.py"))
    ],
}


def start(launch: list[str], cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run to the end, in a folder where only PYTHONPATH tells of the package."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*launch, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHES)
def test_four_ways_to_start(tmp_path: Path, name: str) -> None:
    launch = LAUNCHES[name]
    if shutil.which(launch[0]) is None:
        pytest.skip(f"{launch[0]} is not installed")
    found = start(launch, tmp_path, "--config", "digits_mlp.yaml", "--device", "cpu")
    assert found.returncode == 0, found.stderr
    assert "verdict: unsat (refuted by " in found.stdout
    assert (tmp_path / "out.txt").read_text() == "unsat\n"
    assert "Traceback" not in found.stderr


@pytest.mark.slow
def test_the_shipped_batch(tmp_path: Path) -> None:
    found = start(LAUNCHES["module"], tmp_path, "--config", "digits_batch.yaml", "--device", "cpu")
    assert found.returncode == 0, found.stderr
    verdicts = [(tmp_path / f"out_{i}.txt").read_text().splitlines()[0] for i in range(3)]
    assert (verdicts[0], verdicts[2]) == ("unsat", "sat")
    assert verdicts[1] in ("unsat", "unknown")  # true, but needs branching
    assert "3 instances: 1 sat" in found.stdout
    witness = (tmp_path / "out_2.txt").read_text().splitlines()[1:]
    assert [line.strip(" ()").split()[0] for line in witness] == [
        *(f"X_{i}" for i in range(64)),
        *(f"Y_{i}" for i in range(10)),
    ]


def test_a_wrong_option(tmp_path: Path) -> None:
    found = start(LAUNCHES["launcher"], tmp_path, "--config", "digits_mlp.yaml", "--batchsize", "3")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("error: command line: unknown option --batchsize; nearest")
    assert found.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_a_missing_model(tmp_path: Path) -> None:
    prop = str(DIGITS / "digits_mlp_crown.vnnlib")
    words = ("--onnx_path", "no.onnx", "--vnnlib_path", prop, "--progress", "none", "--device", "cpu")
    found = start(LAUNCHES["module"], tmp_path, *words)
    assert (found.returncode, found.stdout) == (3, "")
    assert found.stderr == "error: no.onnx: no such file\n"
    assert (tmp_path / "out.txt").read_text() == "error\n"


@pytest.mark.slow
def test_results_on_standard_output(tmp_path: Path) -> None:
    """Also where that is a file, which must not be replaced."""
    words = ("--config", "digits_mlp.yaml", "--device", "cpu", "--results_file", "/dev/stdout")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with (tmp_path / "log").open("w") as log:
        log.write("before\n")
        log.flush()
        command = [*LAUNCHES["module"], *words]
        found = subprocess.run(command, cwd=tmp_path, env=environment, stdout=log, timeout=120)
    assert found.returncode == 0
    before, verdict, line = (tmp_path / "log").read_text().splitlines()
    assert (before, verdict) == ("before", "unsat")
    assert line.startswith("verdict: unsat")
