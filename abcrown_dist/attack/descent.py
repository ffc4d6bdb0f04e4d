"""Projected gradient descent on many points at once.

Signed gradient steps with a step size per point, halved at its best point so far whenever it stalls
(the rule of Croce and Hein, "Reliable Evaluation of Adversarial Robustness with an Ensemble of Diverse
Parameter-free Attacks", 2020, at every stall instead of at fixed checkpoints), and racing: after every
window of steps the worse half of each disjunct's points is given up, and so is a disjunct whose progress,
even if it went on undiminished, would not reach a counterexample in the steps that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from abcrown_dist.attack.objective import Objective
from abcrown_dist.attack.starts import Region
from abcrown_dist.attack.surrogate import SurrogateGradients
from abcrown_dist.util.deadline import Deadline

Network = Callable[[torch.Tensor], torch.Tensor]
"""Flat points (B, inputs) to flat outputs (B, outputs), differentiable, each point on its own."""

STALL = 3
"""Evaluations without improvement after which a point halves its step."""

_WINDOWS = 5


@dataclass(frozen=True)
class Schedule:
    """How far and how long to step.

    Attributes:
        steps: gradient steps.
        alpha: first step in input units, or None for a quarter of each input's half width.
        decay: factor on the step after each one.
        racing: whether to give up on points and disjuncts on the way.
    """

    steps: int
    alpha: float | None = None
    decay: float = 0.99
    racing: bool = True


@dataclass
class Demand:
    """How far below zero a violation has to be, relative to the size of the terms it sums.

    Starts at nothing; every rejected candidate raises it, at first to a few roundings of `dtype`.
    """

    dtype: torch.dtype
    growth: float
    value: float = 0.0

    def raise_(self) -> None:
        """Ask for more than what was just rejected."""
        self.value = self.value * self.growth if self.value > 0 else 4 * torch.finfo(self.dtype).eps


@dataclass(frozen=True)
class Hit:
    """A point that fulfils, in floats, all constraints of disjunct `row` of the group by `margin`."""

    row: int
    x: torch.Tensor
    margin: float


def evaluate(network: Network, x: torch.Tensor) -> torch.Tensor:
    """The network's answers (T, R, outputs) to points (T, R, inputs)."""
    return network(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def gradient_of(loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Derivative of a scalar, zero where nothing differentiable leads to it (integer or boolean outputs)."""
    if not loss.requires_grad:
        return torch.zeros_like(x)
    (gradient,) = torch.autograd.grad(loss, x, allow_unused=True, materialize_grads=True)
    return gradient


def deficits(objective: Objective, x: torch.Tensor, y: torch.Tensor, demand: Demand) -> torch.Tensor:
    """Violations plus what `demand` asks for, (T, R, K): a hit has none above zero."""
    missing = objective.violations(x, y)
    if demand.value > 0:
        missing = missing + demand.value * objective.magnitude(x, y).detach()
    return missing


def hits(objective: Objective, x: torch.Tensor, y: torch.Tensor, demand: Demand) -> Iterator[Hit]:
    """Points that are counterexamples in floats, best first; going on after one means it was rejected."""
    worst, fulfilled = _judge(objective, x, y, demand)
    order = worst.masked_fill(~fulfilled, torch.inf).flatten().argsort()
    for position in order[: int(fulfilled.sum())].tolist():
        t, r = divmod(position, x.shape[1])
        one, at = slice(t, t + 1), slice(r, r + 1)
        part = objective.select(torch.tensor([t], device=x.device))
        if not _judge(part, x[one, at], y[one, at], demand)[1].item():
            return  # the demand has grown meanwhile; those that follow are worse
        yield Hit(t, x[t, r].detach(), -worst[t, r].item())
        demand.raise_()


def _judge(
    objective: Objective, x: torch.Tensor, y: torch.Tensor, demand: Demand
) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest violation (T, R), and whether all deficits are gone (T, R)."""
    missing = deficits(objective, x, y, demand)
    return objective.worst(x, y), objective.fulfilled(missing)


class Descent:
    """T x R points on their way down.

    Args:
        network: see `Network`.
        objective, region: of the T disjuncts.
        x: (T, R, inputs) starts.
        schedule: see there.
        generator: source of random directions where the gradient is zero.
    """

    def __init__(
        self,
        network: Network,
        objective: Objective,
        region: Region,
        x: torch.Tensor,
        schedule: Schedule,
        generator: torch.Generator,
    ) -> None:
        self.network, self.objective, self.region = network, objective, region
        self.schedule, self.generator = schedule, generator
        self.rows = torch.arange(len(objective), device=x.device)
        self.x = region.project(x)
        self.best_x = self.x.clone()
        self.best = torch.full(x.shape[:2], torch.inf, dtype=torch.float64, device=x.device)
        self.rate = torch.ones(x.shape[:2], dtype=x.dtype, device=x.device)
        self.stalled = torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device)
        self.reached: torch.Tensor | None = None

    def run(self, demand: Demand, deadline: Deadline, early_stop: bool = True) -> Iterator[Hit]:
        """Step until done, out of time or given up; yields hits on the way, or only the best at the end."""
        for y in self.steps(demand, deadline):
            if early_stop:
                yield from self._hits(self.x, y, demand)
        if not early_stop and not deadline.expired():
            with torch.no_grad():
                y = evaluate(self.network, self.best_x)
            yield from self._hits(self.best_x, y, demand)

    def steps(self, demand: Demand, deadline: Deadline) -> Iterator[torch.Tensor]:
        """Yields the outputs at `x` after each evaluation, and moves on when resumed."""
        window = max(1, self.schedule.steps // _WINDOWS)
        for step in range(self.schedule.steps + 1):
            if deadline.expired() or len(self.rows) == 0:
                return
            gradient, y = self._evaluate(demand)
            yield y
            if self.schedule.racing and step % window == 0:
                gradient = self._race((self.schedule.steps - step) // window, gradient)
            if step < self.schedule.steps:
                self._move(gradient)

    def _hits(self, x: torch.Tensor, y: torch.Tensor, demand: Demand) -> Iterator[Hit]:
        asked = demand.value
        for hit in hits(self.objective, x, y, demand):
            yield Hit(int(self.rows[hit.row]), hit.x, hit.margin)
        if demand.value > asked:
            self.best.fill_(torch.inf)  # measured against a lower demand
            self.reached = None

    def _evaluate(self, demand: Demand) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradient of the loss and outputs at `x`; records progress."""
        x = self.x.detach().requires_grad_()
        with torch.enable_grad(), SurrogateGradients():
            y = evaluate(self.network, x)
            missing = self.objective.joined(deficits(self.objective, x, y, demand))
            worst = missing.amax(-1)
            # Every second point follows the worst constraint alone, the others all broken ones together.
            together = torch.arange(x.shape[1], device=x.device) % 2
            loss = worst + together * missing.relu().sum(-1)
            gradient = gradient_of(loss.sum(), x)
        self._record(worst.detach())
        return gradient, y.detach()

    def _record(self, worst: torch.Tensor) -> None:
        better = worst < self.best
        self.best = torch.where(better, worst, self.best)
        self.best_x = torch.where(better[..., None], self.x, self.best_x)
        self.stalled = torch.where(better, 0, self.stalled + 1)

    def _move(self, gradient: torch.Tensor) -> None:
        stuck = self.stalled >= STALL
        self.rate = torch.where(stuck, self.rate / 2, self.rate) * self.schedule.decay
        self.stalled = self.stalled.masked_fill(stuck, 0)
        direction = self._direction(gradient)
        if self.schedule.alpha is None:
            length = self.region.width[:, None] / 8
        else:
            length = (self.region.width[:, None] > 0) * self.schedule.alpha
        start = torch.where(stuck[..., None], self.best_x, self.x)
        self.x = self.region.project(start - self.rate[..., None] * length * direction)

    def _direction(self, gradient: torch.Tensor) -> torch.Tensor:
        """Entries in [-1, 1]: the gradient's signs, for every third point its proportions instead.

        Signs are best in many dimensions; among few inputs and several constraints they zigzag. Where the
        gradient is zero or undefined the direction is random.
        """
        slope = (gradient * self.region.width[:, None]).nan_to_num(0.0)
        steepest = slope.abs().amax(-1, keepdim=True)
        proportional = torch.arange(slope.shape[1], device=slope.device) % 3 == 2
        direction = torch.where(
            proportional[:, None], slope / steepest.clamp_min(torch.finfo(slope.dtype).tiny), slope.sign()
        )
        flat = steepest == 0
        if not flat.any():
            return direction
        drawn = torch.rand(direction.shape, generator=self.generator, dtype=direction.dtype)
        return torch.where(flat, (drawn.to(direction.device) - 0.5).sign(), direction)

    def _race(self, windows_left: int, gradient: torch.Tensor) -> torch.Tensor:
        """Drop hopeless disjuncts and the worse half of each other one's points."""
        if self.reached is None:
            self.reached = self.best
            return gradient
        alive = ((self.reached - self.best) * windows_left >= self.best).any(-1)
        self.rows, self.objective = self.rows[alive], self.objective.select(alive)
        self.region = self.region.select(alive)
        keep = self.best[alive].argsort(-1)[:, : (self.best.shape[1] + 1) // 2]

        def kept(values: torch.Tensor) -> torch.Tensor:
            index = keep if values.dim() == 2 else keep[..., None].expand(-1, -1, values.shape[-1])
            return values[alive].gather(1, index)

        self.x, self.best_x, self.best = kept(self.x), kept(self.best_x), kept(self.best)
        self.rate, self.stalled = kept(self.rate), kept(self.stalled)
        self.reached = self.best
        return kept(gradient)


def refine(
    network: Network,
    objective: Objective,
    region: Region,
    starts: torch.Tensor,
    schedule: Schedule,
    *,
    seed: int,
    deadline: Deadline,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Descend from given points, e.g. the minimisers that branch and bound finds in its domains.

    Args:
        objective, region: constraints and boxes, one for each of T domains.
        starts: (T, R, inputs); projected into the boxes first.
        schedule: racing is not applied: every start has its answer.

    Returns:
        The best points (T, R, inputs) and their largest scaled violations (T, R) in float64; where
        one is <= 0, the point is a counterexample in floats (where no constraint is strict). Out of
        time, what was reached: infinity, where no time was left even for the starts.
    """
    patient = Schedule(schedule.steps, schedule.alpha, schedule.decay, racing=False)
    generator = torch.Generator().manual_seed(seed)
    descent = Descent(network, objective, region, starts, patient, generator)
    for _ in descent.steps(Demand(starts.dtype, growth=1.0), deadline):
        pass
    return descent.best_x, descent.best
