"""The main flow: load, then attack and bound what is still open, until a verdict stands."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from abcrown_dist.attack.confirm import Confirmer
from abcrown_dist.attack.pgd import Settings as AttackSettings
from abcrown_dist.attack.pgd import find_counterexamples
from abcrown_dist.bab.root import refute
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.config import Config
from abcrown_dist.options import Step, plan
from abcrown_dist.parallel.group import ALONE, Group
from abcrown_dist.problem import Instance, Problem, SharedConfirmer, load
from abcrown_dist.report.progress import Progress
from abcrown_dist.report.summary import ClauseBound
from abcrown_dist.spec.property import Verdict, Witness
from abcrown_dist.util.deadline import Deadline, alarm
from abcrown_dist.util.errors import DeadlineExceeded, is_out_of_memory
from abcrown_dist.weights.base import Weights
from abcrown_dist.weights.evaluate import flat_network

_log = logging.getLogger(__name__)


@dataclass
class Outcome:
    """What is known of an instance; grows while the flow goes on and is its result."""

    verdict: Verdict = Verdict.UNKNOWN
    reason: str = ""
    witness: Witness | None = None
    open: set[int] = field(default_factory=set)  # disjuncts that nothing has refuted yet
    bounds: dict[int, ClauseBound] = field(default_factory=dict)


def verify(
    config: Config, instance: Instance, deadline: Deadline, progress: Progress, group: Group = ALONE
) -> Outcome:
    """Verify one instance within its deadline; the ranks of `group` do so together.

    Raises:
        LoadError: a file cannot be read or is not supported.
    """
    return solve(config, lambda: load(config, instance, group), deadline, progress)


def solve(
    config: Config, load_problem: Callable[[], Problem], deadline: Deadline, progress: Progress
) -> Outcome:
    """Load and decide; running out of time or memory is a verdict."""
    outcome = Outcome()
    try:
        with alarm(deadline):
            with progress.phase("load"):
                problem = load_problem()
            decide(problem.config, problem, deadline, progress, outcome)
    except DeadlineExceeded as late:
        if outcome.verdict is Verdict.UNKNOWN:  # the alarm may ring just after the answer
            outcome.verdict, outcome.reason = Verdict.TIMEOUT, str(late)
    except Exception as error:
        if deadline.shared or not is_out_of_memory(error):
            raise  # with others waiting for this rank, it ends them all
        outcome.reason = "out of memory"
    return outcome


def decide(
    config: Config, problem: Problem, deadline: Deadline, progress: Progress, outcome: Outcome
) -> None:
    """Work through the plan of attacks and bound methods until one decides; fills `outcome`."""
    outcome.open = set(range(len(problem.prop.disjuncts)))
    for step in plan(config, problem.weights, problem.prop, can_bound=not problem.missing):
        deadline.check()
        if not outcome.open:
            break
        witness = _take(step, config, problem, deadline, progress, outcome)
        if witness is not None:
            outcome.verdict, outcome.witness = Verdict.SAT, witness
            outcome.reason = "counterexample confirmed"
            return
    # Branching goes on from here with outcome.open, once general.complete_verifier offers it.
    if not outcome.open:
        outcome.verdict, outcome.reason = Verdict.UNSAT, _proof(outcome)
        return
    deadline.check()  # an attack that ran out of time ends without a word
    if problem.missing:
        outcome.reason = f"no relaxation for {'; '.join(problem.missing)}"
    else:
        outcome.reason = f"{len(outcome.open)} of {len(problem.prop.disjuncts)} disjuncts are open"


def _take(
    step: Step, config: Config, problem: Problem, deadline: Deadline, progress: Progress, outcome: Outcome
) -> Witness | None:
    if isinstance(step, AttackSettings):
        with progress.phase("attack"):
            return _attack(step, config.general.seed, problem, deadline, outcome.open)
    with progress.phase(step.method):
        return _bound(step, config.solver.batch_size, problem, deadline, outcome)


def _attack(
    settings: AttackSettings, seed: int, problem: Problem, deadline: Deadline, targets: set[int]
) -> Witness | None:
    weights = problem.weights
    candidates = find_counterexamples(
        flat_network(weights.graph, weights),
        problem.prop,
        settings,
        seed=seed,
        device=weights.device,
        dtype=weights.dtype,
        deadline=deadline,
        only=targets,
    )
    return _first_confirmed(problem.confirmer, ((c.disjunct, c.x) for c in candidates))


def _bound(
    settings: BoundSettings, batch_size: int, problem: Problem, deadline: Deadline, outcome: Outcome
) -> Witness | None:
    """Refute open disjuncts; those within rounding of proof once more in float64 (design rule 7.2)."""
    largest = torch.finfo(problem.model.dtype).max

    def attempt(weights: Weights, wanted: set[int]) -> tuple[set[int], list[tuple[int, np.ndarray]]]:
        found = refute(
            weights,
            problem.prop,
            sorted(wanted),
            settings,
            batch_size=batch_size,
            largest=largest,
            deadline=deadline,
            model_dtype=problem.model.dtype,
        )
        for index, margins in found.margins.items():
            refuted = index in found.refuted
            outcome.bounds[index] = ClauseBound(index, margins, refuted, settings.method)
        outcome.open -= found.refuted
        return found.doubtful, found.suspects

    doubtful, suspects = attempt(problem.weights, outcome.open)
    if doubtful and problem.weights.dtype != torch.float64:
        precise = problem.weights.to(torch.float64)
        if precise is not None:
            attempt(precise, doubtful)
    return _first_confirmed(problem.confirmer, (s for s in suspects if s[0] in outcome.open))


def _first_confirmed(
    confirmer: Confirmer | SharedConfirmer, points: Iterable[tuple[int, np.ndarray]]
) -> Witness | None:
    try:
        for disjunct, x in points:
            witness = confirmer.confirm(x, disjunct)
            if witness is not None:
                return witness
        return None
    finally:
        confirmer.release()


def _proof(outcome: Outcome) -> str:
    methods = dict.fromkeys(bound.method for bound in outcome.bounds.values())
    return (
        f"refuted by {', '.join(methods)}" if methods else "no input fulfils the property's input constraints"
    )
