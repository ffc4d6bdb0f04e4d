"""What a call of the program does around the main flow: instances, files, reports, exit code."""

from __future__ import annotations

import csv
import dataclasses
import logging
import math
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from abcrown_dist.config import Config
from abcrown_dist.config.keys import to_dict
from abcrown_dist.config.paths import locate, locate_model, locate_property
from abcrown_dist.config.plan_request import PlanRequest
from abcrown_dist.config.resolve import instance_timeout, resolve_device, resolve_progress
from abcrown_dist.graph.aten import unsupported
from abcrown_dist.outcome import Outcome
from abcrown_dist.parallel.clock import AgreedDeadline
from abcrown_dist.parallel.group import ALONE, Group
from abcrown_dist.parallel.launch import World, check_world, local_device, start_group, stop_group
from abcrown_dist.parallel.mesh import degrees
from abcrown_dist.plan.choose import make_plan
from abcrown_dist.plan.text import print_plan
from abcrown_dist.problem import Instance, check, read_instance
from abcrown_dist.relax import REGISTRY
from abcrown_dist.report.files import check_writable, remove_old
from abcrown_dist.report.plot import check_plot, write_plot
from abcrown_dist.report.progress import Progress
from abcrown_dist.report.results import write_counterexample, write_results
from abcrown_dist.report.summary import Summary, peak_memory, versions, write_summary
from abcrown_dist.report.table import BatchRow, print_table
from abcrown_dist.spec.property import Verdict
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.util.errors import ConfigError, LoadError, VerifierError, describe, exit_code
from abcrown_dist.util.numerics import use_full_precision
from abcrown_dist.verify import verify

_log = logging.getLogger(__name__)
ONE_PROCESS = World()


@dataclass(frozen=True)
class OutputFiles:
    """Where the answer to an instance goes; None for a file that nobody asked for."""

    results: str
    summary: str | None = None
    counterexample: str | None = None
    plot: str | None = None

    @classmethod
    def of(cls, config: Config) -> OutputFiles:
        """The files of a single instance."""
        general = config.general
        counterexample = config.attack.cex_path if general.save_adv_example else None
        return cls(general.results_file, general.summary_file, counterexample, general.plot_file)

    def numbered(self, number: int) -> OutputFiles:
        """The files of one instance of a batch: out.txt -> out_3.txt."""
        names = (self.results, self.summary, self.counterexample, self.plot)
        return OutputFiles(*(None if name is None else _numbered(name, number) for name in names))  # type: ignore[arg-type]

    def check(self) -> None:
        """Find out before the work begins what would keep its result from being written.

        Raises:
            ConfigError: one of the files cannot be written.
        """
        for name in (self.results, self.summary, self.counterexample):
            if name is not None:
                check_writable(name)
        if self.plot is not None:
            check_plot(self.plot)


def run(config: Config, start: float, world: World = ONE_PROCESS, store: Any = None) -> int:
    """Verify the configured instance, or every chosen one of a CSV; returns the exit code.

    Args:
        start: `time.monotonic()` when the process began: loading counts against the time limit.
        world, store: the ranks that torchrun started, and where they find each other.
    """
    use_full_precision()
    group = form_group(config, world, store)
    code = _run(config, start, group)
    stop_group(group)  # not after an error: who knows what the others are doing
    return code


def form_group(config: Config, world: World, store: Any) -> Group:
    """The group of all ranks.

    Raises:
        ConfigError: degrees that do not multiply to the number of ranks, or ranks without a task.
        RankLost: not all ranks came.
    """
    check_world(config, world)
    device = local_device(resolve_device(config.general.device), world)
    return start_group(world, store, device, config.parallel.backend, config.parallel.timeout)


def _run(config: Config, start: float, group: Group) -> int:
    files = OutputFiles.of(config)
    group.first(files.check)
    if config.bab.checkpoint is not None:
        group.first(partial(check_writable, config.bab.checkpoint))
    if config.general.csv_name is not None:
        return _run_batch(config, start, files, group)
    group.first(partial(remove_old, files.results))
    instance = group.first(lambda: _single(config))
    outcome = run_instance(config, instance, start, files, group)
    if outcome.waited:
        _log.info("waited for other ranks: %s s", ", ".join(f"{seconds:.1f}" for seconds in outcome.waited))
    if group.rank == 0:
        print(f"verdict: {outcome.verdict.value} ({outcome.reason}) after {time.monotonic() - start:.1f} s")
    return 0


def show_plan(config: Config, request: PlanRequest) -> int:
    """Print the memory of every parallel mode for the configured instance; returns the exit code.

    Raises:
        ConfigError: a CSV is configured instead of one instance.
        LoadError: a file cannot be loaded.
    """
    if config.general.csv_name is not None:
        raise ConfigError("plan looks at one model and property: general.csv_name cannot be planned")
    model, prop = read_instance(config, _single(config))
    check(model, prop)
    named = config.general.device
    absent = named.startswith("cuda") and request.device_memory is not None  # need not be on this machine
    device = torch.device(named) if absent else resolve_device(named)
    shards, _ = degrees(dataclasses.replace(config.parallel, mode="auto", shards="auto"), request.world_size)
    plan = make_plan(
        config, model.graph, prop, shards, device,
        device_memory=request.device_memory, can_bound=not unsupported(model.graph, REGISTRY),
    )  # fmt: skip
    print_plan(plan)
    return 0


def convert(config: Config) -> int:
    """Fill the graph cache with the networks of the configured instances; verify nothing.

    Returns:
        the exit code: that of the first instance that failed, which does not keep the others from their turn.

    Raises:
        LoadError: the only instance, or the CSV, cannot be loaded.
    """
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, cache_onnx_conversion=True))
    if config.general.csv_name is None:
        _convert(config, _single(config))
        return 0
    path = locate(config, config.general.csv_name)
    listed = _read_csv(path)
    code = 0
    for number in _chosen(config, path, len(listed)):
        try:
            _convert(config, _from_row(config, path, number, listed[number]))
        except LoadError as error:
            _log.error("%d: %s", number, describe(error))
            code = code or exit_code(error)
    return code


def _convert(config: Config, instance: Instance) -> None:
    read_instance(config, instance)
    print(f"converted: {instance.model}")


def run_instance(
    config: Config, instance: Instance, start: float, files: OutputFiles, group: Group = ALONE
) -> Outcome:
    """Verify one instance and write its files. An error leaves `error` in them and goes on up."""
    torch.manual_seed(config.general.seed)
    waited = group.traffic.seconds
    deadline = Deadline(instance.timeout, start)
    if group.size > 1:
        deadline = AgreedDeadline(instance.timeout, start, group)
    mode = resolve_progress(config.general.progress, sys.stderr) if group.rank == 0 else "none"
    with Progress(mode=mode) as progress:  # type: ignore[arg-type]  # one of its modes
        try:
            outcome = verify(config, instance, deadline, progress, group)
            if group.size > 1:
                outcome.waited = tuple(group.share_all(group.traffic.seconds - waited))
        except BaseException as error:
            if group.rank == 0:
                failed = Outcome(Verdict.ERROR, describe(error))
                _write(config, instance, deadline, progress, failed, files)
            raise
    if group.rank == 0:
        _write(config, instance, deadline, progress, outcome, files)
    return outcome


def _write(
    config: Config,
    instance: Instance,
    deadline: Deadline,
    progress: Progress,
    outcome: Outcome,
    files: OutputFiles,
) -> None:
    write_results(files.results, outcome.verdict, outcome.witness)
    if files.counterexample is not None and outcome.witness is not None:
        write_counterexample(files.counterexample, outcome.witness)
    if files.summary is not None:
        write_summary(files.summary, _summarise(config, instance, deadline, progress, outcome))
    if files.plot is not None:
        title = f"{instance.model.name}, {instance.property.name}: {outcome.verdict.value}"
        try:
            write_plot(files.plot, outcome.rounds, title)
        except Exception as error:  # an ornament: the answer stands without it
            _log.warning("no plot: %s", describe(error))


def _single(config: Config) -> Instance:
    model, prop = config.model.onnx_path, config.specification.vnnlib_path
    assert model is not None and prop is not None  # the loader saw to it
    return Instance(locate_model(config, model), locate_property(config, prop), instance_timeout(config.bab))


def _run_batch(config: Config, start: float, files: OutputFiles, group: Group) -> int:
    """Verify the chosen rows of the CSV. One that fails does not keep the others from their turn.

    Returns:
        the exit code of the first failure, else 0.
    """
    path = locate(config, config.general.csv_name or "")
    listed = group.first(lambda: _read_csv(path))
    rows: list[BatchRow] = []
    code = 0
    for number in _chosen(config, path, len(listed)):
        begun = start if not rows else time.monotonic()  # the first one bears the start-up
        cells = listed[number]
        name = f"{number}: {' '.join(Path(cell).name for cell in cells[:2])}"
        mine = files.numbered(number)
        try:
            group.first(partial(remove_old, mine.results))  # first: what is there later is this run's own
            instance = group.first(partial(_from_row, config, path, number, cells))
            group.first(mine.check)
            outcome = run_instance(_for_row(config, number), instance, begun, mine, group)
        except Exception as error:
            if group.size > 1 and exit_code(error) == VerifierError.exit_code:
                raise  # what every rank was told of leaves them in step; this may be ours alone
            code = code or exit_code(error)
            outcome = Outcome(Verdict.ERROR, describe(error))
            if group.rank == 0 and not Path(mine.results).exists():
                write_results(mine.results, Verdict.ERROR)
            if config.debug.traceback and group.rank == 0:
                traceback.print_exception(error)
        rows.append(BatchRow(name, outcome.verdict, time.monotonic() - begun, outcome.reason))
        _log.info("%s: %s (%s)", name, outcome.verdict.value, outcome.reason)
    if group.rank == 0:
        print_table(rows)
    return code


def _read_csv(path: Path) -> list[list[str]]:
    """Rows of the list of instances, without empty ones."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            rows = [[cell.strip() for cell in row] for row in csv.reader(stream, skipinitialspace=True)]
    except (OSError, ValueError, csv.Error) as error:
        raise LoadError(f"{path}: cannot read the list of instances ({error})") from error
    return [row for row in rows if any(row)]


def _chosen(config: Config, path: Path, count: int) -> Iterator[int]:
    """Numbers of the rows to run; a range may reach beyond the last row, but must not begin there."""
    data = config.data
    end = max(data.start + 1, min(data.end, count))
    chosen: Sequence[int] = data.select_instance or range(data.start, end)
    for number in chosen:
        if number >= count:
            raise LoadError(f"{path}: there is no instance {number}: it lists {count}, counted from 0")
    return iter(chosen)


def _from_row(config: Config, path: Path, number: int, row: Sequence[str]) -> Instance:
    """Instance of a row: model, property and, if it has a third column, seconds."""
    if len(row) < 2 or not row[0] or not row[1]:
        raise LoadError(f"{path}: instance {number} needs a model and a property, found {','.join(row)!r}")
    listed = row[2] if len(row) > 2 else ""
    return Instance(
        locate_model(config, row[0], path.parent),
        locate_property(config, row[1], path.parent),
        instance_timeout(config.bab, _seconds(path, number, listed) if listed else None),
    )


def _seconds(path: Path, number: int, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise LoadError(f"{path}: the timeout of instance {number} is not a number of seconds > 0: {text!r}")
    return seconds


def _for_row(config: Config, number: int) -> Config:
    """The configuration of one instance of a batch: with a checkpoint of its own."""
    if config.bab.checkpoint is None:
        return config
    own = _numbered(config.bab.checkpoint, number)
    return dataclasses.replace(config, bab=dataclasses.replace(config.bab, checkpoint=own))


def _numbered(path: str, number: int) -> str:
    whole = Path(path)
    return str(whole.with_name(f"{whole.stem}_{number}{whole.suffix}"))


def _summarise(
    config: Config, instance: Instance, deadline: Deadline, progress: Progress, outcome: Outcome
) -> Summary:
    return Summary(
        verdict=outcome.verdict,
        reason=outcome.reason,
        instance={"onnx": str(instance.model), "vnnlib": str(instance.property), "timeout": instance.timeout},
        bounds=[outcome.bounds[index] for index in sorted(outcome.bounds)],
        domains=outcome.domains,
        seconds={**progress.seconds, "total": deadline.elapsed()},
        memory=peak_memory(),
        versions=versions(),
        seed=config.general.seed,
        config=to_dict(config),
        rounds=outcome.rounds,
        waited=outcome.waited,
    )
