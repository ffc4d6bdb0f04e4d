"""What a call of the program does around the main flow: instances, files, reports, exit code."""

from __future__ import annotations

import csv
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from abcrown_dist.config import Config
from abcrown_dist.config.keys import to_dict
from abcrown_dist.config.paths import locate, locate_model, locate_property
from abcrown_dist.config.resolve import instance_timeout, resolve_progress
from abcrown_dist.report.progress import Progress
from abcrown_dist.report.results import write_counterexample, write_results
from abcrown_dist.report.summary import Summary, peak_memory, versions, write_summary
from abcrown_dist.report.table import BatchRow, print_table
from abcrown_dist.spec.property import Verdict
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.util.errors import LoadError, VerifierError
from abcrown_dist.util.numerics import use_full_precision
from abcrown_dist.verify import Instance, Outcome, verify

_log = logging.getLogger(__name__)


def run(config: Config, start: float) -> int:
    """Verify the configured instance, or every chosen one of a CSV; returns the exit code.

    Args:
        start: `time.monotonic()` when the process began: loading counts against the time limit.
    """
    use_full_precision()
    if config.general.csv_name is None:
        general = config.general
        instance = _single(config)
        outcome = run_instance(config, instance, start, general.results_file, general.summary_file)
        print(f"verdict: {outcome.verdict.value} ({outcome.reason}) after {time.monotonic() - start:.1f} s")
        return 0
    return _run_batch(config, start)


def run_instance(config: Config, instance: Instance, start: float, results: str, summary: str | None) -> Outcome:
    """Verify one instance and write its files. An error leaves `error` in the results file and goes on up."""
    torch.manual_seed(config.general.seed)
    deadline = Deadline(instance.timeout, start)
    mode = resolve_progress(config.general.progress, sys.stderr)
    with Progress(mode=mode) as progress:  # type: ignore[arg-type]  # one of its modes
        try:
            outcome = verify(config, instance, deadline, progress)
        except BaseException:
            write_results(results, Verdict.ERROR)
            raise
    write_results(results, outcome.verdict, outcome.witness)
    if outcome.witness is not None and config.general.save_adv_example:
        write_counterexample(config.attack.cex_path, outcome.witness)
    if summary is not None:
        write_summary(summary, _summarise(config, instance, deadline, progress, outcome))
    return outcome


def _single(config: Config) -> Instance:
    model, prop = config.model.onnx_path, config.specification.vnnlib_path
    assert model is not None and prop is not None  # the loader saw to it
    return Instance(locate_model(config, model), locate_property(config, prop), instance_timeout(config.bab))


def _run_batch(config: Config, start: float) -> int:
    rows: list[BatchRow] = []
    code = 0
    for number, instance in _instances(config):
        begun = start if not rows else time.monotonic()  # the first one bears the start-up
        name = f"{number}: {instance.model.name} {instance.property.name}"
        results = _numbered(config.general.results_file, number)
        summary = config.general.summary_file
        try:
            outcome = run_instance(config, instance, begun, results,
                                   None if summary is None else _numbered(summary, number))  # fmt: skip
            verdict, reason = outcome.verdict, outcome.reason
        except VerifierError as error:
            code = code or error.exit_code
            verdict, reason = Verdict.ERROR, str(error)
        rows.append(BatchRow(name, verdict, time.monotonic() - begun, reason))
        _log.info("%s: %s (%s)", name, verdict.value, reason)
    print_table(rows)
    return code


def _instances(config: Config) -> Iterator[tuple[int, Instance]]:
    """The chosen rows of the CSV: model, property and, if it has a third column, seconds."""
    path = locate(config, config.general.csv_name or "")
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            rows = [row for row in csv.reader(stream) if any(cell.strip() for cell in row)]
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{path}: cannot read the list of instances ({error})") from error
    chosen = config.data.select_instance or range(config.data.start, min(config.data.end, len(rows)))
    for number in chosen:
        if number >= len(rows):
            raise LoadError(f"{path}: there is no instance {number}, only {len(rows)} in all")
        yield number, _from_row(config, path, number, [cell.strip() for cell in rows[number]])


def _from_row(config: Config, path: Path, number: int, row: list[str]) -> Instance:
    if len(row) < 2 or not row[0] or not row[1]:
        raise LoadError(f"{path}: instance {number} needs a model and a property, found {','.join(row)!r}")
    try:
        listed = float(row[2]) if len(row) > 2 and row[2] else None
    except ValueError:
        raise LoadError(f"{path}: the timeout of instance {number} is no number: {row[2]!r}") from None
    return Instance(
        locate_model(config, row[0], path.parent),
        locate_property(config, row[1], path.parent),
        instance_timeout(config.bab, listed),
    )


def _numbered(path: str, number: int) -> str:
    """out.txt -> out_3.txt: one file per instance of a batch."""
    whole = Path(path)
    return str(whole.with_name(f"{whole.stem}_{number}{whole.suffix}"))


def _summarise(config: Config, instance: Instance, deadline: Deadline, progress: Progress,
               outcome: Outcome) -> Summary:  # fmt: skip
    return Summary(
        verdict=outcome.verdict,
        reason=outcome.reason,
        instance={"onnx": str(instance.model), "vnnlib": str(instance.property), "timeout": instance.timeout},
        bounds=[outcome.bounds[index] for index in sorted(outcome.bounds)],
        seconds={**progress.seconds, "total": deadline.elapsed()},
        memory=peak_memory(),
        versions=versions(),
        seed=config.general.seed,
        config=to_dict(config),
    )
