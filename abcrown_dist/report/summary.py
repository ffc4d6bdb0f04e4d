"""The JSON summary of one instance: the verdict and what it took to reach it."""

from __future__ import annotations

import dataclasses
import enum
import importlib.metadata
import json
import math
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from abcrown_dist.report.files import write_whole
from abcrown_dist.spec.property import Verdict
from abcrown_dist.util.resident import peak_rss_bytes

_PACKAGES = ("torch", "onnx", "onnx2pytorch", "onnxruntime", "numpy")
_MOST_ROUNDS = 2000  # that a summary or a plot holds: more than a screen has columns
_ROUND = ("seconds", "number", "open", "verified", "visited", "worst", "depth", "memory")


@dataclass(frozen=True)
class ClauseBound:
    """What is known of one disjunct of the property.

    Attributes:
        disjunct: its index.
        lower: lower bounds of C y + D x - rhs over its box, one per constraint; the disjunct is
            refuted when one of them is positive beyond doubt.
        refuted: whether it is.
        method: which bound method gave the bounds.
    """

    disjunct: int
    lower: Sequence[float]
    refuted: bool
    method: str = ""


class Round(Protocol):
    """State of branch and bound after one round. This part reads it and does not care who made it.

    Attributes:
        seconds: since the run began.
        number: of the round, from 1.
        open, verified, visited: domains that wait, that were proved, and that were bounded so far.
        worst: worst lower bound minus right-hand side among open domains; it rises to 0 as proof goes on.
        depth: most splits of a domain.
        memory: bytes of the open domains.
    """

    @property
    def seconds(self) -> float: ...
    @property
    def number(self) -> int: ...
    @property
    def open(self) -> int: ...
    @property
    def verified(self) -> int: ...
    @property
    def visited(self) -> int: ...
    @property
    def worst(self) -> float: ...
    @property
    def depth(self) -> int: ...
    @property
    def memory(self) -> int: ...


@dataclass(frozen=True)
class Summary:
    """All that is reported of one instance.

    Attributes:
        verdict, reason: the answer, and in a few words what decided it.
        instance: what was verified, e.g. the paths of network and property.
        bounds: per disjunct.
        domains: how many branch and bound visited.
        seconds: wall time per phase, and `total`.
        memory: peak bytes, see `peak_memory`.
        versions: of Python and the packages that matter, see `versions`.
        seed: of all random choices.
        config: the whole configuration of the run.
        rounds: of branch and bound; empty where bounds or the attack decided.
        waited: seconds that each rank spent in collectives; empty for one process.
    """

    verdict: Verdict
    reason: str
    instance: Mapping[str, Any] = field(default_factory=dict)
    bounds: Sequence[ClauseBound] = ()
    domains: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, int | None] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    seed: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    rounds: Sequence[Round] = ()
    waited: Sequence[float] = ()


def peak_memory() -> dict[str, int | None]:
    """Peak bytes of this process so far: resident memory, and CUDA allocations (None without CUDA)."""
    torch = sys.modules.get("torch")
    cuda = torch.cuda.max_memory_allocated() if torch is not None and torch.cuda.is_initialized() else None
    return {"peak_rss_bytes": peak_rss_bytes(), "peak_cuda_bytes": cuda}


def versions() -> dict[str, str]:
    """Versions of Python, of this package and of those that decide on results, as far as installed."""
    found = {"python": platform.python_version()}
    for package in ("abcrown_dist", *_PACKAGES):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def thin(rounds: Sequence[Round], most: int = _MOST_ROUNDS) -> list[Round]:
    """At most `most` (2 or more) of the rounds, evenly spaced, the first and the last among them."""
    if len(rounds) <= most:
        return list(rounds)
    last = len(rounds) - 1
    return [rounds[i * last // (most - 1)] for i in range(most)]


def columns(rounds: Sequence[Round]) -> dict[str, list[Any]]:
    """The rounds by column, thinned out, every column there even if empty."""
    kept = thin(rounds)
    return {name: [getattr(found, name) for found in kept] for name in _ROUND}


def to_json(value: Any) -> Any:
    """`value` in types that JSON has. Numbers that are not finite become "inf", "-inf", "nan"."""
    if isinstance(value, enum.Enum):
        return to_json(value.value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_json(getattr(value, item.name)) for item in dataclasses.fields(value)}
    return _collection_to_json(value)


def _collection_to_json(value: Any) -> Any:
    tolist = getattr(value, "tolist", None)  # arrays, tensors and their scalars
    if callable(tolist):
        return to_json(tolist())
    if isinstance(value, (Sequence, set, frozenset)):
        return [to_json(item) for item in value]
    return str(value)


def write_summary(path: str | Path, summary: Summary) -> None:
    """Write a summary as JSON, the rounds by column (see `columns`).

    Raises:
        ConfigError: the file cannot be written.
    """
    write_whole(path, _format(summary))


def _format(summary: Summary) -> str:
    """JSON text, indented, but each column of the rounds on one line: a person still finds the rest."""
    fields = {item.name: getattr(summary, item.name) for item in dataclasses.fields(summary)}
    rounds = to_json(columns(fields.pop("rounds")))
    head = json.dumps(to_json(fields), indent=2, allow_nan=False).removesuffix("\n}")
    lines = [f'    "{name}": {json.dumps(column, allow_nan=False)}' for name, column in rounds.items()]
    return head + ',\n  "rounds": {\n' + ",\n".join(lines) + "\n  }\n}\n"
