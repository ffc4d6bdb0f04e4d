"""Instances of a set, answers of other verifiers, and our runs: what `vnncomp.py` reads and compares."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

DECIDED = ("sat", "unsat")
Key = tuple[str, str]  # model and property, as the lists name them


@dataclass(frozen=True)
class Instance:
    """One line of a set's list.

    Attributes:
        number: of the line, from 0.
        family: its benchmark.
        key: names of model and property, see `key_of`.
        onnx, vnnlib: the files.
        expected: `sat`, `unsat`, or empty where nobody knows.
    """

    number: int
    family: str
    key: Key
    onnx: Path
    vnnlib: Path
    expected: str = ""


@dataclass(frozen=True)
class Answer:
    """What a verifier said, and the seconds of its whole process."""

    verdict: str
    seconds: float

    def solves(self, expected: str) -> bool:
        """Whether it decided, and not against what is known."""
        return self.verdict in DECIDED and expected in (self.verdict, "")

    def contradicts(self, other: str) -> bool:
        """Whether it and another verdict cannot both be right."""
        return {self.verdict, other} == set(DECIDED)


@dataclass(frozen=True)
class Peers:
    """Answers of other verifiers, by name; not every one has tried every instance."""

    names: Sequence[str] = ()
    answers: Mapping[Key, Mapping[str, Answer]] = field(default_factory=dict)
    expected: Mapping[Key, str] = field(default_factory=dict)

    def of(self, instance: Instance) -> Mapping[str, Answer]:
        return self.answers.get(instance.key, {})


@dataclass(frozen=True)
class Run:
    """One of our processes: its answer, and what its summary tells.

    Attributes:
        instance, answer: what was run; the verdict is `killed` where the process had to be.
        reason: what decided, or what went wrong.
        domains: that branch and bound visited; None where no summary was written.
        phases: seconds of the phases inside the process.
        peak_rss_bytes: most memory of the process.
    """

    instance: Instance
    answer: Answer
    reason: str = ""
    domains: int | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    peak_rss_bytes: int | None = None

    @property
    def wrong(self) -> bool:
        return self.answer.contradicts(self.instance.expected)

    @property
    def solved(self) -> bool:
        return self.answer.solves(self.instance.expected)


def key_of(onnx: str, vnnlib: str) -> Key:
    """Names that do not tell a compressed file from a plain one."""
    return _plain(onnx), _plain(vnnlib)


def _plain(name: str) -> str:
    return Path(name.strip().removesuffix(".gz")).as_posix()


def read_set(folder: Path) -> list[Instance]:
    """Instances of a folder's instances.csv: columns onnx, vnnlib and more under a header, or VNN-COMP's
    three columns (onnx, vnnlib, timeout) without one. Paths are relative to the folder.

    Raises:
        ValueError: the list cannot be read, or a line names no model or no property.
    """
    path = folder / "instances.csv"
    rows = _rows(path)
    if not rows:
        raise ValueError(f"{path} lists no instance")
    if "onnx" not in rows[0]:
        named = [dict(zip(("onnx", "vnnlib", "timeout"), row, strict=False)) for row in rows]
    else:
        named = _named(path, rows)
    found = []
    for number, row in enumerate(named):
        onnx, vnnlib = row.get("onnx"), row.get("vnnlib")
        if not onnx or not vnnlib:
            raise ValueError(f"{path}: instance {number} needs a model and a property")
        family = row.get("benchmark") or folder.resolve().name
        expected = _verdict(row.get("expected", ""))
        key = key_of(onnx, vnnlib)
        found.append(Instance(number, family, key, folder / onnx, folder / vnnlib, expected))
    return found


def read_peers(path: Path) -> Peers:
    """Answers of other verifiers: columns onnx, vnnlib, expected, NAME_verdict, NAME_seconds, ...

    Raises:
        ValueError: the file cannot be read, or lacks a column.
    """
    rows = _rows(path)
    header = rows[0] if rows else []
    names = [column.removesuffix("_verdict") for column in header if column.endswith("_verdict")]
    needed = ["onnx", "vnnlib", *(f"{name}_seconds" for name in names)]
    if missing := [column for column in needed if column not in header]:
        raise ValueError(f"{path} has no column {', '.join(missing)}")
    if not names:
        raise ValueError(f"{path} has no column that ends in _verdict")
    answers: dict[Key, dict[str, Answer]] = {}
    expected: dict[Key, str] = {}
    for row in _named(path, rows):
        key = key_of(row["onnx"], row["vnnlib"])
        tried = [name for name in names if row[f"{name}_verdict"]]
        answers[key] = {
            name: Answer(row[f"{name}_verdict"], _seconds(path, row[f"{name}_seconds"])) for name in tried
        }
        expected[key] = _verdict(row.get("expected", ""))
    return Peers(names, answers, expected)


def with_expected(instances: Sequence[Instance], peers: Peers) -> list[Instance]:
    """The instances, with the verdicts that the peers' file expects where the list knows none.

    Raises:
        ValueError: the two contradict each other, or the peers' file is of another set.
    """
    if peers.names and not any(instance.key in peers.answers for instance in instances):
        raise ValueError("the peers' file names none of these instances")
    found = []
    for instance in instances:
        theirs = peers.expected.get(instance.key, "")
        if {theirs, instance.expected} == set(DECIDED):
            name = " ".join(instance.key)
            raise ValueError(f"{name}: the list expects {instance.expected}, the peers' file {theirs}")
        found.append(replace(instance, expected=instance.expected or theirs))
    return found


def choose(
    instances: Sequence[Instance], families: Sequence[str] | None, numbers: Sequence[int] | None
) -> list[Instance]:
    """Those of the given families and numbers, in the order of the list.

    Raises:
        ValueError: a family or a number that there is not, or nothing is left.
    """
    known = sorted({instance.family for instance in instances})
    if unknown := sorted(set(families or ()) - set(known)):
        raise ValueError(f"no family {', '.join(unknown)}: there are {', '.join(known)}")
    if beyond := [number for number in numbers or () if not 0 <= number < len(instances)]:
        raise ValueError(f"no instance {beyond[0]}: the list has {len(instances)}, counted from 0")
    chosen = [
        instance
        for instance in instances
        if (families is None or instance.family in families)
        and (numbers is None or instance.number in numbers)
    ]
    if not chosen:
        raise ValueError("no instance is of these families and numbers")
    return chosen


def _rows(path: Path) -> list[list[str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            rows = [[cell.strip() for cell in row] for row in csv.reader(stream)]
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    return [row for row in rows if any(row)]


def _named(path: Path, rows: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    header, *body = rows
    for row in body:
        if len(row) != len(header):
            raise ValueError(f"{path}: {len(row)} cells under {len(header)} columns: {','.join(row)}")
    return [dict(zip(header, row, strict=True)) for row in body]


def _verdict(text: str) -> str:
    """`sat`, `unsat`, or empty for whatever else a list says of what is not known."""
    return text if text in DECIDED else ""


def _seconds(path: Path, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"{path}: not a number of seconds > 0: {text!r}")
    return seconds
