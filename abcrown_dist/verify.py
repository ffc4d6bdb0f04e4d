"""The main flow: load, then attack and bound what is still open, until a verdict stands."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from abcrown_dist.attack.confirm import Confirmer
from abcrown_dist.attack.pgd import Settings as AttackSettings
from abcrown_dist.attack.pgd import find_counterexamples
from abcrown_dist.bab.root import refute
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.config import Config
from abcrown_dist.config.resolve import resolve_device, resolve_dtype
from abcrown_dist.graph.aten import unsupported
from abcrown_dist.graph.load_onnx import LoadedModel, load_onnx
from abcrown_dist.options import Step, plan
from abcrown_dist.relax import REGISTRY
from abcrown_dist.report.progress import Progress
from abcrown_dist.report.summary import ClauseBound
from abcrown_dist.spec.property import Property, Verdict, Witness
from abcrown_dist.spec.vnnlib1 import check_sizes, load_vnnlib
from abcrown_dist.util.deadline import Deadline, alarm
from abcrown_dist.util.errors import DeadlineExceeded, is_out_of_memory
from abcrown_dist.weights.adjoint import check_adjoints
from abcrown_dist.weights.evaluate import flat_network
from abcrown_dist.weights.local import LocalWeights

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Instance:
    """A network and a property, as files, and the seconds allowed for them."""

    model: Path
    property: Path
    timeout: float


@dataclass
class Outcome:
    """What is known of an instance; grows while the flow goes on and is its result."""

    verdict: Verdict = Verdict.UNKNOWN
    reason: str = ""
    witness: Witness | None = None
    open: set[int] = field(default_factory=set)  # disjuncts that nothing has refuted yet
    bounds: dict[int, ClauseBound] = field(default_factory=dict)


@dataclass(frozen=True)
class Problem:
    """A loaded instance with all that attacks and bounds need."""

    model: LoadedModel
    prop: Property
    weights: LocalWeights
    confirmer: Confirmer
    missing: list[str]  # ops without a relaxation


def verify(config: Config, instance: Instance, deadline: Deadline, progress: Progress) -> Outcome:
    """Verify one instance within its deadline.

    Raises:
        LoadError: a file cannot be read or is not supported.
    """
    return solve(config, lambda: load(config, instance), deadline, progress)


def solve(config: Config, load_problem: Callable[[], Problem], deadline: Deadline, progress: Progress) -> Outcome:
    """Load and decide; running out of time or memory is a verdict."""
    outcome = Outcome()
    try:
        with alarm(deadline):
            with progress.phase("load"):
                problem = load_problem()
            decide(config, problem, deadline, progress, outcome)
    except DeadlineExceeded as late:
        outcome.verdict, outcome.reason = Verdict.TIMEOUT, str(late)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        outcome.verdict, outcome.reason = Verdict.UNKNOWN, "out of memory"
    return outcome


def load(config: Config, instance: Instance) -> Problem:
    """Read both files and check the network against onnxruntime."""
    prop = load_vnnlib(instance.property)
    lower, upper = _hull(prop)
    model = load_onnx(instance.model, config.model.input_shape, lower, upper)
    return prepare(config, model, prop, Confirmer(prop, instance.model, input_shapes=model.input_shapes))


def prepare(config: Config, model: LoadedModel, prop: Property, confirmer: Confirmer) -> Problem:
    """Check that network and property fit together and that the network can be bounded; place its weights."""
    for warning in model.warnings:
        _log.warning("%s", warning)
    check_sizes(prop, model.graph.input_size, model.graph.output_size)
    check_adjoints(model.graph)
    missing = unsupported(model.graph, REGISTRY)
    if missing:
        _log.warning("no relaxation for: %s; only the attack can decide", "; ".join(missing))
    device = resolve_device(config.general.device)
    weights = LocalWeights(model.graph, resolve_dtype(config.general.double_fp), device)
    return Problem(model, prop, weights, confirmer, missing)


def decide(config: Config, problem: Problem, deadline: Deadline, progress: Progress, outcome: Outcome) -> None:
    """Work through the plan of attacks and bound methods until one decides; fills `outcome`."""
    outcome.open = set(range(len(problem.prop.disjuncts)))
    for step in plan(config, problem.weights, problem.prop, can_bound=not problem.missing):
        deadline.check()
        if not outcome.open:
            break
        outcome.witness = _take(step, config, problem, deadline, progress, outcome)
        if outcome.witness is not None:
            outcome.verdict, outcome.reason = Verdict.SAT, "counterexample confirmed"
            return
    # Branching goes on from here with outcome.open, once general.complete_verifier offers it.
    if not outcome.open:
        outcome.verdict, outcome.reason = Verdict.UNSAT, _proof(outcome)
    elif problem.missing:
        outcome.reason = f"no relaxation for {'; '.join(problem.missing)}"
    else:
        outcome.reason = f"{len(outcome.open)} of {len(problem.prop.disjuncts)} disjuncts are open"


def _take(step: Step, config: Config, problem: Problem, deadline: Deadline, progress: Progress,
          outcome: Outcome) -> Witness | None:  # fmt: skip
    if isinstance(step, AttackSettings):
        with progress.phase("attack"):
            return _attack(step, config.general.seed, problem, deadline, outcome.open)
    with progress.phase(step.method):
        return _bound(step, config.solver.batch_size, problem, deadline, outcome)


def _attack(settings: AttackSettings, seed: int, problem: Problem, deadline: Deadline,
            targets: set[int]) -> Witness | None:  # fmt: skip
    weights = problem.weights
    candidates = find_counterexamples(
        flat_network(weights.graph, weights), problem.prop, settings,
        seed=seed, device=weights.device, dtype=weights.dtype, deadline=deadline, only=targets,
    )  # fmt: skip
    return _first_confirmed(problem.confirmer, ((c.disjunct, c.x) for c in candidates))


def _bound(settings: BoundSettings, batch_size: int, problem: Problem, deadline: Deadline,
           outcome: Outcome) -> Witness | None:  # fmt: skip
    """Refute open disjuncts; those within rounding of proof once more in float64 (design rule 7.2)."""
    largest = torch.finfo(problem.model.dtype).max

    def attempt(weights: LocalWeights, wanted: set[int]) -> tuple[set[int], list[tuple[int, np.ndarray]]]:
        found = refute(weights, problem.prop, sorted(wanted), settings, batch_size=batch_size,
                       largest=largest, deadline=deadline)  # fmt: skip
        for index, margins in found.margins.items():
            refuted = index in found.refuted
            outcome.bounds[index] = ClauseBound(index, margins, refuted, settings.method)
        outcome.open -= found.refuted
        return found.doubtful, found.suspects

    doubtful, suspects = attempt(problem.weights, outcome.open)
    if doubtful and problem.weights.dtype != torch.float64:
        attempt(problem.weights.to(torch.float64), doubtful)
    return _first_confirmed(problem.confirmer, (s for s in suspects if s[0] in outcome.open))


def _first_confirmed(confirmer: Confirmer, points: Iterable[tuple[int, np.ndarray]]) -> Witness | None:
    for disjunct, x in points:
        witness = confirmer.confirm(x, disjunct)
        if witness is not None:
            return witness
    return None


def _hull(prop: Property) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The smallest box around all boxes of the property, flat float64; none without disjuncts."""
    ends = [box.outward() for box, _ in prop.boxes()]
    if not ends:
        return None, None
    return np.min([low for low, _ in ends], axis=0), np.max([high for _, high in ends], axis=0)


def _proof(outcome: Outcome) -> str:
    methods = dict.fromkeys(bound.method for bound in outcome.bounds.values())
    return f"refuted by {', '.join(methods)}" if methods else "no input fulfils the property's input constraints"
