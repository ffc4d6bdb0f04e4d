"""The steps of the main flow: each attacks or bounds what is still open, and takes down what it finds."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch

from abcrown_dist.attack.pgd import Settings as AttackSettings
from abcrown_dist.attack.pgd import find_counterexamples
from abcrown_dist.attack.probe import Candidate
from abcrown_dist.bab.root import Refutation, refute
from abcrown_dist.bab.search import Search
from abcrown_dist.bookmark import Keeping
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.boxes import Boxes
from abcrown_dist.branching import Branching, make_probe
from abcrown_dist.config import Config
from abcrown_dist.options import InputBranching, NeuronBranching, Programs, Refinement, Step
from abcrown_dist.outcome import Outcome
from abcrown_dist.problem import Problem
from abcrown_dist.report.progress import Progress
from abcrown_dist.report.summary import ClauseBound
from abcrown_dist.spec.property import Witness
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.weights.base import Weights
from abcrown_dist.weights.evaluate import flat_network

_log = logging.getLogger(__name__)


class Flow:
    """Takes steps on one problem.

    Args:
        keeping: checkpoints of the searches.
    """

    def __init__(
        self,
        config: Config,
        problem: Problem,
        deadline: Deadline,
        progress: Progress,
        outcome: Outcome,
        keeping: Keeping | None = None,
    ) -> None:
        self.config, self.problem, self.mesh = config, problem, problem.mesh
        self.deadline = deadline.among(problem.mesh.weights)
        self.progress, self.outcome = progress, outcome
        self.largest = torch.finfo(problem.model.dtype).max
        self.boxes = Boxes(problem, config.solver.batch_size, self.deadline)
        keeping, show = keeping or Keeping(), progress.update
        self.branching = Branching(
            problem, self.boxes, self.deadline, outcome, keeping, self._confirmed, show
        )

    def take(self, step: Step, number: int = 0) -> Witness | None:
        """Take one step, of a number in the plan; a confirmed counterexample ends the flow."""
        if isinstance(step, AttackSettings):
            with self.progress.phase("attack"):
                return self._attack(step)
        if isinstance(step, BoundSettings):
            with self.progress.phase(step.method):
                return self._bound(step)
        if isinstance(step, InputBranching):
            with self.progress.phase("branch on inputs"):
                search = self.branching.on_inputs(step, number)
                return self._take_down(search, "input splitting")
        if isinstance(step, NeuronBranching):
            with self.progress.phase("branch on neurons"):
                return self._branch_on_neurons(step, number)
        if isinstance(step, Refinement):
            with self.progress.phase("refine"):
                return self._refine(step)
        with self.progress.phase("mip"):
            return self._solve_programs(step)

    def _attack(self, settings: AttackSettings) -> Witness | None:
        """Search for counterexamples: copies of the weights divide the starting points among them."""
        weights, across = self.problem.weights, self.problem.mesh.across
        divided = across.size > 1 and not self.config.bab.force_synchronous
        if divided:
            settings = replace(settings, restarts=-(-settings.restarts // across.size))
        found = find_counterexamples(
            flat_network(weights.graph, weights),
            self.problem.prop,
            settings,
            seed=self.config.general.seed + divided * across.rank,
            device=weights.device,
            dtype=weights.dtype,
            deadline=self.deadline,
            only=self.outcome.open,
        )
        candidates = ((c.disjunct, c.x) for c in found)
        if across.size == 1:
            return self._first_confirmed(candidates)
        while any(told := self.mesh.together(lambda: next(candidates, None))):
            witness = self._first_confirmed(item for item in told if item is not None)
            if witness is not None:
                return witness
        return None

    def _bound(self, settings: BoundSettings) -> Witness | None:
        """Refute open disjuncts; those within rounding of proof once more in float64 (design rule 7.2)."""
        doubtful, suspects = self._refute(settings, self.problem.weights, self.outcome.open)
        if doubtful and self.problem.weights.dtype != torch.float64:
            precise = self.problem.weights.to(torch.float64)
            if precise is not None:
                self._refute(settings, precise, doubtful)
        return self._first_confirmed(s for s in suspects if s[0] in self.outcome.open)

    def _refute(
        self, settings: BoundSettings, weights: Weights, wanted: set[int]
    ) -> tuple[set[int], list[tuple[int, np.ndarray]]]:
        own: list[Refutation] = []

        def work() -> Refutation:
            found = refute(
                weights,
                self.problem.prop,
                sorted(wanted),
                settings,
                batch_size=self.config.solver.batch_size,
                deadline=self.deadline,
                model_dtype=self.problem.model.dtype,
            )
            own.append(found)
            return replace(found, roots=[])

        found = self.mesh.together(work)[0]
        for index, margins in found.margins.items():
            refuted = index in found.refuted
            self.outcome.bounds[index] = ClauseBound(index, margins, refuted, settings.method)
        self.outcome.open -= found.refuted
        if weights is self.problem.weights:
            self.boxes.keep(own[0].roots)
        return found.doubtful, found.suspects

    def _branch_on_neurons(self, step: NeuronBranching, number: int) -> Witness | None:
        witnesses: list[Witness | None] = []
        self.branching.on_neurons(
            step, number, lambda search: witnesses.append(self._take_down(search, "beta-crown"))
        )
        return next((witness for witness in witnesses if witness is not None), None)

    def _solve_programs(self, step: Programs) -> Witness | None:
        from abcrown_dist.programs import WholeBox  # scipy takes longer to import than most runs

        outcome, prop = self.outcome, self.problem.prop
        for box in self.boxes.open(step.bounds, set(self.outcome.open)):
            try:
                programs = WholeBox(self.problem.weights, box, self.largest)
            except ValueError as error:
                self.outcome.given_up = str(error)
                continue
            for index in box.disjuncts:
                self.deadline.check()
                found = programs.decide(prop.disjuncts[index], self.deadline, self.config.general.seed)
                if found.outcome == "refuted":
                    outcome.bounds[index] = ClauseBound(index, [found.bound], True, "mip")
                    outcome.open.discard(index)
                elif found.point is not None:
                    probe = make_probe(self.problem, self.problem.weights, self.deadline)
                    tried = probe.measure([index], torch.from_numpy(found.point)[None])
                    near = tried.promising() + probe.descend(tried).promising()
                    witness = self._confirmed(near)
                    if witness is not None:
                        return witness
                self.outcome.given_up = found.reason if index in outcome.open else self.outcome.given_up
        return None

    def _refine(self, step: Refinement) -> Witness | None:
        """Tighten the roots; the search that follows begins with them."""
        from abcrown_dist.programs import refined

        boxes = list(self.boxes.open(step.bounds, set(self.outcome.open)))
        roots = []
        for box in boxes:
            self.deadline.check()
            try:
                root, found = refined(
                    self.problem.weights,
                    box,
                    step.bounds,
                    self.deadline,
                    step.refine_neuron_timeout,
                    step.refine_neuron_time_percentage / len(boxes),
                )
            except ValueError as error:
                _log.warning("not refined: %s", error)
                roots.append(box.root)
                continue
            _log.info("%d of %d neurons tightened, %d stable", found.tightened, found.tried, found.stabilised)
            roots.append(root)
        self.boxes.keep(roots)
        return None

    def _take_down(self, search: Search, method: str) -> Witness | None:
        for index in search.refuted & self.outcome.open:
            self.outcome.bounds[index] = ClauseBound(index, [search.margins[index]], True, method)
        self.outcome.open -= search.refuted
        self.outcome.given_up = search.reason
        self.problem.confirmer.release()
        return search.witness

    def _first_confirmed(self, points: Iterable[Candidate]) -> Witness | None:
        try:
            return self._confirmed(points)
        finally:
            self.problem.confirmer.release()

    def _confirmed(self, points: Iterable[Candidate]) -> Witness | None:
        """The first counterexample among points that all ranks know."""
        for disjunct, x in points:
            witness = self.problem.confirmer.confirm(x, disjunct)
            if witness is not None:
                return witness
        return None
