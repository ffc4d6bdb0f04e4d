"""The plot of branch and bound."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from abcrown_dist.report.plot import check_plot, draw, write_plot
from abcrown_dist.util.errors import ConfigError
from tests.report.rounds import Round, proof

pytest.importorskip("matplotlib")


def test_it_shows_the_bounds_and_the_open_domains() -> None:
    rounds = proof(12, 40)
    bound, domains = draw(rounds, "net, prop: unsat").axes
    worst, zero = bound.get_lines()
    assert list(np.asarray(worst.get_xdata())) == [found.seconds for found in rounds]
    shown = np.asarray(worst.get_ydata())
    assert np.isnan(shown[-1])  # nothing is open at the end
    assert list(shown[:-1]) == [found.worst for found in rounds[:-1]]
    assert set(np.asarray(zero.get_ydata())) == {0.0}
    (count,) = domains.get_lines()
    assert list(np.asarray(count.get_ydata())) == [found.open for found in rounds]
    lower, upper = bound.get_ylim()
    assert lower < rounds[0].worst and upper > 0
    assert (bound.yaxis.get_label_position(), domains.yaxis.get_label_position()) == ("left", "right")


@pytest.mark.parametrize(("most_open", "scale"), [(40, "linear"), (90_000, "symlog")])
def test_many_domains_need_a_logarithm_that_has_a_zero(most_open: int, scale: str) -> None:
    _, domains = draw(proof(300, most_open), "").axes
    assert domains.get_yscale() == scale
    assert domains.get_ylim()[0] == 0
    assert domains.get_ylim()[1] > most_open


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("b.PDF", b"%PDF"), ("c", b"\x89PNG")])
def test_the_suffix_names_the_format(tmp_path: Path, name: str, magic: bytes) -> None:
    path = tmp_path / "new" / name
    check_plot(path)
    assert not path.parent.exists()
    write_plot(path, proof(5, 10), "title")
    assert path.read_bytes().startswith(magic)
    assert [file.name for file in path.parent.iterdir()] == [name]


def test_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    title = r"net & $\no_formula$: unsat"
    write_plot(path, proof(1234, 5000), title)
    first = path.read_text()
    assert title.replace("&", "&amp;") in first
    for text in ("worst lower bound", "open domains", "seconds since the run began"):
        assert text in first
    assert "rounds: 1,234" in first and "domains visited: 2,468" in first
    write_plot(path, proof(1234, 5000), title)
    assert path.read_text() == first  # the same run, the same file


@pytest.mark.parametrize(
    "rounds",
    [
        [],
        [Round(1.0, 1, 2, 0, 3, -0.5, 1, 64)],
        proof(1, 1),
        [Round(1.0, 1, 2, 0, 3, -np.inf, 1, 64), Round(2.0, 2, 2, 0, 3, np.nan, 1, 64)],
        proof(5000, 2_000_000),
    ],
    ids=["none", "one", "one without bound", "no finite bound", "many"],
)
@pytest.mark.filterwarnings("error")
def test_no_run_is_too_odd_to_plot(tmp_path: Path, rounds: list[Round]) -> None:
    path = tmp_path / "plot.svg"
    write_plot(path, rounds, "a title of many words, " * 30)
    assert ("no round of branch and bound" in path.read_text()) == (not rounds)


@pytest.mark.parametrize("name", ["plot.docx", "plot.txt", "out.png/below"])
def test_a_plot_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path, name: str) -> None:
    (tmp_path / "out.png").write_text("a file")
    with pytest.raises(ConfigError, match=r"must end in one of .*\.png|cannot write"):
        check_plot(tmp_path / name)


def test_without_matplotlib_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Missing(), *sys.meta_path])
    with pytest.raises(ConfigError, match=r"not installed: pip install 'abcrown_dist\[plot\]'"):
        check_plot("plot.png")


class _Missing:
    """Finds no matplotlib."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name="matplotlib")


def test_runs_without_a_plot_do_not_import_matplotlib() -> None:
    code = "import sys, abcrown_dist.report.plot; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("worst", [math.nan, -math.inf, -3e38])
def test_bounds_that_no_axis_holds_are_a_gap(tmp_path: Path, worst: float) -> None:
    rounds = [dataclasses.replace(proof(12, 40)[0], worst=worst)]
    write_plot(tmp_path / "course.png", rounds, "title")
    assert (tmp_path / "course.png").stat().st_size > 0


def test_other_kinds_of_files_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must end in one of .pdf, .png, .svg"):
        check_plot(tmp_path / "course.jpg")
