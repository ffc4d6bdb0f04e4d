"""The main flow: load, then attack, bound and search what is still open, until a verdict stands."""

from __future__ import annotations

from collections.abc import Callable

from abcrown_dist.bookmark import Keeping
from abcrown_dist.config import Config
from abcrown_dist.flow import Flow
from abcrown_dist.options import plan
from abcrown_dist.outcome import Outcome
from abcrown_dist.parallel.group import ALONE, Group
from abcrown_dist.problem import Instance, Problem, load
from abcrown_dist.report.progress import Progress
from abcrown_dist.spec.property import Verdict
from abcrown_dist.util.deadline import Deadline, alarm
from abcrown_dist.util.errors import DeadlineExceeded, is_out_of_memory

__all__ = ["Outcome", "decide", "solve", "verify"]


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
    """Work through the plan of attacks, bound methods and searches until one decides; fills `outcome`."""
    outcome.open = set(range(len(problem.prop.disjuncts)))
    steps = plan(config, problem.weights, problem.prop, can_bound=not problem.missing)
    keeping = Keeping.of(config, problem, deadline)
    flow = Flow(config, problem, deadline, progress, outcome, keeping)
    with alarm(deadline):  # once more: an earlier run may have used up some of the time
        for number in range(keeping.go_to(steps, outcome), len(steps)):
            deadline.check()
            if not outcome.open:
                break
            witness = flow.take(steps[number], number)
            if witness is not None:
                outcome.verdict, outcome.witness = Verdict.SAT, witness
                outcome.reason = "counterexample confirmed"
                break
    if outcome.witness is None:
        _conclude(problem, deadline, outcome)
    if outcome.verdict is not Verdict.UNKNOWN:
        keeping.end()


def _conclude(problem: Problem, deadline: Deadline, outcome: Outcome) -> None:
    """The verdict on a plan that ends without a counterexample."""
    if not outcome.open:
        outcome.verdict, outcome.reason = Verdict.UNSAT, _proof(outcome)
        return
    deadline.check()  # an attack that ran out of time ends without a word
    if problem.missing:
        outcome.reason = f"no relaxation for {'; '.join(problem.missing)}"
    else:
        outcome.reason = f"{len(outcome.open)} of {len(problem.prop.disjuncts)} disjuncts are open"
        outcome.reason += f": {outcome.given_up}" if outcome.given_up else ""


def _proof(outcome: Outcome) -> str:
    methods = dict.fromkeys(bound.method for bound in outcome.bounds.values())
    return (
        f"refuted by {', '.join(methods)}" if methods else "no input fulfils the property's input constraints"
    )
