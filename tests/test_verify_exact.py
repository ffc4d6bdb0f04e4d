"""Verdicts on random networks against exact answers, with thresholds within rounding of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from decimal import Context, Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from abcrown_dist.spec.property import Verdict
from tests import flow
from tests.exact import exact_minimum
from tests.models import OnnxBuilder

Layers = list[tuple[np.ndarray, np.ndarray]]
Affine = tuple[Fraction, Fraction]
"""a x + d, as (a, d)."""

ALONE = ("--complete_verifier", "skip")  # bounds, without a search after them
SETTINGS: list[tuple[str, ...]] = [
    ALONE,
    (*ALONE, "--pgd_order", "skip"),
    (*ALONE, "--pgd_order", "skip", "--double_fp"),
    (*ALONE, "--pgd_order", "skip", "--bound_prop_method", "ibp"),
    (*ALONE, "--pgd_order", "skip", "--bound_prop_method", "forward"),
    (*ALONE, "--pgd_order", "skip", "--bound_prop_method", "crown-ibp"),
    (*ALONE, "--pgd_order", "skip", "--bound_prop_method", "crown", "--memory_budget", "1KiB"),
    (*ALONE, "--pgd_order", "skip", "--bound_prop_method", "crown", "--compare_crown_with_ibp", "false"),
    (*ALONE, "--pgd_order", "skip", "--bound_prop_method", "alpha-crown"),
]
UNAIDED = ("--pgd_order", "skip", "--no_incomplete", "--bab.max_iterations", "10")
NEURONS = ("--bab.branching.input_split.enable", "false")
INPUTS = ("--bab.branching.input_split.enable", "true")
SEARCHES: list[tuple[str, ...]] = [
    ("--bab.max_iterations", "10"),
    (*UNAIDED, *NEURONS),
    (*UNAIDED, *NEURONS, "--double_fp", "--branching_method", "babsr"),
    (*UNAIDED, *INPUTS),
    (*UNAIDED, *INPUTS, "--double_fp", "--branching_method", "naive"),
    (*UNAIDED, "--complete_verifier", "mip"),
    (*UNAIDED, "--complete_verifier", "bab-refine"),
]


def save(layers: Layers, path: Path) -> Path:
    """ReLU network, input and output (1, n)."""
    build = OnnxBuilder()
    x = build.input("x", [1, layers[0][0].shape[1]])
    for index, (weight, bias) in enumerate(layers):
        x = build.op("Gemm", x, build.constant(weight), build.constant(bias), transB=1)
        if index < len(layers) - 1:
            x = build.op("Relu", x)
    build.output(x, [1, len(layers[-1][1])])
    return build.save(path)


def exact_minimum_of_line(layers: Layers, low: Decimal, high: Decimal) -> Fraction:
    """Minimum of the only output of a network of one input, in rational numbers: piece by piece."""
    pieces: list[tuple[Fraction, Fraction, list[Affine]]] = []
    pieces.append((Fraction(low), Fraction(high), [(Fraction(1), Fraction(0))]))
    for index, layer in enumerate(layers):
        last = index == len(layers) - 1
        pieces = [part for piece in pieces for part in _through(layer, *piece, last)]
    return min(a * x + d for left, right, ((a, d),) in pieces for x in (left, right))


def _through(
    layer: tuple[np.ndarray, np.ndarray],
    left: Fraction,
    right: Fraction,
    values: Sequence[Affine],
    last: bool,
) -> list[tuple[Fraction, Fraction, list[Affine]]]:
    """A piece after an affine map and, unless it is the last one, a ReLU that may cut it up."""
    z: list[Affine] = []
    for row, bias in zip(layer[0].tolist(), layer[1].tolist(), strict=True):
        exact = [Fraction(weight) for weight in row]
        slope = sum((w * a for w, (a, _) in zip(exact, values, strict=True)), Fraction(0))
        z.append((slope, sum((w * d for w, (_, d) in zip(exact, values, strict=True)), Fraction(bias))))
    if last:
        return [(left, right, z)]
    zeros = {-d / a for a, d in z if a != 0}
    cuts = sorted({left, right, *(x for x in zeros if left < x < right)})
    parts = []
    for begin, end in itertools.pairwise(cuts) if len(cuts) > 1 else [(left, right)]:
        middle = (begin + end) / 2
        active = [(a, d) if a * middle + d > 0 else (Fraction(0), Fraction(0)) for a, d in z]
        parts.append((begin, end, active))
    return parts


def written(value: Fraction) -> str:
    """A decimal with 45 digits."""
    context = Context(prec=45)
    return str(context.divide(Decimal(value.numerator), Decimal(value.denominator)))


def random_line(random: np.random.Generator) -> tuple[Layers, Decimal, Decimal, float]:
    """A network of one input and one output, an interval, and the size of the numbers that cancel in it."""
    size = 10.0 ** random.integers(0, 7)
    sizes = [1, *random.integers(1, 5, random.integers(0, 3)).tolist(), 1]
    layers = []
    for inputs, outputs in itertools.pairwise(sizes):
        weight = random.standard_normal((outputs, inputs)) * 10.0 ** random.integers(-2, 3)
        bias = random.standard_normal(outputs) * random.choice([1.0, size])
        layers.append((weight.astype(np.float32), bias.astype(np.float32)))
    low = Decimal(f"{random.standard_normal():.3f}")
    width = Decimal(f"{abs(random.standard_normal()) * 10.0 ** random.integers(-3, 1):.4f}")
    return layers, low, low + width, size


@pytest.mark.parametrize("seed", range(60))
def test_no_rounding_makes_a_proof(tmp_path: Path, seed: int) -> None:
    """Thresholds from 1e-17 to 1e-5 of the magnitudes above and below the exact minimum."""
    random = np.random.default_rng(seed)
    layers, low, high, size = random_line(random)
    model = save(layers, tmp_path / "net.onnx")
    minimum = exact_minimum_of_line(layers, low, high)
    offset = Fraction(10.0 ** random.uniform(-17, -5)) * max(abs(minimum), Fraction(size))
    for threshold in (written(minimum + offset), written(minimum - offset)):
        prop = flow.write_property(tmp_path / "p.vnnlib", [(low, high)], 1, f"(<= Y_0 {threshold})")
        reachable = Fraction(Decimal(threshold)) >= minimum
        every = [*SETTINGS, *SEARCHES]
        for words in every if seed < 6 else [every[seed % len(every)]]:
            verdict = flow.run(model, prop, *words).verdict
            assert not (reachable and verdict is Verdict.UNSAT), words


def test_the_exact_minimum_of_a_line_is_one() -> None:
    """The oracle itself, against a dense grid."""
    random = np.random.default_rng(0)
    for _ in range(20):
        layers, low, high, size = random_line(random)
        x = np.linspace(float(low), float(high), 2001)[:, None]
        for index, (weight, bias) in enumerate(layers):
            x = x @ weight.T.astype(np.float64) + bias
            x = np.maximum(x, 0) if index < len(layers) - 1 else x
        minimum = float(exact_minimum_of_line(layers, low, high))
        scale = float(np.abs(x).max()) + size
        assert minimum <= x.min() + 1e-12 * scale
        assert x.min() - minimum <= 0.02 * (x.max() - x.min()) + 1e-12 * scale


@pytest.mark.parametrize("seed", range(25))
def test_verdicts_agree_with_mixed_integer_programming(tmp_path: Path, seed: int) -> None:
    """Up to three boxes in up to four dimensions, each with a threshold near its exact minimum.

    Where weights are not so large that what cancels inside hides the threshold, searches have to decide.
    """
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 6, random.integers(2, 5)).tolist()
    scale = 10.0 ** random.integers(-3, 5)
    layers = [
        ((random.standard_normal((o, i)) * scale).astype(np.float32), random.standard_normal(o).astype("f4"))
        for i, o in itertools.pairwise(sizes)
    ]
    clauses, satisfiable = [], False
    for _ in range(random.integers(1, 4)):
        low = np.round(random.standard_normal(sizes[0]), 4)
        high = low + np.round(random.random(sizes[0]) * random.choice([0.0, 0.1, 1.0], sizes[0]), 4)
        c = np.round(random.standard_normal(sizes[-1]), 3)
        weights, biases = [w for w, _ in layers], [b for _, b in layers]
        least = exact_minimum(weights, biases, low, high, c)
        most = -exact_minimum(weights, biases, low, high, -c)
        unit = 1e-3 * (most - least) + 1e-4 * max(abs(least), abs(most), 1e-3)
        threshold = least + unit * random.choice([1, 10, 100]) * random.choice([-1, -1, 1])
        satisfiable |= bool(threshold > least)
        ranges = "".join(
            f"(>= X_{i} {lo:.4f}) (<= X_{i} {hi:.4f}) "
            for i, (lo, hi) in enumerate(zip(low.tolist(), high.tolist(), strict=True))
        )
        terms = " ".join(f"(* {value} Y_{i})" for i, value in enumerate(c.tolist()))
        clauses.append(f"(and {ranges}(<= (+ {terms} 0) {float(threshold)!r}))")
    anywhere: list[flow.Range] = [(-100, 100)] * sizes[0]
    prop = flow.write_property(tmp_path / "p.vnnlib", anywhere, sizes[-1], f"(or {' '.join(clauses)})")
    model = save(layers, tmp_path / "net.onnx")
    right, wrong = (Verdict.SAT, Verdict.UNSAT) if satisfiable else (Verdict.UNSAT, Verdict.SAT)
    for words in SETTINGS:
        assert flow.run(model, prop, *words).verdict is not wrong, words
    for words in SEARCHES:
        outcome = flow.run(model, prop, *words)
        assert outcome.verdict is not wrong, words
        assert outcome.verdict is right or scale > 100, (words, outcome.reason)
