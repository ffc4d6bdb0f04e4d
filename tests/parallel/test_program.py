"""The whole program on several ranks: verdicts, files, exit codes, and what happens when a rank fails."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest

from abcrown_dist.config.load import load_config
from abcrown_dist.parallel.launch import World, check_world
from abcrown_dist.spec.property import Verdict
from abcrown_dist.spec.vnnlib1 import load_vnnlib
from abcrown_dist.util.errors import ConfigError
from tests import flow
from tests.models import OnnxBuilder, mlp
from tests.parallel.ranks import DIES, RAISES, STOPS, Ended, faulty, launch, torchrun

BOX: list[flow.Range] = [(-1, 1)] * 4
FILES = ("--onnx_path", "net.onnx", "--vnnlib_path", "unsat.vnnlib")


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """One per rank; only the first holds files."""
    made = [tmp_path / "first", tmp_path / "second"]
    for folder in made:
        folder.mkdir()
    mlp(made[0] / "net.onnx", [4, 9, 7, 3])
    flow.write_property(made[0] / "unsat.vnnlib", BOX, 3, "(<= Y_0 -1000)")
    flow.write_property(made[0] / "sat.vnnlib", BOX, 3, "(<= Y_0 1000)")
    return made


def slow_instance(folder: Path) -> None:
    """A property that takes minutes and stays open."""
    mlp(folder / "wide.onnx", [40, *[500] * 6, 3])
    flow.write_property(folder / "open.vnnlib", [(-1, 1)] * 40, 3, "(<= Y_0 -100000)", "(<= Y_1 -100000)")


SLOW = ("--onnx_path", "wide.onnx", "--vnnlib_path", "open.vnnlib", "--bound_prop_method", "alpha-crown",
        "--pgd_order", "skip", "--init_iteration", "100000")  # fmt: skip


def only_rank_0_speaks(ended: list[Ended]) -> None:
    for other in ended[1:]:
        assert (other.out, other.err) == ("", "")


@pytest.mark.parametrize(
    "words",
    [
        ("fsdp",),
        pytest.param(("tp",), marks=pytest.mark.slow),
        pytest.param(("fsdp", "--parallel.shard_rows", "true"), marks=pytest.mark.slow),
        pytest.param(("auto",), marks=pytest.mark.slow),
    ],
)
def test_a_proof_with_files_that_only_rank_0_sees(folders: list[Path], words: tuple[str, ...]) -> None:
    ended = launch(folders, [*FILES, "--summary_file", "out.json", "--parallel.mode", *words])
    assert [rank.code for rank in ended] == [0, 0], ended
    only_rank_0_speaks(ended)
    assert ended[0].out.startswith("verdict: unsat (refuted by ")
    assert (folders[0] / "out.txt").read_text() == "unsat\n"
    assert json.loads((folders[0] / "out.json").read_text())["verdict"] == "unsat"
    assert not list(folders[1].iterdir())


SEARCH = ("--pgd_order", "skip", "--no_incomplete", "--bound_prop_method", "crown")


@pytest.mark.parametrize("mode", ["tp", "fsdp"])
@pytest.mark.parametrize("inputs", ["false", pytest.param("true", marks=pytest.mark.slow)])
def test_what_is_split_on_two_ranks_as_on_one(folders: list[Path], mode: str, inputs: str) -> None:
    """A property that takes branching; under fsdp every number is the same."""
    mlp(folders[0] / "net.onnx", [4, 16, 16, 2])
    prop = flow.write_property(folders[0] / "branch.vnnlib", BOX, 2, "(<= Y_0 -1.2)")
    words = (*SEARCH, "--bab.branching.input_split.enable", inputs)
    expected = flow.run(folders[0] / "net.onnx", prop, *words)
    assert expected.verdict is Verdict.UNSAT and expected.domains > 2
    files = ("--onnx_path", "net.onnx", "--vnnlib_path", "branch.vnnlib", "--summary_file", "out.json")
    ended = launch(folders, [*files, *words, "--parallel.mode", mode])
    assert [rank.code for rank in ended] == [0, 0], ended
    only_rank_0_speaks(ended)
    summary = json.loads((folders[0] / "out.json").read_text())
    assert (summary["verdict"], summary["reason"]) == ("unsat", expected.reason)
    if mode == "fsdp":
        assert summary["bounds"][0]["lower"] == expected.bounds[0].lower


@pytest.mark.parametrize("mode", ["tp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_batch_in_which_a_model_is_missing(folders: list[Path], mode: str) -> None:
    rows = "net.onnx,unsat.vnnlib\nmissing.onnx,sat.vnnlib\nnet.onnx,sat.vnnlib\n"
    (folders[0] / "list.csv").write_text(rows)
    ended = launch(folders, ["--csv_name", "list.csv", "--parallel.mode", mode, "--pgd_order", "before"])
    assert [rank.code for rank in ended] == [3, 3], ended
    only_rank_0_speaks(ended)
    lines = [(folders[0] / f"out_{number}.txt").read_text().splitlines() for number in range(3)]
    assert [line[0] for line in lines] == ["unsat", "error", "sat"]
    assert lines[2][1].startswith("((X_0 ")
    assert not list(folders[1].iterdir())


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--parallel.mode", "fsdp", "--onnx_path", "no.onnx", "--vnnlib_path", "sat.vnnlib"), 3, "no.onnx"),
        pytest.param((*FILES, "--parallel.domain", "3"), 2, "is not 2, the number", marks=pytest.mark.slow),
        pytest.param((*FILES, "--no_such_key", "1"), 2, "no_such_key", marks=pytest.mark.slow),
        pytest.param(("--config", "no.yaml"), 2, "no.yaml", marks=pytest.mark.slow),
    ],
)
def test_an_error_is_told_once(folders: list[Path], words: tuple[str, ...], code: int, message: str) -> None:
    ended = launch(folders, words)
    assert [rank.code for rank in ended] == [code, code], ended
    only_rank_0_speaks(ended)
    assert message in ended[0].err and len(ended[0].err.splitlines()) == 1
    assert ended[0].out == ""


@pytest.mark.slow
def test_help_is_shown_once(folders: list[Path]) -> None:
    ended = launch(folders, ["--help"])
    assert [rank.code for rank in ended] == [0, 0], ended
    only_rank_0_speaks(ended)
    assert "--parallel.mode" in ended[0].out


@pytest.mark.parametrize(
    ("words", "size", "message"),
    [
        (("--parallel.shards", "2"), 2, "none shares no weights, not among 2 ranks"),
        (("--parallel.domain", "3"), 2, "shards 1 times parallel.domain 3 is not 2, the number of ranks"),
        (("--parallel.mode", "tp", "--parallel.shards", "3"), 2, "domain 1 is not 2, the number of ranks"),
        (("--parallel.mode", "fsdp", "--parallel.shards", "2"), 1, "domain 1 is not 1, the number of ranks"),
        (
            ("--parallel.mode", "tp", "--parallel.shard_rows", "true"),
            2,
            "shard_rows needs parallel.mode fsdp",
        ),
        (("--parallel.mode", "tp", "--parallel.backend", "nccl"), 2, "nccl needs general.device cuda"),
    ],
)
def test_settings_that_do_not_fit_the_ranks(words: tuple[str, ...], size: int, message: str) -> None:
    config = load_config([*FILES, "--device", "cpu", *words])
    with pytest.raises(ConfigError, match=message):
        check_world(config, World(0, size))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("RANK", "two", "must be whole numbers"), ("RANK", "2", "RANK 2 does not fit WORLD_SIZE 2")],
)
def test_an_environment_that_contradicts_itself(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        World.from_environment()


@pytest.mark.parametrize("mode", ["tp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_time_runs_out_for_all_ranks_at_once(folders: list[Path], mode: str) -> None:
    slow_instance(folders[0])
    ended = launch(folders, [*SLOW, "--timeout", "8", "--parallel.mode", mode])
    assert [rank.code for rank in ended] == [0, 0], ended
    only_rank_0_speaks(ended)
    assert ended[0].out.startswith("verdict: timeout (time limit of 8 s reached)")
    assert (folders[0] / "out.txt").read_text() == "timeout\n"


@pytest.mark.parametrize(
    ("mode", "method", "what", "who"),
    [
        ("fsdp", "gather", DIES, 1),
        pytest.param("tp", "reduce_scatter", RAISES, 1, marks=pytest.mark.slow),
        pytest.param("tp", "reduce_scatter", DIES, 1, marks=pytest.mark.slow),
        pytest.param("tp", "reduce_scatter", DIES, 0, marks=pytest.mark.slow),
        pytest.param("fsdp", "gather", RAISES, 0, marks=pytest.mark.slow),
        pytest.param("fsdp", "total", RAISES, 0, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_ends_the_others(
    folders: list[Path], mode: str, method: str, what: str, who: int
) -> None:
    """No need to wait for a time limit: the connection breaks."""
    script = faulty(folders[1], method, what, who, when=20 if method != "total" else 2)
    words = [*FILES, "--parallel.mode", mode, "--pgd_order", "skip", "--parallel.timeout", "500"]
    words += ["--parallel.shard_rows", "true"] if method == "total" else []
    ended = launch(folders, words, launcher=script)
    codes = [rank.code for rank in ended]
    assert codes[1 - who] == 4, ended
    assert codes[who] == (-signal.SIGKILL if what is DIES else 4)
    assert f"error: rank {1 - who}: another rank died or fell behind" in ended[1 - who].err
    assert all(rank.out == "" for rank in ended)
    results = folders[0] / "out.txt"
    assert not results.exists() or results.read_text() == "error\n"
    assert {path.name for path in folders[0].iterdir()} <= {
        "net.onnx",
        "sat.vnnlib",
        "unsat.vnnlib",
        "out.txt",
    }


@pytest.mark.parametrize("mode", ["fsdp", pytest.param("tp", marks=pytest.mark.slow)])
def test_a_rank_that_hangs_is_given_up(folders: list[Path], mode: str) -> None:
    script = faulty(folders[1], "gather" if mode == "fsdp" else "reduce_scatter", STOPS)
    words = [*FILES, "--parallel.mode", mode, "--pgd_order", "skip", "--parallel.timeout", "4"]
    ended = launch(folders, words, launcher=script, gone=[1])
    assert ended[0].code == 4, ended
    assert "rank 0: another rank died or fell behind (parallel.timeout 4 s)" in ended[0].err
    assert len(ended[0].err.splitlines()) == 1
    assert (folders[0] / "out.txt").read_text() == "error\n"


@pytest.mark.slow
def test_a_failure_in_a_batch_ends_the_batch(folders: list[Path]) -> None:
    """Rows after it are not tried: the ranks are out of step."""
    (folders[0] / "list.csv").write_text("net.onnx,unsat.vnnlib\n" * 3)
    script = faulty(folders[1], "gather", DIES, when=20)
    words = ["--csv_name", "list.csv", "--parallel.mode", "fsdp", "--pgd_order", "skip"]
    ended = launch(folders, words, launcher=script)
    assert ended[0].code == 4, ended
    assert not (folders[0] / "out_2.txt").exists()


def test_torchrun(folders: list[Path]) -> None:
    ended = torchrun(
        folders[0], ["--onnx_path", "net.onnx", "--vnnlib_path", "sat.vnnlib", "--parallel.mode", "tp"]
    )
    assert ended.code == 0, ended
    assert ended.out.startswith("verdict: sat ")
    first, _, witness = (folders[0] / "out.txt").read_text().partition("\n")
    assert first == "sat" and witness.count("X_") == 4
    assert load_vnnlib(folders[0] / "sat.vnnlib").num_inputs == 4


@pytest.mark.slow
def test_torchrun_when_a_rank_is_killed(folders: list[Path]) -> None:
    script = faulty(folders[1], "gather", DIES)
    words = [*FILES, "--parallel.mode", "fsdp", "--pgd_order", "skip"]
    ended = torchrun(folders[0], words, launcher=script)
    assert ended.code == 1
    results = folders[0] / "out.txt"
    assert not results.exists() or results.read_text() == "error\n"


@pytest.mark.slow
def test_more_ranks_than_neurons(tmp_path: Path) -> None:
    folders = [tmp_path / str(rank) for rank in range(4)]
    for folder in folders:
        folder.mkdir()
    mlp(folders[0] / "net.onnx", [2, 3, 1, 2])
    flow.write_property(folders[0] / "p.vnnlib", [(-1, 1)] * 2, 2, "(<= Y_0 -1000)")
    words = ["--onnx_path", "net.onnx", "--vnnlib_path", "p.vnnlib", "--parallel.mode", "tp"]
    ended = launch(folders, words)
    assert [rank.code for rank in ended] == [0] * 4, ended
    assert (folders[0] / "out.txt").read_text() == "unsat\n"


@pytest.mark.slow
def test_weights_that_are_no_numbers_are_never_unsat(folders: list[Path]) -> None:
    build = OnnxBuilder()
    x = build.input("x", [1, 4])
    weight = np.ones((3, 4))
    weight[1, 2] = np.nan
    h = build.op("Relu", build.op("Gemm", x, build.constant(weight), transB=1))
    build.output(build.gemm(h, 3, 2, name="y"), [1, 2])
    build.save(folders[0] / "net.onnx")
    flow.write_property(folders[0] / "unsat.vnnlib", BOX, 2, "(<= Y_0 -1000)")
    rows = "net.onnx,unsat.vnnlib\n"
    (folders[0] / "list.csv").write_text(rows)
    for mode in ("fsdp", "tp"):
        ended = launch(folders, ["--csv_name", "list.csv", "--parallel.mode", mode])
        assert ended[0].code == ended[1].code, ended
        assert (folders[0] / "out_0.txt").read_text() in ("unknown\n", "error\n")
