"""Memory per rank of every mode of `parallel.mode`, from shapes alone, and the mode to take.

Only bound passes are foretold: they hold coefficients for every neuron, an attack holds points.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce

from abcrown_dist.bab.clauses import batches
from abcrown_dist.bounds.forecast import Forecast, Task, forecast
from abcrown_dist.bounds.forward import varying_inputs
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.config import Config
from abcrown_dist.config.resolve import resolve_dtype
from abcrown_dist.graph.ir import Graph
from abcrown_dist.options import plan as plan_steps
from abcrown_dist.plan.capacity import Capacity
from abcrown_dist.spec.property import Property
from abcrown_dist.weights.footprint import Footprint, Mode, footprint
from abcrown_dist.weights.local import LocalWeights


@dataclass(frozen=True)
class Choice:
    """A way to spread a network over ranks.

    Attributes:
        mode: value of `parallel.mode`.
        shard_rows: value of `parallel.shard_rows`.
        why: what speaks for it, as the end of a sentence.
    """

    mode: Mode
    shard_rows: bool = False
    why: str = ""

    @property
    def setting(self) -> str:
        """The choice as keys of the configuration."""
        if self.mode == "none":
            return "one process (parallel.mode none)"
        return f"parallel.mode {self.mode}" + (" with parallel.shard_rows true" if self.shard_rows else "")

    def __str__(self) -> str:
        return f"{self.mode} + shard_rows" if self.shard_rows else self.mode


# From fast to slow. Plain fsdp repeats all work on every rank and so never comes before shard_rows,
# which takes no more memory either.
CHOICES = (
    Choice("none", why="it fits on one device and nothing is sent"),
    Choice("fsdp", True, why="ranks share weights and rows; the same bits at any number of ranks"),
    Choice("fsdp", why="ranks share weights; the same bits as in one process"),
    Choice("tp", why="weights, coefficients and slopes are all shared, at one exchange for every layer"),
)


@dataclass(frozen=True)
class Option:
    """One choice with its footprint on each rank."""

    choice: Choice
    needs: Forecast
    placed: Footprint = field(repr=False)


@dataclass(frozen=True)
class Work:
    """The bound passes of a verification.

    Attributes:
        steps: settings of every pass; empty when no bounds are computed.
        task: what they bound.
    """

    steps: tuple[BoundSettings, ...]
    task: Task

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(step.method for step in self.steps))


@dataclass(frozen=True)
class Plan:
    """Every choice for `size` ranks with its footprint, from fast to slow.

    Attributes:
        room: memory of a rank.
        prefetch: as `parallel.prefetch`.
    """

    graph: Graph
    work: Work
    size: int
    prefetch: bool
    room: Capacity
    options: tuple[Option, ...]

    def fits(self, option: Option) -> bool:
        """Whether a rank's memory is enough; a tenth stays free for what is not a tensor's."""
        return option.needs.peak <= 0.9 * self.room.of(option.choice.mode == "none")

    def recommended(self) -> Option | None:
        """The fastest choice that fits, None if none does."""
        return next((option for option in self.options if self.fits(option)), None)

    def with_fewer_rows(self) -> tuple[int, Option] | None:
        """The largest power of two for `solver.crown.batch_size` at which a choice fits, and that choice.

        None where not even single rows fit.
        """
        most = max(option.needs.rows for option in self.options)
        limit = 1 << max(most - 1, 0).bit_length() >> 1
        while limit:
            steps = tuple(dataclasses.replace(step, batch_rows=limit) for step in self.work.steps)
            work = dataclasses.replace(self.work, steps=steps)
            choices = [option.choice for option in self.options]
            smaller = predict(self.graph, work, self.size, self.prefetch, self.room, choices)
            found = smaller.recommended()
            if found is not None:
                return limit, found
            limit //= 2
        return None


def work_of(config: Config, graph: Graph, prop: Property, *, can_bound: bool, on_cpu: bool) -> Work:
    """The bound passes that the configuration asks for.

    Args:
        graph: with its constants' values.
        can_bound: whether every op has a relaxation.
        on_cpu: whether bounds will be computed on the CPU.
    """
    dtype = resolve_dtype(config.general.double_fp)
    weights = LocalWeights(graph, dtype)
    steps = plan_steps(config, weights, prop, can_bound)
    domains = rows = varying = 0
    for clauses in batches(prop, weights, range(len(prop.disjuncts)), config.solver.batch_size):
        domains = max(domains, clauses.box.domains)
        rows = max(rows, clauses.rhs.shape[1])
        varying = max(varying, varying_inputs(weights, clauses.box))
    found = tuple(step for step in steps if isinstance(step, BoundSettings))
    return Work(found if domains else (), Task(domains, rows, varying, dtype, on_cpu))


def predict(
    graph: Graph, work: Work, size: int, prefetch: bool, room: Capacity, choices: Sequence[Choice] = CHOICES
) -> Plan:
    """Foretell every one of `choices` for `size` ranks. A graph without its constants' values will do."""
    options = tuple(_predict_one(graph, work, size, prefetch, choice) for choice in choices)
    return Plan(graph, work, size, prefetch, room, options)


def _predict_one(graph: Graph, work: Work, size: int, prefetch: bool, choice: Choice) -> Option:
    """The footprint of one choice on each of `size` ranks."""
    placed = footprint(graph, choice.mode, size, work.task.dtype, prefetch=prefetch)
    nothing = Forecast(placed.rest, 0, 0, 0, 0, placed.rest, 0)
    runs = (
        forecast(
            placed,
            dataclasses.replace(step, gathered=choice.mode == "fsdp", shard_rows=choice.shard_rows),
            work.task,
        )
        for step in work.steps
    )
    return Option(choice, reduce(Forecast.worst, runs, nothing), placed)
