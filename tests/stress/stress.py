"""Random runs of the program on several ranks, some of which lose one; see `make stress`.

Every run must end, never with a wrong verdict, never with a truncated file.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.stress.judge import UNDECIDED, Wrong
from tests.stress.runner import Finished, run, said
from tests.stress.trial import Trial, trial

WRONG = "wrong"


def stress(seeds: Sequence[int], say: Callable[[str], None], progress: Callable[[str], None]) -> Counter[str]:
    """Do the runs of all seeds.

    Args:
        say: is told of each that failed or came to no verdict, and how to repeat it.
        progress: is told of each.

    Returns:
        how often which end came; `WRONG` for runs that failed.
    """
    found: Counter[str] = Counter()
    for number, seed in enumerate(seeds, 1):
        one, begun = trial(seed), time.monotonic()
        end = _end(one, say)
        if end == WRONG or end in UNDECIDED:
            say(f"{end}; repeat: python -m tests.stress.stress --runs 1 --seed {seed} --verbose")
        found[end] += 1
        progress(f"{number}/{len(seeds)} {end} {time.monotonic() - begun:.1f} s {one.describe()}")
    return found


def _end(one: Trial, say: Callable[[str], None]) -> str:
    with tempfile.TemporaryDirectory(prefix="stress") as name:
        folder = Path(name)
        try:
            return _label(one, run(one, folder))
        except Wrong as wrong:
            say(f"FAILED: {wrong}\n{one.describe()}\n{said(folder)}")
            return WRONG


def _label(one: Trial, finished: Finished) -> str:
    """A verdict, and what happened on the way to it."""
    if finished.resumed:
        return f"{finished.verdict} resumed by hand"
    if not finished.died or one.kill is None:
        return finished.verdict
    if one.kill.restarted:
        return f"{finished.verdict} after a restart"
    return f"{finished.verdict} in spite of a death" if finished.verdict else "killed"


def main() -> int:
    """Returns 1 if a run failed, or more than one in fifty came to no verdict."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the others follow")
    parser.add_argument("--verbose", action="store_true", help="a line for every run")
    arguments = parser.parse_args()

    def say(line: str) -> None:
        print(line, flush=True)

    seeds = range(arguments.seed, arguments.seed + arguments.runs)
    found = stress(seeds, say, say if arguments.verbose else lambda line: None)
    print(", ".join(f"{end}: {count}" for end, count in sorted(found.items())))
    undecided = sum(count for end, count in found.items() if end.startswith(UNDECIDED))
    return int(found[WRONG] > 0 or undecided > max(1, arguments.runs // 50))


if __name__ == "__main__":
    sys.exit(main())
