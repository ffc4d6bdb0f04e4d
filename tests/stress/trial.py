"""A random run of the program on several ranks, drawn from one seed, with the verdict that it must give."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from tests import flow
from tests.searches import FAMILIES, MOST_UNSTABLE, Case, draw
from tests.stress import export

CHECKPOINT = "search.ckpt"
_TENTH = 10
_MEETING = "--parallel.timeout", "45"

Moment = Literal["round", "collective", "file", "seconds"]


@dataclass(frozen=True)
class Kill:
    """How a rank is to die.

    Attributes:
        rank: which one.
        moment: what is counted: agreements on a round of the search, collectives of any kind, steps on
            the checkpoint's files (create, rename, remove), or seconds from the start.
        number: it dies when it is about to do this one. A run that ends before loses nobody.
        restarted: by torchrun, all ranks; else the run ends.
        sent: SIGSTOP makes it hang instead.
    """

    rank: int
    moment: Moment
    number: float
    restarted: bool = False
    sent: signal.Signals = signal.SIGKILL


@dataclass(frozen=True)
class Trial:
    """One run.

    Attributes:
        margins: of the case's disjuncts, see `Case.property`; a positive one makes it `sat`.
        words: options besides the files'.
        kill: None: nobody dies.
    """

    seed: int
    case: Case
    margins: tuple[float, ...]
    ranks: int
    words: tuple[str, ...]
    kill: Kill | None = None

    @property
    def verdict(self) -> str:
        return "sat" if max(self.margins) > 0 else "unsat"

    def write(self, folder: Path) -> None:
        """The model and the property, as files."""
        case = self.case
        export.save(case.module, case.shape, case.outputs, folder / "net.onnx")
        inputs = len(case.disjuncts[0].lower)
        either = " ".join(item.text(gap) for item, gap in zip(case.disjuncts, self.margins, strict=True))
        flow.write_property(folder / "p.vnnlib", [(-9, 9)] * inputs, case.outputs, f"(or {either})")

    def resumed(self) -> Trial:
        """The run that goes on by hand from this one's checkpoint, on other ranks, in another mode."""
        random = np.random.default_rng([self.seed, 6])
        ranks, mode = int(random.integers(1, 5)), str(random.choice(["none", "fsdp", "tp"]))
        # Of options that are given twice the last one counts.
        words = (*self.words, *_mesh(random, mode, ranks), *_batch(random), "--resume", CHECKPOINT)
        return replace(self, ranks=ranks, words=words, kill=None)

    def describe(self) -> str:
        """On one line, all that was drawn besides the problem."""
        kill = "" if self.kill is None else f" {self.kill}"
        return f"seed {self.seed}: {self.ranks} rank(s), {self.verdict}, {' '.join(self.words)}{kill}"


def trial(seed: int) -> Trial:
    """All choices of a run; the same for the same seed.

    Every tenth seed kills a rank, and of those every other one has all ranks started again.
    """
    random = np.random.default_rng([seed, 5])
    ranks = int(random.integers(1, 5))
    kill = None
    if seed % _TENTH == _TENTH - 1:
        ranks = max(ranks, 2)
        kill = _kill(random, ranks, restarted=seed // _TENTH % 2 == 1)
    mode, inputs = str(random.choice(["none", "fsdp", "tp", "auto"])), bool(random.random() < 0.4)
    # Boxes of inputs get many, and tp waits for some milliseconds in every layer: they get easier problems.
    waiting = mode in ("tp", "auto") and ranks > 2
    slow = inputs or waiting
    case = draw(str(random.choice(list(FAMILIES))), seed, most=6 if slow else MOST_UNSTABLE)
    margins = _margins(random, len(case.disjuncts), -1 if slow else -2)
    words = (*_MEETING, *_mesh(random, mode, ranks), *_search(random, inputs), *_batch(random))
    words += ("--iteration", "1") if waiting else ()
    return Trial(seed, case, margins, ranks, (*words, *_keeping(random, kill)), kill)


def _margins(random: np.random.Generator, count: int, power: float) -> tuple[float, ...]:
    """About 10^power, one of them positive in two of five runs.

    The nearer to 0, the more has to be split; 1e-3 is far beyond rounding still.
    """
    margins = [-float(10 ** (power + random.uniform(-0.7, 0.7))) for _ in range(count)]
    if random.random() < 0.4:
        chosen = int(random.integers(count))
        margins[chosen] = -margins[chosen]
    return tuple(margins)


def _kill(random: np.random.Generator, ranks: int, *, restarted: bool) -> Kill:
    # Without torchrun nobody tells rank 0 of a rank that died before they met: no deaths by the clock then.
    moments: list[Moment] = ["round", "collective", "file"]
    moment = moments[int(random.integers(3))] if not restarted or random.random() < 0.6 else "seconds"
    number = {
        "round": float(random.integers(1, 5)),
        "collective": float(np.rint(10 ** random.uniform(0, 2))),
        "file": float(random.integers(1, 9)),
        "seconds": float(random.uniform(1.5, 6)),
    }[moment]
    return Kill(int(random.integers(ranks)), moment, number, restarted)


def _mesh(random: np.random.Generator, mode: str, ranks: int) -> list[str]:
    """In half of the runs with degrees; and how evenly domains must lie."""
    shards, domain = "auto", "auto"
    if mode in ("fsdp", "tp") and random.random() < 0.5:
        chosen = int(random.choice([size for size in range(1, ranks + 1) if ranks % size == 0]))
        shards, domain = str(chosen), str(ranks // chosen)
    return [
        "--parallel.mode", mode, "--parallel.shards", shards, "--parallel.domain", domain,
        "--parallel.imbalance", str(random.choice([0.01, 0.25, 10.0])),
    ]  # fmt: skip


def _search(random: np.random.Generator, inputs: bool) -> list[str]:
    """Cheap bounds, so that there is something left to split."""
    forced = str(random.random() < 0.3).lower()
    return [
        "--bab.branching.input_split.enable", str(inputs).lower(), "--bab.force_synchronous", forced,
        "--pgd_order", str(random.choice(["skip", "skip", "before", "after"])),
        "--no_incomplete", "--bound_prop_method", str(random.choice(["crown", "crown-ibp"])),
        "--init_iteration", "3", "--iteration", str(random.choice([1, 3, 10])), "--timeout", "90",
    ]  # fmt: skip


def _batch(random: np.random.Generator) -> list[str]:
    """Small rounds."""
    batch = str(random.choice([1, 2, 3, 8, 64]))
    return ["--batch_size", batch, "--bab.branching.input_split.batch_size", batch]


def _keeping(random: np.random.Generator, kill: Kill | None) -> Sequence[str]:
    """A checkpoint in half of the runs, and wherever a run has to go on from one."""
    busy = kill is not None and kill.moment == "file"
    needed = busy or (kill is not None and kill.restarted)
    interval = str(random.choice([1e-6, 0.05, 300.0]))
    if random.random() < 0.5 and not needed:
        return ()
    return "--checkpoint", CHECKPOINT, "--bab.checkpoint_interval", "1e-6" if busy else interval
