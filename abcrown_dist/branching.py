"""Branch and bound in the main flow: which boxes, in which order and precision, from which roots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch

from abcrown_dist.attack.probe import Probe
from abcrown_dist.bab.clauses import Clauses
from abcrown_dist.bab.crew import Crew
from abcrown_dist.bab.goals import Goals
from abcrown_dist.bab.loop import Loop
from abcrown_dist.bab.root import OneBox, Root
from abcrown_dist.bab.search import Confirm, LoopSettings, Round, Search
from abcrown_dist.bab.split_input import InputSplitter
from abcrown_dist.bab.split_relu import ReluSplitter
from abcrown_dist.bab.splitter import Splitter
from abcrown_dist.bookmark import INPUTS, NEURONS, Keeping, Place, Resumed
from abcrown_dist.boxes import Boxes
from abcrown_dist.options import InputBranching, NeuronBranching
from abcrown_dist.outcome import Outcome
from abcrown_dist.problem import Problem
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.util.errors import LoadError
from abcrown_dist.weights.apart import apart
from abcrown_dist.weights.base import Weights
from abcrown_dist.weights.evaluate import flat_network

_BOXES = 4096  # of a property, put into one search on inputs


class Branching:
    """Searches on the problem of one run.

    Args:
        boxes: with their root bounds.
        confirm: judges counterexamples, on all ranks together.
        show: told of every round, with the domains per second.
    """

    def __init__(
        self,
        problem: Problem,
        boxes: Boxes,
        deadline: Deadline,
        outcome: Outcome,
        keeping: Keeping,
        confirm: Confirm,
        show: Callable[[str], None],
    ) -> None:
        self.problem, self.boxes, self.deadline, self.outcome = problem, boxes, deadline, outcome
        self.keeping, self.confirm, self.show = keeping, confirm, show
        self.crew = Crew(problem.mesh, problem.config.parallel.imbalance)
        self.largest = torch.finfo(problem.model.dtype).max

    def on_inputs(self, step: InputBranching, number: int) -> Search:
        """Search all boxes of the open disjuncts, many at once."""
        weights = apart(self.problem.weights)
        begun = self.keeping.take(number)
        place = Place(number, INPUTS, wanted=set(self.outcome.open))
        self._go_to(place, weights, begun)
        for clauses in self._batches(weights, place, begun):
            goals, clock = Goals.of(clauses, place.wanted), self.deadline.among(weights.group)
            splitter = InputSplitter(weights, clauses.box, goals, self.largest, step.inputs, clock)
            self._explore(splitter, step.loop, step.inputs.slice, place, begun)
            begun = None
        return place.search

    def on_neurons(self, step: NeuronBranching, number: int, take_down: Callable[[Search], None]) -> None:
        """Search box by box, and once more in float64 where leaves are within rounding of proof.

        Args:
            take_down: takes the results of each pass.
        """
        weights, outcome, settings = self.problem.weights, self.outcome, step.relu.bounds
        begun = self.keeping.take(number)
        wanted, before = set(outcome.open), Search()
        if begun is None or not begun.place.precise:
            place = Place(number, NEURONS, wanted=wanted)
            before = self._pass(step, weights, place, self.boxes.open(settings, wanted), begun)
            take_down(before)
            wanted, begun = before.given_up & outcome.open, None
            if before.witness is not None or not wanted or weights.dtype == torch.float64:
                return
        precise = weights.to(torch.float64)  # design rule 7.2
        if precise is None:
            return
        again = Search(rounds=before.rounds, visited=before.visited, verified=before.verified)
        place = Place(number, NEURONS, True, wanted=wanted, search=again)
        self._pass(step, precise, place, self.boxes.bounded(settings, precise, wanted), begun)
        place.search.reason = place.search.reason or before.reason
        take_down(place.search)

    def _pass(
        self,
        step: NeuronBranching,
        weights: Weights,
        place: Place,
        boxes: Iterable[OneBox],
        begun: Resumed | None,
    ) -> Search:
        """One search after the other, on each box that has wanted disjuncts."""
        self._go_to(place, weights, begun)
        own = apart(weights)
        if begun is not None:
            boxes = self._going_on(step, weights, place, begun)
        for box in boxes:
            clauses, clock = box.root.clauses, self.deadline.among(own.group)
            goals = Goals.of(clauses, set(box.disjuncts))
            splitter = ReluSplitter(
                own, clauses.box, box.root.relaxed, goals, self.largest, step.relu, clock
            )
            self._explore(splitter, step.loop, step.relu.slice, place, begun)
            begun = None
        return place.search

    def _go_to(self, place: Place, weights: Weights, begun: Resumed | None) -> None:
        """Make a place that of the run; one that a checkpoint names goes on with what was known there."""
        place.dtype, place.open, place.bounds = str(weights.dtype), self.outcome.open, self.outcome.bounds
        if begun is not None:
            if begun.place.dtype != place.dtype:
                kinds = f"{begun.place.dtype}, not in {place.dtype}"
                raise LoadError(f"the checkpoint's bounds are in {kinds}: see general.double_fp")
            place.wanted, place.done, place.search = begun.place.wanted, begun.place.done, begun.place.search
        if self.keeping.keeper is not None:
            self.keeping.keeper.place = place

    def _going_on(
        self, step: NeuronBranching, weights: Weights, place: Place, begun: Resumed
    ) -> Iterator[OneBox]:
        """The box of a checkpoint with the bounds that its domains rest on, then those that are left."""
        goals = set(begun.course.goals)
        clauses = next(self.boxes.clauses(weights, goals, 1))
        yield OneBox(Root(clauses, begun.root(weights)), tuple(sorted(goals)))
        yield from self.boxes.bounded(step.relu.bounds, weights, place.wanted - place.done - goals)

    def _batches(self, weights: Weights, place: Place, begun: Resumed | None) -> Iterator[Clauses]:
        """Boxes for one search each: that of a checkpoint, then those that are left."""
        left = set(place.wanted)
        if begun is not None:
            goals = set(begun.course.goals)
            yield next(self.boxes.clauses(weights, goals, _BOXES))
            left -= place.done | goals
        yield from self.boxes.clauses(weights, left, _BOXES)

    def _explore(
        self,
        splitter: Splitter,
        settings: LoopSettings,
        slice: int | None,
        place: Place,
        begun: Resumed | None,
    ) -> None:
        """Search on one splitter's goals."""
        search, outcome = place.search, self.outcome
        if search.witness is not None:
            return
        at, visited, domains = self.deadline.elapsed(), search.visited, outcome.domains

        def show(latest: Round) -> None:
            here = latest.visited - visited
            outcome.rounds.append(latest)
            outcome.domains = domains + here
            self.show(latest.line(here / max(latest.seconds - at, 1e-9)))

        weights, clock = splitter.weights, self.deadline.among(splitter.weights.group)
        if self.keeping.restarts:
            settings = replace(settings, batch=max(1, settings.batch >> self.keeping.restarts))
        probe = make_probe(self.problem, weights, clock, slice)
        loop = Loop(
            splitter, settings, self.crew, probe, self.confirm, clock, search, show, self.keeping.keeper
        )
        with torch.no_grad():
            loop.run(None if begun is None else begun.start(splitter, self.crew))
        place.done |= set(splitter.disjuncts)


def make_probe(problem: Problem, weights: Weights, deadline: Deadline, slice: int | None = None) -> Probe:
    """A probe of the problem's property that computes with `weights`."""
    network, seed = flat_network(weights.graph, weights), problem.config.general.seed
    return Probe(network, problem.prop, weights.dtype, seed, deadline, slice)
