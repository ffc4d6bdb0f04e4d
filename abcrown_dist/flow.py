"""The steps of the main flow: each attacks or bounds what is still open, and takes down what it finds."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from abcrown_dist.attack.pgd import Settings as AttackSettings
from abcrown_dist.attack.pgd import find_counterexamples
from abcrown_dist.attack.probe import Probe
from abcrown_dist.bab.clauses import Clauses, batches
from abcrown_dist.bab.goals import Goals
from abcrown_dist.bab.loop import Loop, LoopSettings, Search
from abcrown_dist.bab.root import OneBox, Root, refute
from abcrown_dist.bab.rounds import Round
from abcrown_dist.bab.split_input import InputSplitter
from abcrown_dist.bab.split_relu import ReluSplitter
from abcrown_dist.bab.splitter import Splitter
from abcrown_dist.bounds.propagate import bound_intermediate
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.config import Config
from abcrown_dist.options import InputBranching, NeuronBranching, Programs, Refinement, Step
from abcrown_dist.problem import Problem
from abcrown_dist.report.progress import Progress
from abcrown_dist.report.summary import ClauseBound
from abcrown_dist.spec.property import Verdict, Witness
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.weights.base import Weights
from abcrown_dist.weights.evaluate import flat_network

_log = logging.getLogger(__name__)
_BOXES = 4096  # of a property, put into one search on inputs


@dataclass
class Outcome:
    """What is known of an instance; grows while the flow goes on and is its result."""

    verdict: Verdict = Verdict.UNKNOWN
    reason: str = ""
    witness: Witness | None = None
    open: set[int] = field(default_factory=set)  # disjuncts that nothing has refuted yet
    bounds: dict[int, ClauseBound] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)  # of branch and bound
    domains: int = 0  # that it bounded


class Flow:
    """Takes steps on one problem.

    Attributes:
        roots: bounds of the boxes that the last bound method left open, which a search begins with.
        given_up: why the last search ended without an answer; empty if it did not.
    """

    def __init__(
        self, config: Config, problem: Problem, deadline: Deadline, progress: Progress, outcome: Outcome
    ) -> None:
        self.config, self.problem, self.deadline = config, problem, deadline
        self.progress, self.outcome = progress, outcome
        self.largest = torch.finfo(problem.model.dtype).max
        self.roots: list[Root] = []
        self.given_up = ""

    def take(self, step: Step) -> Witness | None:
        """Take one step; a confirmed counterexample ends the flow."""
        if isinstance(step, AttackSettings):
            with self.progress.phase("attack"):
                return self._attack(step)
        if isinstance(step, BoundSettings):
            with self.progress.phase(step.method):
                return self._bound(step)
        if isinstance(step, InputBranching):
            with self.progress.phase("branch on inputs"):
                return self._branch_on_inputs(step)
        if isinstance(step, NeuronBranching):
            with self.progress.phase("branch on neurons"):
                return self._branch_on_neurons(step)
        if isinstance(step, Refinement):
            with self.progress.phase("refine"):
                return self._refine(step)
        with self.progress.phase("mip"):
            return self._solve_programs(step)

    def _attack(self, settings: AttackSettings) -> Witness | None:
        weights = self.problem.weights
        candidates = find_counterexamples(
            flat_network(weights.graph, weights),
            self.problem.prop,
            settings,
            seed=self.config.general.seed,
            device=weights.device,
            dtype=weights.dtype,
            deadline=self.deadline,
            only=self.outcome.open,
        )
        return self._first_confirmed((c.disjunct, c.x) for c in candidates)

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
        found = refute(
            weights,
            self.problem.prop,
            sorted(wanted),
            settings,
            batch_size=self.config.solver.batch_size,
            deadline=self.deadline,
            model_dtype=self.problem.model.dtype,
        )
        for index, margins in found.margins.items():
            refuted = index in found.refuted
            self.outcome.bounds[index] = ClauseBound(index, margins, refuted, settings.method)
        self.outcome.open -= found.refuted
        if weights is self.problem.weights:
            self.roots = found.roots
        return found.doubtful, found.suspects

    def _branch_on_inputs(self, step: InputBranching) -> Witness | None:
        search = Search()
        for clauses in self._clauses(self.problem.weights, self.outcome.open, _BOXES):
            goals = Goals.of(clauses, self.outcome.open)
            splitter = InputSplitter(
                self.problem.weights, clauses.box, goals, self.largest, step.inputs, self.deadline
            )
            self._explore(splitter, step.loop, search)
        return self._take_down(search, "input splitting")

    def _branch_on_neurons(self, step: NeuronBranching) -> Witness | None:
        """Search, and once more in float64 where leaves are within rounding of proof (design rule 7.2)."""
        weights = self.problem.weights
        search = Search()
        self._search_neurons(step, weights, self._open_boxes(step.relu.bounds), search)
        witness = self._take_down(search, "beta-crown")
        doubtful = search.given_up & self.outcome.open
        precise = weights.to(torch.float64) if doubtful and weights.dtype != torch.float64 else None
        if witness is not None or precise is None:
            return witness
        again = Search(rounds=search.rounds, visited=search.visited, verified=search.verified)
        self._search_neurons(step, precise, self._bounded_boxes(step.relu.bounds, precise, doubtful), again)
        witness = self._take_down(again, "beta-crown")
        self.given_up = self.given_up or search.reason
        return witness

    def _search_neurons(
        self, step: NeuronBranching, weights: Weights, boxes: Iterable[OneBox], search: Search
    ) -> None:
        for box in boxes:
            clauses = box.root.clauses
            splitter = ReluSplitter(
                weights,
                clauses.box,
                box.root.relaxed,
                Goals.of(clauses, set(box.disjuncts)),
                self.largest,
                step.relu,
                self.deadline,
            )
            self._explore(splitter, step.loop, search)

    def _solve_programs(self, step: Programs) -> Witness | None:
        from abcrown_dist.programs import WholeBox  # scipy takes longer to import than most runs

        outcome, prop = self.outcome, self.problem.prop
        for box in self._open_boxes(step.bounds):
            try:
                programs = WholeBox(self.problem.weights, box, self.largest)
            except ValueError as error:
                self.given_up = str(error)
                continue
            for index in box.disjuncts:
                self.deadline.check()
                found = programs.decide(prop.disjuncts[index], self.deadline, self.config.general.seed)
                if found.outcome == "refuted":
                    outcome.bounds[index] = ClauseBound(index, [found.bound], True, "mip")
                    outcome.open.discard(index)
                elif found.point is not None:
                    witness = self._probe()([index], torch.from_numpy(found.point)[None])
                    if witness is not None:
                        return witness
                self.given_up = found.reason if index in outcome.open else self.given_up
        return None

    def _refine(self, step: Refinement) -> Witness | None:
        """Tighten the roots; the search that follows begins with them."""
        from abcrown_dist.programs import refined

        boxes = list(self._open_boxes(step.bounds))
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
        self.roots = roots
        return None

    def _open_boxes(self, settings: BoundSettings) -> Iterator[OneBox]:
        """What the last bound method left, or bounds computed now."""
        if not self.roots:
            yield from self._bounded_boxes(settings, self.problem.weights, self.outcome.open)
        for root in self.roots:
            yield from OneBox.each(root, self.outcome.open)

    def _bounded_boxes(
        self, settings: BoundSettings, weights: Weights, wanted: set[int]
    ) -> Iterator[OneBox]:
        for clauses in self._clauses(weights, wanted, self.config.solver.batch_size):
            with torch.no_grad():  # not around the yield: it would hold for whoever asks for the next one
                relaxed = bound_intermediate(weights, clauses.box, settings, self.deadline)
            yield from OneBox.each(Root(clauses, relaxed), wanted)

    def _clauses(self, weights: Weights, wanted: set[int], boxes: int) -> Iterator[Clauses]:
        yield from batches(self.problem.prop, weights, sorted(wanted), boxes, self.problem.model.dtype)

    def _explore(self, splitter: Splitter, settings: LoopSettings, search: Search) -> None:
        if search.witness is not None:
            return
        begun, visited, domains = self.deadline.elapsed(), search.visited, self.outcome.domains

        def show(latest: Round) -> None:
            here = latest.visited - visited
            self.outcome.rounds.append(latest)
            self.outcome.domains = domains + here
            self.progress.update(latest.line(here / max(latest.seconds - begun, 1e-9)))

        with torch.no_grad():
            Loop(splitter, settings, self._probe(), self.deadline, search, show).run()

    def _probe(self) -> Probe:
        weights = self.problem.weights

        def agree(hits: list[int]) -> list[int]:
            return weights.group.first(lambda: hits)

        return Probe(
            flat_network(weights.graph, weights),
            self.problem.prop,
            self.problem.confirmer.confirm,
            weights.dtype,
            self.config.general.seed,
            self.deadline,
            agree,
        )

    def _take_down(self, search: Search, method: str) -> Witness | None:
        for index in search.refuted & self.outcome.open:
            self.outcome.bounds[index] = ClauseBound(index, [search.margins[index]], True, method)
        self.outcome.open -= search.refuted
        self.given_up = search.reason
        self.problem.confirmer.release()
        return search.witness

    def _first_confirmed(self, points: Iterable[tuple[int, np.ndarray]]) -> Witness | None:
        confirmer = self.problem.confirmer
        try:
            for disjunct, x in points:
                witness = confirmer.confirm(x, disjunct)
                if witness is not None:
                    return witness
            return None
        finally:
            confirmer.release()
