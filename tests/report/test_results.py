"""Results and counterexample files."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from abcrown_dist.report.files import write_whole
from abcrown_dist.report.results import write_counterexample, write_results
from abcrown_dist.spec.property import Verdict, Witness
from abcrown_dist.util.errors import ConfigError

WITNESS = Witness([Decimal("0.10"), Decimal("-1E-7")], [1.5, -0.1, 1e-30], 0)
TEXT = "((X_0 0.10)\n (X_1 -1E-7)\n (Y_0 1.5)\n (Y_1 -0.1)\n (Y_2 1e-30))\n"


@pytest.mark.parametrize("verdict", [verdict for verdict in Verdict if verdict is not Verdict.SAT])
def test_a_verdict_alone(tmp_path: Path, verdict: Verdict) -> None:
    path = tmp_path / "new" / "folders" / "out.txt"
    write_results(path, verdict)
    assert path.read_text() == f"{verdict.value}\n"


def test_sat_with_its_witness(tmp_path: Path) -> None:
    write_results(tmp_path / "out.txt", Verdict.SAT, WITNESS)
    assert (tmp_path / "out.txt").read_text() == "sat\n" + TEXT
    write_counterexample(tmp_path / "cex.txt", WITNESS)
    assert (tmp_path / "cex.txt").read_text() == TEXT


def test_the_checker_reads_back_what_was_confirmed(tmp_path: Path) -> None:
    """The competition's checker drops parentheses and splits at blanks."""
    write_results(tmp_path / "out.txt", Verdict.SAT, WITNESS)
    words = (tmp_path / "out.txt").read_text().replace("(", " ").replace(")", " ").split()[1:]
    read = dict(zip(words[::2], map(float, words[1::2]), strict=True))
    assert read == {"X_0": 0.1, "X_1": -1e-7, "Y_0": 1.5, "Y_1": -0.1, "Y_2": 1e-30}


def test_sat_and_witness_belong_together(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="verdict sat without a witness"):
        write_results(tmp_path / "out.txt", Verdict.SAT)
    with pytest.raises(ValueError, match="verdict unsat with a witness"):
        write_results(tmp_path / "out.txt", Verdict.UNSAT, WITNESS)
    assert not list(tmp_path.iterdir())


def test_files_are_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.txt"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with pytest.raises(ConfigError, match=r"cannot write '.*out.txt': No space left on device"):
            write_whole(path, "new")
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["out.txt"]
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert [item.name for item in tmp_path.iterdir()] == ["out.txt"]


def test_files_have_the_usual_permissions_and_links_stay(tmp_path: Path) -> None:
    (tmp_path / "usual").write_text("")
    write_whole(tmp_path / "out.txt", "")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("usual", "out.txt")}
    assert len(modes) == 1
    (tmp_path / "link").symlink_to("out.txt")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "out.txt").read_text() == "new"


def test_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True) as reader:
        write_results(pipe, Verdict.UNSAT)
        assert reader.communicate(timeout=20)[0] == "unsat\n"


def test_impossible_places(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "out.txt", tmp_path):
        with pytest.raises(ConfigError, match="cannot write") as caught:
            write_results(path, Verdict.UNSAT)
        assert str(path) in str(caught.value)
    assert [item.name for item in tmp_path.iterdir()] == ["file"]


def test_reports_import_neither_rich_nor_torch() -> None:
    modules = ["results", "summary", "progress", "table"]
    code = "".join(f"import abcrown_dist.report.{name}\n" for name in modules)
    code += "import sys; sys.exit(bool({'rich', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
