"""Search for counterexamples of a property: sampling, then projected gradient descent.

The network is a plain function here; nothing is known of its graph. Candidates are counterexamples in
this function's floats; the caller confirms each on the model itself and asks for the next one if that fails.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from abcrown_dist.attack import starts
from abcrown_dist.attack.descent import Demand, Descent, Hit, Network, Schedule, evaluate, gradient_of, hits
from abcrown_dist.attack.objective import Objective
from abcrown_dist.attack.starts import Region
from abcrown_dist.spec.property import Property
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.util.errors import ConfigError

MODES = ("PGD", "diversed_PGD")

_SAMPLES = 64  # points looked at in each box before any gradient, centre and vertices among them
_MOST_SAMPLES = 4096  # the same over all boxes
_MOST_ELEMENTS = 2**25  # of one batch of points, of the samples kept, of one batch of constraints
_QUICK = (2, 20)  # restarts and steps of the first descent: most false properties fall here
_CHOICES = 8  # points looked at for each start
_DIVERSIFYING = 5  # steps along a random output direction


@dataclass(frozen=True)
class Settings:
    """Effort of the search; names follow alpha-beta-CROWN's `attack` section.

    Attributes:
        steps: gradient steps.
        restarts: points for each disjunct.
        alpha: first step in input units, or "auto": a quarter of each input's half width.
        lr_decay: factor on the step after each one.
        early_stop: offer a candidate as soon as it is found, not the best at the end.
        mode: "PGD", or "diversed_PGD": all restarts first follow random output directions (Tashiro,
            Song and Ermon, "Diversity Can Be Transferred", 2020); plain PGD has a third of them do so.
        batch_size: points evaluated at once, at most.
        demand_growth: factor on the safety margin after each rejected candidate.

    Raises:
        ConfigError: a value that is impossible.
    """

    steps: int = 100
    restarts: int = 30
    alpha: float | Literal["auto"] = "auto"
    lr_decay: float = 0.99
    early_stop: bool = True
    mode: str = "PGD"
    batch_size: int = 1024
    demand_growth: float = 10.0

    def __post_init__(self) -> None:
        if self.steps < 0 or self.restarts < 0 or self.batch_size < 1:
            raise ConfigError("attack: steps and restarts must be at least 0, the batch size at least 1")
        if self.alpha != "auto" and not self.alpha > 0:
            raise ConfigError(f'attack: alpha must be "auto" or positive, not {self.alpha}')
        if not 0 < self.lr_decay <= 1:
            raise ConfigError(f"attack: the decay of the step must be in (0, 1], not {self.lr_decay}")
        if self.demand_growth <= 1:
            raise ConfigError(f"attack: the safety margin must grow by more than 1, not {self.demand_growth}")
        if self.mode not in MODES:
            raise ConfigError(f"attack: unknown mode {self.mode!r}, use one of {', '.join(MODES)}")


@dataclass(frozen=True)
class Candidate:
    """A point that looks like a counterexample.

    Attributes:
        x: (inputs,) float64, inside the disjunct's box up to the rounding of the dtype searched in.
        disjunct: index into `Property.disjuncts`.
        margin: by how much it fulfils the disjunct's constraints, in units of their coefficients' norm.
    """

    x: np.ndarray
    disjunct: int
    margin: float


def find_counterexamples(
    network: Network,
    prop: Property,
    settings: Settings,
    *,
    seed: int,
    device: torch.device | str,
    dtype: torch.dtype,
    deadline: Deadline,
    only: Collection[int] | None = None,
) -> Iterator[Candidate]:
    """Promising candidates, lazily: asking for another one says that the last one was rejected.

    Cheap stages come first: each box's centre, vertices and random points; a few short descents for each
    disjunct, the most promising disjuncts first; then all restarts. Out of time, or with nothing left to
    try, the iterator ends.

    Args:
        network: (B, inputs) to (B, outputs) on `device` in `dtype`, each point on its own.
        seed: same seed, same candidates, whatever the device up to its rounding.
        only: indices of the disjuncts to attack, e.g. those that bounds left open; default all.
    """
    search = _Search(network, prop, settings, seed, torch.device(device), dtype, deadline, only)
    yield from search.unconstrained()
    yield from search.sample()
    order = search.most_promising()
    quick_restarts, quick_steps = _QUICK
    if settings.restarts > quick_restarts and settings.steps > quick_steps:
        yield from search.descend(order, quick_restarts, quick_steps)
        order = search.most_promising()
    yield from search.descend(order, settings.restarts, settings.steps)


@dataclass
class _Best:
    """The most promising point seen for a disjunct and its largest violation."""

    violation: float
    x: torch.Tensor


@dataclass
class _Search:
    network: Network
    prop: Property
    settings: Settings
    seed: int
    device: torch.device
    dtype: torch.dtype
    deadline: Deadline
    only: Collection[int] | None
    best: dict[int, _Best] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.demand = Demand(self.dtype, self.settings.demand_growth)
        wanted = range(len(self.prop.disjuncts)) if self.only is None else frozenset(self.only)
        groups = [(box, [d for d in members if d in wanted]) for box, members in self.prop.boxes()]
        groups = [(box, members) for box, members in groups if members and not box.empty]
        self.boxes = [box for box, _ in groups]
        self.members = [members for _, members in groups]
        self.box_of = {d: b for b, members in enumerate(self.members) for d in members}
        self.regions: dict[int, Region] = {}
        fitting = _MOST_ELEMENTS // max(self.prop.num_inputs, 1)
        self.at_once = max(1, min(self.settings.batch_size, fitting))

    def unconstrained(self) -> Iterator[Candidate]:
        """The centre of each box that has a disjunct without constraints: nothing to search there."""
        for disjunct in self.box_of:
            if len(self.prop.disjuncts[disjunct].rhs) == 0:
                centre = starts.centres(self._region([disjunct]))[0, 0]
                yield Candidate(centre.double().cpu().numpy(), disjunct, np.inf)

    def sample(self) -> Iterator[Candidate]:
        """Candidates among a few points of each box; remembers the most promising point of every disjunct."""
        most = min(_MOST_SAMPLES, _MOST_ELEMENTS // max(self.prop.num_inputs, 1))
        count = max(1, min(_SAMPLES, self.at_once, most // max(len(self.boxes), 1)))
        group = max(1, self.at_once // count)
        for first in range(0, len(self.boxes), group):
            if self.deadline.expired():
                return
            chosen = range(first, min(first + group, len(self.boxes)))
            x = starts.mixed(self._regions_of(chosen), count, self.generator)
            with torch.no_grad():
                y = evaluate(self.network, x)
            place = {box: i for i, box in enumerate(chosen)}
            members = [d for box in chosen for d in self.members[box] if len(self.prop.disjuncts[d].rhs)]
            for part in self._batches(members, count):
                rows = [place[self.box_of[d]] for d in part]
                yield from self._look(part, rows, x, y)

    def _look(
        self, part: Sequence[int], rows: list[int], x: torch.Tensor, y: torch.Tensor
    ) -> Iterator[Candidate]:
        """Candidates of the disjuncts `part`, whose boxes were sampled in rows of x and y."""
        objective = Objective.of([self.prop.disjuncts[d] for d in part], self.device)
        violation, where = objective.worst(x[rows], y[rows]).min(-1)
        for t, disjunct in enumerate(part):
            self.best[disjunct] = _Best(violation[t].item(), x[rows[t], where[t]])
        yield from (self._candidate(hit, part) for hit in hits(objective, x[rows], y[rows], self.demand))

    def most_promising(self) -> list[int]:
        """Sampled disjuncts, the nearest to being fulfilled first."""
        return sorted(self.best, key=lambda disjunct: self.best[disjunct].violation)

    def descend(self, order: Sequence[int], restarts: int, steps: int) -> Iterator[Candidate]:
        """Candidates of gradient descent, by batches of disjuncts in the given order."""
        if restarts < 1:
            return
        alpha = None if self.settings.alpha == "auto" else float(self.settings.alpha)
        schedule = Schedule(steps, alpha, self.settings.lr_decay)
        at_once = min(restarts, self.at_once)
        for part in self._batches(order, at_once):
            for begun in range(0, restarts, at_once):
                if self.deadline.expired():
                    return
                yield from self._descend(part, min(at_once, restarts - begun), schedule, begun == 0)

    def _descend(
        self, part: Sequence[int], restarts: int, schedule: Schedule, with_best: bool
    ) -> Iterator[Candidate]:
        objective = Objective.of([self.prop.disjuncts[d] for d in part], self.device)
        region = self._region(part)
        x = self._starts(part, objective, region, restarts, with_best)
        descent = Descent(self.network, objective, region, x, schedule, self.generator)
        for hit in descent.run(self.demand, self.deadline, self.settings.early_stop):
            yield self._candidate(hit, part)
        for row, violation, points in zip(descent.rows.tolist(), descent.best, descent.best_x, strict=True):
            self._remember(part[row], violation, points)

    def _remember(self, disjunct: int, violation: torch.Tensor, points: torch.Tensor) -> None:
        lowest = int(violation.argmin())
        if violation[lowest].item() < self.best[disjunct].violation:
            self.best[disjunct] = _Best(violation[lowest].item(), points[lowest].clone())

    def _starts(
        self, part: Sequence[int], objective: Objective, region: Region, restarts: int, with_best: bool
    ) -> torch.Tensor:
        """(T, restarts, inputs): the best point seen, then diversified and mixed ones."""
        known = 1 if with_best else 0
        diversified = restarts - known
        if self.settings.mode == "PGD":
            diversified //= 3
        parts = [self._chosen(objective, region, restarts - known - diversified)]
        if with_best:
            parts.insert(0, torch.stack([self.best[d].x for d in part])[:, None])
        if diversified:
            parts.append(self._diversified(region, diversified))
        return torch.cat(parts, dim=1)

    def _chosen(self, objective: Objective, region: Region, count: int) -> torch.Tensor:
        """(T, count, inputs): for each place the best of a few mixed points."""
        chosen, least = starts.mixed(region, count, self.generator), None
        for turn in range(_CHOICES):
            x = chosen if turn == 0 else starts.mixed(region, count, self.generator)
            with torch.no_grad():
                worst = objective.worst(x, evaluate(self.network, x))
            if least is not None:
                chosen = torch.where((worst < least)[..., None], x, chosen)
            least = worst if least is None else torch.minimum(worst, least)
        return chosen

    def _diversified(self, region: Region, count: int) -> torch.Tensor:
        """(T, count, inputs): uniform points moved along the gradient of a random mix of outputs."""
        x = starts.uniform(region, count, self.generator)
        shape = (len(region), count, self.prop.num_outputs)
        mix = (torch.rand(shape, generator=self.generator, dtype=self.dtype) * 2 - 1).to(self.device)
        for _ in range(_DIVERSIFYING):
            if self.deadline.expired():
                break
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                gradient = gradient_of((evaluate(self.network, x) * mix).sum(), x)
            x = region.project(x.detach() + region.width[:, None] / 4 * gradient.nan_to_num(0.0).sign())
        return x

    def _batches(self, disjuncts: Sequence[int], points: int) -> Iterator[Sequence[int]]:
        """Runs of `disjuncts` that, with so many points each, fit one batch."""
        rows = max((len(self.prop.disjuncts[d].rhs) for d in disjuncts), default=1)
        wide = rows * (self.prop.num_outputs + self.prop.num_inputs)
        size = max(1, min(self.at_once // points, _MOST_ELEMENTS // max(wide, 1)))
        for first in range(0, len(disjuncts), size):
            yield disjuncts[first : first + size]

    def _region(self, disjuncts: Sequence[int]) -> Region:
        return self._regions_of([self.box_of[d] for d in disjuncts])

    def _regions_of(self, boxes: Sequence[int]) -> Region:
        for box in boxes:
            if box not in self.regions:
                self.regions[box] = Region.of([self.boxes[box]], self.device, self.dtype)
        known = [self.regions[box] for box in boxes]
        return Region(torch.cat([r.lower for r in known]), torch.cat([r.upper for r in known]))

    def _candidate(self, hit: Hit, part: Sequence[int]) -> Candidate:
        return Candidate(hit.x.double().cpu().numpy(), part[hit.row], hit.margin)
