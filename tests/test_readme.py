"""What the README and the documents say, as far as a machine can check it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from abcrown_dist.bounds.settings import METHODS
from abcrown_dist.config.arguments import build_parser
from abcrown_dist.config.keys import all_keys
from abcrown_dist.config.plan_request import build_plan_parser

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands() -> list[list[str]]:
    """Words of every indented line that is a command, in the order of the README."""
    text = re.sub(r"```.*?```", "", README, flags=re.S)
    lines = re.findall(r"^    (\S.*)$", re.sub(r"\\\n\s+", "", text), flags=re.M)
    return [shlex.split(line) for line in lines if line.startswith(("make ", ".venv/", "vnncomp_scripts/"))]


def tables() -> Iterator[list[str]]:
    """First column of every table: its header, then its rows."""
    for table in re.findall(r"(?:^\|.*\n)+", README, flags=re.M):
        yield [row.split("|")[1].strip() for row in table.splitlines() if not row.startswith("|---")]


def test_the_python_example_runs_and_says_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    (shown,) = re.findall(r"^print\(.*\)  # (\w+)$", code, flags=re.M)
    assert capsys.readouterr().out == f"{shown}\n"
    lower, upper = names["lower"], names["upper"]
    assert tuple(lower.shape) == tuple(upper.shape) == (1, 1)  # type: ignore[attr-defined]
    assert bool((lower < upper).all())  # type: ignore[operator]


def test_the_main_commands_stand_first() -> None:
    assert commands()[:3] == [
        ["make", "install"],
        [".venv/bin/abcrown-dist", "--config", "digits_mlp.yaml"],
        ["make", "test"],
    ]


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    mentioned = {words[1] for words in commands() if words[0] == "make"}
    mentioned |= set(re.findall(r"`make ([\w-]+)`", README))
    assert mentioned
    assert mentioned <= targets


def test_options_and_configurations_exist() -> None:
    options = set(build_parser()._option_string_actions) | set(build_plan_parser()._option_string_actions)
    mentioned = set(re.findall(r"`(--[\w.-]+)", README))
    for words in commands():
        if words[:1] == [".venv/bin/abcrown-dist"]:
            mentioned |= {word for word in words if word.startswith("--")}
            for option, value in pairwise(words):
                assert option != "--config" or (ROOT / "configs" / value).is_file(), value
    placeholders = {"--section.key"}
    torchrun = {"--nproc_per_node"}
    assert mentioned
    assert mentioned - placeholders - torchrun <= options


def test_scripts_exist_and_get_the_words_that_they_want() -> None:
    scripts = [words for words in commands() if words[0].startswith("vnncomp_scripts/")]
    assert len(scripts) == 3
    for name, *arguments in scripts:
        (usage,) = re.findall(r'echo "usage: (.*?)"', (ROOT / name).read_text())
        assert len(arguments) == len(usage.split()) - 1, name


def test_keys_and_their_defaults() -> None:
    (table,) = re.findall(r"^\| key \| default .*\n\|---.*\n((?:\|.*\n)+)", README, flags=re.M)
    for row in table.splitlines():
        name, default = (cell.strip().strip("`") for cell in row.split("|")[1:3])
        value = all_keys()[name].default
        texts = {None: "null", True: "true", False: "false"}
        known = texts[value] if value is None or isinstance(value, bool) else str(value)
        assert default == known or float(default) == float(value), name


def test_every_bound_method_is_explained() -> None:
    (names,) = [rows for rows in tables() if rows[0] == "method"]
    mentioned = {name for row in names[1:] for name in re.findall(r"`([^`]+)`", row)}
    offered = set(all_keys()["solver.bound_prop_method"].kind.metavar.split("|"))
    assert mentioned == offered
    assert offered - {"auto"} <= set(METHODS)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (document.parent / target).exists(), target
    for path in re.findall(r"`((?:abcrown_dist|tests|configs|benchmarks|docs)/[\w/.-]+)`", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_tests_that_are_named_exist(document: Path) -> None:
    """As `tests/bounds/test_alpha.py::test_name`."""
    for path, name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", document.read_text(encoding="utf-8")):
        assert f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


def test_benchmark_commands_name_scripts_and_options_that_exist() -> None:
    found = [words[1:] for words in commands() if words[0] == ".venv/bin/python"]
    assert found
    for script, *arguments in found:
        text = (ROOT / script).read_text()
        assert all(f'"{word}"' in text for word in arguments if word.startswith("--")), script
