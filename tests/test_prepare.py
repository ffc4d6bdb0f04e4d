"""`abcrown-dist prepare` and runs with a graph cache: the same answers, cold and warm."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from abcrown_dist import cli
from abcrown_dist.graph import cache as cache_module
from abcrown_dist.problem import SharedConfirmer
from tests.models import mlp
from tests.parallel.ranks import launch

DIGITS = Path(__file__).resolve().parent.parent / "examples" / "digits"
MODEL = DIGITS / "digits_mlp.onnx"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The networks that caches set out to convert."""
    found: list[Path] = []
    original = cache_module.load_onnx

    def load(path: Path, *arguments: Any) -> Any:
        found.append(path)
        return original(path, *arguments)

    monkeypatch.setattr(cache_module, "load_onnx", load)
    return found


def files(kind: str) -> list[str]:
    return ["--onnx_path", str(MODEL), "--vnnlib_path", str(DIGITS / f"digits_mlp_{kind}.vnnlib")]


def verify(kind: str, *words: str) -> tuple[str, Any]:
    """Content of the results file, and all bounds."""
    quiet = ["--device", "cpu", "--progress", "none", "--summary_file", "out.json"]
    assert cli.main([*files(kind), *quiet, "--complete_verifier", "skip", *words]) == 0
    return Path("out.txt").read_text(), json.loads(Path("out.json").read_text())["bounds"]


@pytest.mark.parametrize("kind", ["crown", "false", "branching"])
def test_the_answer_depends_on_no_cache(folder: Path, conversions: list[Path], kind: str) -> None:
    """Verdict, witness and every digit of every bound."""
    plain = verify(kind)
    assert conversions == []
    cold = verify(kind, "--cache_onnx_conversion")
    assert conversions == [MODEL]
    warm = verify(kind, "--cache_onnx_conversion")
    assert conversions == [MODEL]
    assert plain == cold == warm
    assert plain[1] or kind == "false"


def test_without_being_asked_nothing_is_kept(folder: Path) -> None:
    verify("crown")
    assert not (folder / "xdg").exists()


@pytest.mark.parametrize("words", [[], ["--cache_dir", "here"]])
def test_what_is_prepared_is_not_converted_again(
    folder: Path, conversions: list[Path], capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert cli.main(["prepare", *files("crown"), *words]) == 0
    assert capsys.readouterr() == (f"converted: {MODEL}\n", "")
    assert conversions == [MODEL]
    assert not (folder / "out.txt").exists()
    place = folder / "here" if words else folder / "xdg" / "abcrown_dist"
    assert sorted(file.suffix for file in place.iterdir()) == [".compared", ".graph"]
    assert verify("crown", "--cache_onnx_conversion", *words)[0] == "unsat\n"
    assert conversions == [MODEL]


def test_a_batch_is_prepared_row_by_row(
    folder: Path, conversions: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    other = mlp(folder / "other.onnx", [64, 5, 10], seed=3)
    crown, false = (DIGITS / f"digits_mlp_{kind}.vnnlib" for kind in ("crown", "false"))
    rows = [(MODEL, crown), (folder / "none.onnx", crown), (MODEL, false), (other, crown)]
    (folder / "list.csv").write_text("\n".join(f"{model},{prop}" for model, prop in rows))
    assert cli.main(["prepare", "--csv_name", "list.csv"]) == 3
    out, err = capsys.readouterr()
    assert out == f"converted: {MODEL}\nconverted: {MODEL}\nconverted: {other}\n"
    assert len(err.splitlines()) == 1 and "1: " in err and "none.onnx: no such file" in err
    assert conversions == [MODEL, folder / "none.onnx", other]  # the second row's error comes from there


def test_what_cannot_be_prepared_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "bad.onnx").write_bytes(b"\0\1")
    words = ["--onnx_path", "bad.onnx", *files("crown")[2:]]
    assert cli.main(["prepare", *words]) == 3
    assert "not a readable ONNX file" in capsys.readouterr().err
    assert cli.main(["prepare"]) == 2


def test_no_home(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("abcrown_dist.problem.default_folder", homeless)
    assert verify("crown", "--cache_onnx_conversion")[0] == "unsat\n"
    assert "no graph cache: Could not determine home directory.; model.cache_dir" in capsys.readouterr().err


def test_only_the_first_rank_looks_into_the_cache(tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    cache = folders[0] / "cache"
    assert cli.main(["prepare", *files("crown"), "--cache_dir", str(cache)]) == 0
    (graph,) = cache.glob("*.graph")
    graph.write_bytes(graph.read_bytes()[:-1])
    words = [*files("crown"), "--cache_onnx_conversion", "--cache_dir", "cache", "--parallel.mode", "fsdp"]
    ended = launch(folders, words)
    assert [rank.code for rank in ended] == [0, 0], ended
    assert (folders[0] / "out.txt").read_text() == "unsat\n"
    assert "it is cut off" in ended[0].err and ended[1].err == ""
    assert len(list(cache.iterdir())) == 2
    assert not list(folders[1].iterdir())


class Judge:
    def confirm(self, x: np.ndarray, disjunct: int) -> None:
        return None


def test_the_judge_is_made_when_it_is_first_asked_and_kept() -> None:
    made: list[int] = []

    def make() -> Judge:
        made.append(1)
        return Judge()

    making: Callable[[], Any] = make
    confirmer = SharedConfirmer(making)
    assert made == []
    for _ in range(2):
        confirmer.confirm(np.zeros(1), 0)
        confirmer.release()
    assert made == [1]
