"""What the parts of `bab_scaling.py` tell each other, its tables, and its targets."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

from sharding_targets import Target

MIB = 2**20
OWNERS = ("alpha", "beta", "bounds", "A", "weights", "domains", "other")
FASTER = 1.6  # domains per second on two ranks, to one
PEAK_SHARE = {2: 0.55, 4: 0.32}  # peak of a rank to that of one process, by number of ranks
_SAME_PEAK = 1.02  # fsdp's to that of mode none: ranks do not take the same domains to the last one

SPEED = (
    ("mode", 6), ("P", 3), ("rounds", 8), ("domains", 9), ("seconds", 9), ("domains/s", 11), ("to P=1", 8),
    ("lowest", 8), ("highest", 9), ("cpu", 8), ("waited", 0),
)  # fmt: skip
MEMORY = (
    ("batch", 7), ("mode", 6), ("P", 3), ("domains", 9), ("peak", 9), ("to P=1", 8),
    *((name, 9) for name in OWNERS), ("rss", 8), ("seconds", 9), ("waited", 0),
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What the ranks of one group do.

    Attributes:
        words: of the program's command line.
        metered: count live tensors, which takes time, instead of only taking it.
        limit: seconds after which the search gives up.
        folder: where each rank leaves its figures.
    """

    onnx: str
    vnnlib: str
    words: tuple[str, ...]
    metered: bool
    limit: float
    folder: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        values = json.loads(text)
        return cls(**{**values, "words": tuple(values["words"])})


@dataclass
class Figures:
    """One rank's figures of the search: seconds, bytes, and what all ranks bounded together.

    Attributes:
        cpu: the processor's seconds.
        waited: in collectives.
        worst: least margin of an open domain at the end.
        peak: of live tensors; 0 if they were not counted.
        owners: of the peak, by owner.
        rss: largest resident set of the process, libraries and loading included.
    """

    seconds: float = 0.0
    cpu: float = 0.0
    waited: float = 0.0
    domains: int = 0
    rounds: int = 0
    worst: float = 0.0
    peak: int = 0
    owners: dict[str, int] = field(default_factory=dict)
    rss: int = 0


@dataclass(frozen=True)
class Layout:
    """A mode on a number of ranks."""

    mode: str
    size: int

    def __str__(self) -> str:
        return f"{self.mode} P={self.size}"


ALONE = Layout("none", 1)
Runs = Mapping[Layout, Sequence[Sequence[Figures]]]  # by repetition, then by rank
Peaks = Mapping[Layout, Sequence[Figures]]  # by rank


def rate(ranks: Sequence[Figures]) -> float:
    """Domains per second of one run."""
    return ranks[0].domains / max(rank.seconds for rank in ranks)


def gains(runs: Runs, layout: Layout) -> list[float]:
    """Rates to that of one process in the same repetition; empty without one."""
    return [rate(own) / rate(base) for own, base in zip(runs[layout], runs.get(ALONE, []), strict=False)]


def largest(ranks: Sequence[Figures]) -> Figures:
    """The rank whose peak is highest."""
    return max(ranks, key=lambda rank: rank.peak)


def speed_cells(runs: Runs, layout: Layout) -> list[str]:
    """A line of the table of speed: medians over repetitions."""
    own, ratios = runs[layout], gains(runs, layout)
    first = own[0][0]
    waits = [median(run[rank].waited for run in own) for rank in range(layout.size)]
    return [
        layout.mode, str(layout.size), str(first.rounds), str(first.domains),
        f"{median(max(rank.seconds for rank in run) for run in own):.2f}",
        f"{median(map(rate, own)):.0f}",
        *(f"{pick(ratios):.2f}" if ratios else "" for pick in (median, min, max)),
        f"{median(sum(rank.cpu for rank in run) for run in own):.1f}",
        " ".join(f"{seconds:.2f}" for seconds in waits) if layout.size > 1 else "",
    ]  # fmt: skip


def memory_cells(batch: int, peaks: Peaks, layout: Layout) -> list[str]:
    """A line of the table of memory: MiB of the rank that has most."""
    ranks, alone = peaks[layout], peaks.get(ALONE)
    top = largest(ranks)
    return [
        str(batch), layout.mode, str(layout.size), str(top.domains), f"{top.peak / MIB:.1f}",
        f"{top.peak / largest(alone).peak:.3f}" if alone else "",
        *(f"{top.owners.get(name, 0) / MIB:.1f}" for name in OWNERS),
        f"{max(rank.rss for rank in ranks) / MIB:.0f}", f"{max(rank.seconds for rank in ranks):.1f}",
        " ".join(f"{rank.waited:.1f}" for rank in ranks) if layout.size > 1 else "",
    ]  # fmt: skip


def speed_targets(runs: Runs) -> Iterator[Target]:
    """That all did the same work, and that two ranks do it fast enough."""
    if ALONE not in runs:
        return
    alone = runs[ALONE][0][0]
    for layout, repetitions in runs.items():
        if layout.mode != "tp":
            first = repetitions[0][0]
            other = abs(first.domains - alone.domains) + (first.worst != alone.worst)
            yield Target(f"{layout}: domains or bounds that differ from those of P=1", other, 0)
    two = Layout("none", 2)
    if two in runs:
        gain = median(gains(runs, two))
        yield Target(f"{two}: time for the work of P=1 ({gain:.2f} times its rate)", 1 / gain, 1 / FASTER)


def memory_targets(batch: int, peaks: Peaks) -> Iterator[Target]:
    """That a rank's peak falls as the number of ranks grows, and fsdp takes no more than mode none."""
    if ALONE not in peaks:
        return
    alone = largest(peaks[ALONE]).peak
    for layout, ranks in peaks.items():
        peak = largest(ranks).peak
        who = f"batch {batch}, {layout}: peak"
        if layout.size in PEAK_SHARE:
            yield Target(f"{who} to that of one process", peak / alone, PEAK_SHARE[layout.size])
        plain = Layout("none", layout.size)
        if layout.mode == "fsdp" and plain in peaks:
            yield Target(f"{who} to that of mode none", peak / largest(peaks[plain]).peak, _SAME_PEAK)


def line(values: Sequence[str], columns: Sequence[tuple[str, int]], markdown: bool) -> str:
    """One line of a table; numbers to the right."""
    if markdown:
        return "| " + " | ".join(values) + " |"
    cells = zip(values, columns, strict=True)
    return "".join(f"{text:>{width}}" if width else f"  {text}" for text, (_, width) in cells).rstrip()


def head(columns: Sequence[tuple[str, int]], markdown: bool) -> str:
    """The first line, or two."""
    text = line([name for name, _ in columns], columns, markdown)
    return text + "\n" + line(["---:"] * len(columns), columns, True) if markdown else text
