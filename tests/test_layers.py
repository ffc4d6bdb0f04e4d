"""Imports run one way, and no file grows beyond reading: the architecture as a test."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "abcrown_dist"
MAX_LINES = 420

# What each part may import. A lower layer never learns of a higher one.
ALLOWED: dict[str, set[str]] = {
    "util": set(),
    "config": {"util"},
    "graph": {"util"},
    "spec": {"util"},
    "relax": {"util"},
    "parallel": {"config", "util"},
    "weights": {"graph", "parallel", "config", "util"},
    "bounds": {"graph", "weights", "relax", "util"},
    "attack": {"graph", "weights", "spec", "util"},
    "exact": {"graph", "weights", "relax", "spec", "util"},
    "bab": {"bounds", "exact", "graph", "relax", "weights", "spec", "parallel", "util"},
    "report": {"spec", "util"},
    "interop": {"bounds", "graph", "weights", "relax", "parallel", "util"},
    "options": {"attack", "bab", "bounds", "config", "spec", "weights"},
    "programs": {"bab", "bounds", "exact", "spec", "util", "weights"},
    "outcome": {"bab", "report", "spec"},
    "boxes": {"bab", "bounds", "problem", "util", "weights"},
    "bookmark": {
        *("bab", "bounds", "config", "options", "outcome", "parallel", "problem"),
        *("report", "util", "weights"),
    },
    "branching": {
        *("attack", "bab", "bookmark", "boxes", "options", "outcome", "problem"),
        *("util", "weights"),
    },
    "flow": {
        *("attack", "bab", "bookmark", "bounds", "boxes", "branching", "config", "options"),
        *("outcome", "problem", "programs", "report", "spec", "util", "weights"),
    },
    "verify": {
        *("bookmark", "config", "flow", "options", "outcome", "parallel", "problem"),
        *("report", "spec", "util"),
    },
    "plan": {"bab", "bounds", "config", "graph", "options", "spec", "util", "weights"},
    "problem": {"attack", "bab", "config", "graph", "parallel", "plan", "relax", "spec", "util", "weights"},
    "api": {
        *("attack", "bounds", "config", "graph", "problem", "relax"),
        *("report", "spec", "util", "verify", "weights"),
    },
    "session": {
        *("config", "graph", "outcome", "parallel", "plan", "problem", "relax"),
        *("report", "spec", "util", "verify"),
    },
    "cli": {"session", "config", "parallel", "util"},
    "__main__": {"cli", "util"},
    "__init__": set(),
}


def part_of(path: Path, package: Path) -> str:
    """Folder or module directly below the package that `path` belongs to."""
    return path.relative_to(package).parts[0].removesuffix(".py")


def imported_modules(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import, lazy ones and those for type checkers included."""
    here = [package.name, *path.relative_to(package).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*here[: len(here) - node.level + 1]] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def imported_parts(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Line and part of every import from the package's own parts; names of its root (version) are free."""
    for line, module in imported_modules(path, package):
        words = module.split(".")
        if words[0] != package.name or len(words) < 2:
            continue
        below = package / words[1]
        if below.is_dir() or below.with_suffix(".py").is_file():
            yield line, words[1]


def violations(package: Path) -> list[str]:
    """Imports against the table, each as "FILE:LINE: what imports what"."""
    found = []
    for path in sorted(package.rglob("*.py")):
        part = part_of(path, package)
        if part not in ALLOWED:
            found.append(f"{path}: {part} has no row in the table of layers")
            continue
        found += [
            f"{path}:{line}: {part} must not import {other}"
            for line, other in imported_parts(path, package)
            if other != part and other not in ALLOWED[part]
        ]
    return found


def test_imports_run_one_way() -> None:
    assert violations(ROOT / PACKAGE) == []


def test_no_file_is_too_long() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / PACKAGE).rglob("*.py")}
    assert lengths
    assert {path: lines for path, lines in lengths.items() if lines > MAX_LINES} == {}


def test_every_folder_is_a_package() -> None:
    """Without an __init__.py a folder works in the checkout but is missing from an installed copy."""
    folders = {path.parent for path in (ROOT / PACKAGE).rglob("*.py")}
    assert {folder for folder in folders if not (folder / "__init__.py").is_file()} == set()


def test_the_table_has_no_cycles() -> None:
    ranks: dict[str, int] = {}

    def rank(part: str, above: tuple[str, ...]) -> int:
        assert part not in above, f"cycle: {' -> '.join((*above, part))}"
        if part not in ranks:
            ranks[part] = 1 + max((rank(below, (*above, part)) for below in ALLOWED[part]), default=0)
        return ranks[part]

    assert all(rank(part, ()) for part in ALLOWED)


@pytest.mark.parametrize(
    "statement",
    [
        "import abcrown_dist.spec.property",
        "from abcrown_dist import spec",
        "from abcrown_dist.spec import property",
        "from ..spec.property import Box",
        "from .. import spec",
        "def late():\n    from abcrown_dist.spec.property import Box",
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, statement: str) -> None:
    package = tmp_path / PACKAGE
    for part in ("graph", "spec", "util"):
        (package / part).mkdir(parents=True)
    (package / "graph" / "ir.py").write_text(f"import torch\nimport abcrown_dist.util.errors\n{statement}\n")
    (found,) = violations(package)
    assert "ir.py:" in found
    assert "graph must not import spec" in found


def test_an_unknown_part_is_found(tmp_path: Path) -> None:
    (tmp_path / PACKAGE / "misc").mkdir(parents=True)
    (tmp_path / PACKAGE / "misc" / "a.py").write_text("")
    (found,) = violations(tmp_path / PACKAGE)
    assert "misc has no row" in found
