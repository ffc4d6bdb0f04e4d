"""Two "nodes" on one machine: two torchrun agents, each in a folder of its own, that meet at a port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from abcrown_dist.spec.property import Verdict
from tests import flow, models
from tests.parallel.ranks import LAUNCHER, QUIET, Ended
from tests.parallel.test_search import INPUTS, NEURONS, SMALL, Trial, prepared

ENOUGH = ("--max_iterations", "-1")


def agents(folders: Sequence[Path], words: Sequence[str]) -> list[Ended]:
    """One agent per folder, with one rank each; the rendezvous decides whose rank is the first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(folders)}", "--nproc_per_node=1",
        "--rdzv_backend=c10d", "--rdzv_id=two-nodes", f"--rdzv_endpoint=localhost:{port}",
        "--local_addr=127.0.0.1", str(LAUNCHER), *QUIET, *words,
    ]  # fmt: skip
    processes = [
        subprocess.Popen(
            command, cwd=folder, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for folder in folders
    ]  # fmt: skip
    try:
        told = [process.communicate(timeout=120) for process in processes]
        return [Ended(p.returncode, *streams) for p, streams in zip(processes, told, strict=True)]
    finally:
        for process in processes:
            process.terminate()  # the agent ends its ranks
            process.wait(timeout=60)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """One per node, with the network in each."""
    made = [tmp_path / "first", tmp_path / "second"]
    for folder in made:
        folder.mkdir()
        models.mlp(folder / "net.onnx", [4, 12, 12, 3], seed=1)
    return made


def on_each(folders: Sequence[Path], gaps: Sequence[float], *words: str) -> Trial:
    """The same search in every folder."""
    trials = [prepared(folder / "net.onnx", 1.0, gaps, *words, *ENOUGH) for folder in folders]
    assert len({trial.prop.read_text() for trial in trials}) == 1
    return trials[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "gaps", "kind", "verdict"),
    [
        ("none", [0.4, -0.0001, 0.3], NEURONS, Verdict.SAT),
        ("fsdp", [0.4, 0.5, 0.4], NEURONS, Verdict.UNSAT),
        ("tp", [0.1, 0.2, 0.15], INPUTS, Verdict.UNSAT),
    ],
    ids=["none-sat", "fsdp-neurons", "tp-inputs"],
)
def test_two_agents_search_together(
    folders: list[Path], mode: str, gaps: list[float], kind: tuple[str, ...], verdict: Verdict
) -> None:
    """The verdict of one process, told and written once: where the first rank is."""
    trial = on_each(folders, gaps, *kind)
    expected = flow.run(trial.model, trial.prop, *trial.words)
    assert expected.verdict is verdict and len(expected.rounds) > 1
    files = "--onnx_path", "net.onnx", "--vnnlib_path", trial.prop.name, "--summary_file", "out.json"
    ended = agents(folders, [*files, *trial.words, "--parallel.mode", mode])
    assert [agent.code for agent in ended] == [0, 0], ended
    spoke = [agent.out.startswith(f"verdict: {verdict.value} ") for agent in ended]
    assert sorted(spoke) == [False, True], ended
    first, other = (folders[spoke.index(whether)] for whether in (True, False))
    assert (first / "out.txt").read_text().split("\n", 1)[0] == verdict.value
    assert (first / "out.json").exists()
    assert {path.name for path in other.iterdir()} == {"net.onnx", trial.prop.name}


@pytest.mark.slow
def test_an_error_ends_both_agents(folders: list[Path]) -> None:
    """torchrun gives its own exit code; the message stands where the first rank is."""
    files = "--onnx_path", "net.onnx", "--vnnlib_path", "missing.vnnlib"
    ended = agents(folders, [*files, *SMALL, "--parallel.mode", "none"])
    assert all(agent.code not in (0, -9) for agent in ended), ended
    said = [agent.err.count("missing.vnnlib") > 0 for agent in ended]
    assert True in said, ended
    assert not any("verdict" in agent.out for agent in ended)
