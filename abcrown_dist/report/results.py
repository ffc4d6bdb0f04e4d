"""The VNN-COMP results file and the counterexample file, in VNN-LIB 1.0 form."""

from __future__ import annotations

from pathlib import Path

from abcrown_dist.report.files import write_whole
from abcrown_dist.spec.property import Verdict, Witness


def format_witness(witness: Witness) -> str:
    """One parenthesis around (X_i value) pairs, then (Y_i value) pairs, one a line, numbered from 0.

    The inputs are written digit by digit as they were confirmed.
    """
    pairs = [f"(X_{i} {value})" for i, value in enumerate(witness.inputs)]
    pairs += [f"(Y_{i} {float(value)!r})" for i, value in enumerate(witness.outputs)]
    return "(" + "\n ".join(pairs) + ")\n"


def write_results(path: str | Path, verdict: Verdict, witness: Witness | None = None) -> None:
    """Write the verdict as first line and, with `sat`, the witness after it.

    Raises:
        ConfigError: the file cannot be written.
        ValueError: `sat` without a witness, or a witness with another verdict.
    """
    if (verdict is Verdict.SAT) != (witness is not None):
        raise ValueError(f"verdict {verdict.value} {'without' if witness is None else 'with'} a witness")
    write_whole(path, f"{verdict.value}\n" + (format_witness(witness) if witness else ""))


def write_counterexample(path: str | Path, witness: Witness) -> None:
    """Write the witness alone (`attack.cex_path`).

    Raises:
        ConfigError: the file cannot be written.
    """
    write_whole(path, format_witness(witness))
