"""Time and memory growth of the VNN-LIB 1.0 parser on generated files.

    python benchmarks/vnnlib_parse.py [--largest-mb 20]

Three shapes, each in doubling sizes: `bounds` (one assertion a line, as the image benchmarks),
`wide` (assertions of linear sums, about 200 characters each) and `boxes` (one OR of many input
boxes, as the database benchmarks). The last column shows linear growth as a ratio near 2.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

from abcrown_dist.spec.vnnlib1 import parse_vnnlib

OUTPUTS = 10


def _declarations(inputs: int) -> list[str]:
    names = [f"X_{i}" for i in range(inputs)] + [f"Y_{i}" for i in range(OUTPUTS)]
    return [f"(declare-const {name} Real)" for name in names]


def _bounds(size: int, draw: random.Random) -> str:
    inputs = size // 110
    lines = _declarations(inputs)
    for i in range(inputs):
        low = draw.uniform(-1, 1)
        lines += [f"(assert (>= X_{i} {low!r}))", f"(assert (<= X_{i} {low + 0.01!r}))"]
    lines.append("(assert (or " + " ".join(f"(and (>= Y_{k} Y_0))" for k in range(1, OUTPUTS)) + "))")
    return "\n".join(lines)


def _wide(size: int, draw: random.Random) -> str:
    lines = [*_declarations(1), "(assert (>= X_0 0))", "(assert (<= X_0 1))"]
    for _ in range(size // 200):
        terms = " ".join(f"(* {draw.uniform(-1, 1)!r} Y_{draw.randrange(OUTPUTS)})" for _ in range(5))
        lines.append(f"(assert (<= (+ {terms}) {draw.uniform(0, 9)!r}))")
    return "\n".join(lines)


def _boxes(size: int, draw: random.Random) -> str:
    inputs = 100
    clauses = []
    for _ in range(size // (inputs * 36)):
        bounds = " ".join(
            f"(>= X_{i} {draw.randrange(2)}.0) (<= X_{i} {draw.randrange(2, 4)}.5)" for i in range(inputs)
        )
        clauses.append(f"(and {bounds} (<= Y_0 -1e-5))")
    return "\n".join([*_declarations(inputs), "(assert (or", *clauses, "))"])


SHAPES: dict[str, Callable[[int, random.Random], str]] = {"bounds": _bounds, "wide": _wide, "boxes": _boxes}


def main() -> None:
    """Print the table."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--largest-mb", type=float, default=20.0)
    largest = arguments.parse_args().largest_mb
    print(f"{'shape':8}{'MB':>8}{'assertions':>12}{'disjuncts':>11}{'seconds':>9}{'MB/s':>7}{'ratio':>7}")
    for shape, generate in SHAPES.items():
        previous = None
        for halvings in (3, 2, 1, 0):
            text = generate(int(largest * 1e6) >> halvings, random.Random(halvings))
            start = time.perf_counter()
            disjuncts = len(parse_vnnlib(text).disjuncts)
            seconds = time.perf_counter() - start
            ratio = f"{seconds / previous:7.2f}" if previous else "      -"
            megabytes, assertions = len(text) / 1e6, text.count("(assert")
            print(
                f"{shape:8}{megabytes:8.2f}{assertions:12}{disjuncts:11}{seconds:9.2f}"
                f"{megabytes / seconds:7.1f}{ratio}",
                flush=True,
            )
            previous = seconds


if __name__ == "__main__":
    main()
