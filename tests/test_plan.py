"""The plan: what it foretells, recommends and says, its command, and `parallel.mode: auto`."""

from __future__ import annotations

import dataclasses
import io
import logging
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from abcrown_dist import cli
from abcrown_dist.bounds.forecast import Task
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.bounds.workspace import VECTORS
from abcrown_dist.config import Config
from abcrown_dist.graph.ir import Graph
from abcrown_dist.graph.load_onnx import load_onnx
from abcrown_dist.parallel.launch import World
from abcrown_dist.plan.capacity import Capacity, capacity
from abcrown_dist.plan.choose import choose, make_plan
from abcrown_dist.plan.predict import CHOICES, Plan, Work, predict
from abcrown_dist.plan.text import print_plan, size_text
from abcrown_dist.session import form_group
from abcrown_dist.spec.property import Property
from abcrown_dist.spec.vnnlib1 import load_vnnlib
from abcrown_dist.util.errors import ConfigError
from abcrown_dist.weights.fsdp import without_values
from tests import flow
from tests.bounds import zoo
from tests.models import mlp

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
WIDE = [64, 96, 96, 96, 8]


def planned(
    graph: Graph,
    size: int,
    memory: int = 1 << 40,
    *,
    method: str = "crown",
    rows: int = 1_000_000_000,
    prefetch: bool = False,
) -> Plan:
    """A plan of one box and eight rows."""
    settings = BoundSettings(method=method, batch_rows=rows, budget=1 << 40)
    work = Work((settings,), Task(domains=1, rows=8, varying=graph.input_size))
    return predict(graph, work, size, prefetch, Capacity(memory, memory, "a test"))


def needs(plan: Plan) -> dict[str, int]:
    """Peak by choice."""
    return {str(option.choice): option.needs.peak for option in plan.options}


@pytest.fixture
def wide(tmp_path: Path) -> Graph:
    return load_onnx(mlp(tmp_path / "net.onnx", WIDE)).graph


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A network of four layers and a property of eight rows around it."""
    prop = flow.write_property(tmp_path / "p.vnnlib", [(0, 1)] * WIDE[0], WIDE[-1], "(<= Y_0 Y_1)")
    return mlp(tmp_path / "net.onnx", WIDE), prop


def loaded(files: tuple[Path, Path]) -> tuple[Graph, Property]:
    return load_onnx(files[0]).graph, load_vnnlib(files[1])


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """No handler of an earlier run of the program, and none left behind."""
    log = logging.getLogger("abcrown_dist")
    before, log.handlers = (log.handlers, log.level), []
    yield
    log.handlers = before[0]
    log.setLevel(before[1])


# What is foretold.


def test_shapes_are_enough(wide: Graph) -> None:
    assert needs(planned(without_values(wide), 4)) == needs(planned(wide, 4))


def test_weights_are_shared_out(wide: Graph) -> None:
    """Each rank has its share; padding and ragged rows add less than a row of every weight."""
    for size in (2, 3, 7):
        whole, *shared = planned(wide, size).options
        for option in shared:
            share = whole.needs.weights / size
            assert share <= option.needs.weights <= share + 4 * sum(WIDE)


def test_more_ranks_never_need_more(wide: Graph) -> None:
    found = [needs(planned(wide, size)) for size in (2, 4, 8)]
    for fewer, more in pairwise(found):
        assert all(more[choice] <= fewer[choice] for choice in fewer)
        assert more["tp"] < fewer["tp"]


def test_rows_and_prefetch(wide: Graph) -> None:
    plain, ahead = (planned(wide, 2, rows=16, prefetch=prefetch) for prefetch in (False, True))
    layer = 4 * 96 * 97
    assert plain.options[2].needs.gather == layer
    assert ahead.options[2].needs.gather == 2 * layer
    assert plain.options[2].needs.peak < ahead.options[2].needs.peak <= plain.options[2].needs.peak + layer
    unlimited = planned(wide, 2)
    assert unlimited.options[2].needs.rows == 96
    assert plain.options[2].needs.rows <= 16
    assert plain.options[2].needs.coefficients < unlimited.options[2].needs.coefficients


def test_alpha_counts_slopes_moments_and_gradients(wide: Graph) -> None:
    plan = planned(wide, 2, method="alpha-crown", rows=24)
    alone, _, _, tensor_parallel = plan.options
    # From the last of three layers two are relaxed below; from the output, three with eight rows.
    assert alone.needs.alpha == 4 * 4 * (2 * 96) * 24
    assert tensor_parallel.needs.alpha == alone.needs.alpha // 2
    assert planned(wide, 2).options[0].needs.alpha == 0


@pytest.mark.parametrize(
    "method", ["ibp", "crown-ibp", "crown", "forward", "forward+backward", "alpha-crown"]
)
@pytest.mark.parametrize("name", zoo.NAMES)
def test_every_network_and_method(name: str, method: str) -> None:
    for option in planned(zoo.graph(name), 3, method=method).options:
        found = option.needs
        assert found.peak >= found.weights + found.state
        assert found.peak >= found.weights + max(found.gather, found.coefficients, found.alpha)
        assert found.peak <= found.weights + found.state + found.gather + found.coefficients + found.alpha + (
            4 * VECTORS * max(found.rows, 1) + 4 * zoo_weights(name)
        )


def zoo_weights(name: str) -> int:
    """An interval pass holds the magnitudes of a weight, too."""
    return sum(value.numel() for value in zoo.graph(name).constants.values())


# What is recommended.


def test_the_fastest_that_fits(wide: Graph) -> None:
    peaks = needs(planned(wide, 4, rows=16))
    order = [str(choice) for choice in CHOICES]
    for memory in sorted({int(peak / 0.9) + 1 for peak in peaks.values()}):
        found = planned(wide, 4, memory, rows=16).recommended()
        assert found is not None
        fitting = [choice for choice in order if peaks[choice] <= 0.9 * memory]
        assert str(found.choice) == fitting[0]
    assert planned(wide, 4, min(peaks.values()), rows=16).recommended() is None


def test_fewer_rows_where_nothing_fits(wide: Graph) -> None:
    memory = int(min(needs(planned(wide, 4)).values()) / 0.9) - 1024
    plan = planned(wide, 4, memory)
    assert plan.recommended() is None
    smaller = plan.with_fewer_rows()
    assert smaller is not None
    rows, option = smaller
    assert planned(wide, 4, memory, rows=rows).recommended() == option
    assert planned(wide, 4, memory, rows=2 * rows).recommended() is None
    assert planned(wide, 4, 1000).with_fewer_rows() is None


def test_the_memory_of_this_machine() -> None:
    room = capacity(CPU, 4)
    assert room.each == room.alone // 4 > 0
    assert "shared by 4 ranks" in room.source
    assert capacity(CPU, 4, 1000) == Capacity(1000, 1000, "--device-memory")


# What is said.


def said(plan: Plan) -> str:
    stream = io.StringIO()
    print_plan(plan, stream)
    return stream.getvalue()


def test_the_table(wide: Graph) -> None:
    text = said(planned(wide, 2))
    for choice in CHOICES:
        assert f"{choice} " in text
    assert text.count("yes") == len(CHOICES)
    assert "recommended: one process (parallel.mode none)" in text


def test_replicated_operations_are_named() -> None:
    text = said(planned(zoo.graph("sliced"), 2))
    assert "tp gathers for, and computes on every rank: " in text
    assert "permute" in text
    assert "computes on every rank" not in said(planned(zoo.graph("mlp"), 2))


def test_what_to_do_where_nothing_fits(wide: Graph) -> None:
    memory = int(min(needs(planned(wide, 4)).values()) / 0.9) - 1024
    text = said(planned(wide, 4, memory))
    assert "recommended: parallel.mode tp and solver.crown.batch_size 64: as it is no mode fits" in text
    assert "recommended: more ranks" in said(planned(wide, 4, 1000))


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (12_900_000, "12.3 MiB"), (24 << 30, "24.0 GiB")],
)
def test_sizes(count: int, text: str) -> None:
    assert size_text(count) == text


# The command.


def command(files: tuple[Path, Path], *words: str) -> list[str]:
    onnx, vnnlib = files
    given = ["--onnx_path", str(onnx), "--vnnlib_path", str(vnnlib), "--device", "cpu"]
    return ["plan", *given, *words]


def test_the_command(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(command(files, "--world-size", "4", "--device-memory", "24GiB")) == 0
    text = capsys.readouterr().out
    assert "init-crown, alpha-crown; at once: 1 box(es), 1 row(s)" in text
    assert "on each of 4 rank(s), with 24.0 GiB (--device-memory):" in text
    assert "recommended:" in text


def test_cuda_need_not_be_here(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(command(files, "--device", "cuda", "--world-size", "2", "--device-memory", "1GiB")) == 0
    assert "1.00 GiB" in capsys.readouterr().out


def test_ordinary_settings_count(files: tuple[Path, Path]) -> None:
    graph, prop = loaded(files)
    small, double, none = (
        make_plan(flow.configure(*files, *words), graph, prop, 2, CPU)
        for words in (
            ["--solver.crown.batch_size", "8"],
            ["--double_fp"],
            ["--general.enable_incomplete_verification", "false"],
        )
    )
    assert small.options[0].needs.rows == 8
    assert double.options[0].needs.weights == 2 * small.options[0].needs.weights
    assert none.options[0].needs.peak == none.options[0].needs.weights
    assert "bounds: none are computed" in said(none)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "plan needs --world-size P"),
        (["--world-size", "0"], "--world-size: expected a whole number >= 1, got 0"),
        (["--world-size", "two"], "--world-size: expected a whole number >= 1, got 'two'"),
        (["--world-size", "2", "--device-memory", "much"], "--device-memory: expected a size > 0 in bytes"),
        (["--world-size", "2", "--frobnicate"], "--frobnicate"),
        (["--world-size"], "--world-size"),
    ],
)
def test_wrong_words(
    files: tuple[Path, Path], words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command(files, *words)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_csv_cannot_be_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--world-size", "2", "--csv_name", str(tmp_path / "list.csv")]) == 2
    assert "general.csv_name cannot be planned" in capsys.readouterr().err


def test_a_missing_model(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    files[0].unlink()
    assert cli.main(command(files, "--world-size", "2")) == 3
    assert "net.onnx" in capsys.readouterr().err


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from abcrown_dist import cli; code = cli.main(['plan', '--help']);"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "--world-size" in done.stdout and "--device-memory" in done.stdout


# parallel.mode: auto.


def auto(files: tuple[Path, Path], *words: str) -> Config:
    return flow.configure(*files, "--parallel.mode", "auto", *words)


def test_auto_takes_what_the_plan_recommends(
    files: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "abcrown_dist"):
        settled = choose(auto(files), *loaded(files), 4, CPU)
    assert settled.parallel == dataclasses.replace(auto(files).parallel, mode="fsdp", shard_rows=True)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("parallel.mode: auto takes fsdp + shard_rows (")


def test_auto_goes_by_memory(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    peaks = needs(make_plan(auto(files), *loaded(files), 4, CPU))
    assert peaks["tp"] < peaks["fsdp + shard_rows"]

    def settle(memory: int) -> str:
        room = Capacity(memory, memory, "a test")
        monkeypatch.setattr("abcrown_dist.plan.choose.capacity", lambda device, ranks: room)
        return choose(auto(files), *loaded(files), 4, CPU).parallel.mode

    caplog.set_level(logging.WARNING, "abcrown_dist")
    assert settle(2 * peaks["fsdp + shard_rows"]) == "fsdp"
    assert settle(int(peaks["tp"] / 0.9) + 1) == "tp"
    assert not caplog.records
    assert settle(peaks["tp"] // 2) == "tp"  # the least of all, with a warning
    (line,) = [record.getMessage() for record in caplog.records]
    assert "do not fit into" in line


def test_auto_keeps_to_shard_rows_where_it_is_set(files: tuple[Path, Path]) -> None:
    plan = choose(auto(files, "--parallel.shard_rows", "true"), *loaded(files), 2, CPU)
    assert (plan.parallel.mode, plan.parallel.shard_rows) == ("fsdp", True)


@pytest.mark.parametrize("mode", ["none", "fsdp", "tp"])
def test_other_modes_stay(files: tuple[Path, Path], mode: str) -> None:
    config = flow.configure(*files, "--parallel.mode", mode)
    assert choose(config, *loaded(files), 4, CPU) is config


def test_auto_on_one_process(files: tuple[Path, Path]) -> None:
    assert choose(auto(files), *loaded(files), 1, CPU).parallel.mode == "auto"
    flow.run(*files, "--parallel.mode", "auto", "--pgd_order", "skip")


def test_degrees_are_checked_before_ranks_meet(files: tuple[Path, Path]) -> None:
    config = flow.configure(*files, "--parallel.mode", "fsdp", "--parallel.shards", "3")
    with pytest.raises(ConfigError, match=r"parallel\.shards 3 times parallel\.domain 1 is not 2"):
        form_group(config, World(0, 2), None)
