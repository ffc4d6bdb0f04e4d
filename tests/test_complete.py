"""Complete verification against exact answers by mixed-integer programming.

Every case is run on both sides of its exact minimum, so that half of all verdicts are `sat`. Attack and
bounds over the whole box are off in most runs: they would hide the search.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest

from abcrown_dist.spec.property import Verdict
from tests.searches import FAMILIES, MOST_UNSTABLE, Case, draw, search

NEURONS: dict[str, Any] = {"bab.branching.input_split.enable": False}
INPUTS: dict[str, Any] = {"bab.branching.input_split.enable": True}
# Few steps leave more to the search, and cost less.
SHORT: dict[str, Any] = {"solver.alpha-crown.iteration": 5, "solver.beta-crown.iteration": 8}
BARE: dict[str, Any] = {"attack.pgd_order": "skip", "general.enable_incomplete_verification": False, **SHORT}

SEARCHES: dict[str, dict[str, Any]] = {
    "kfsb": NEURONS,
    "babsr": {**NEURONS, "bab.branching.method": "babsr"},
    "fsb_max": {**NEURONS, "bab.branching.method": "fsb", "bab.branching.reduceop": "max"},
    "one_by_one": {**NEURONS, "bab.branching.method": "babsr", "solver.batch_size": 1},
    "several_levels": {**NEURONS, "bab.branching.method": "babsr", "solver.min_batch_size_ratio": 1.0},
    "recomputed": {**NEURONS, "bab.recompute_interm": True, "solver.bound_prop_method": "crown"},
    "synchronous": {**NEURONS, "bab.force_synchronous": True},
    "from_intervals": {**NEURONS, "solver.bound_prop_method": "crown-ibp"},
    "sensitive": INPUTS,
    "naive": {**INPUTS, "bab.branching.method": "naive"},
    "box_by_box": {**INPUTS, "solver.min_batch_size_ratio": 0.5, "bab.branching.input_split.batch_size": 1},
    "unclipped": {**INPUTS, "bab.branching.input_split.clip": False},
    "slopes": {**INPUTS, "bab.branching.input_split.bound_prop_method": "init-crown"},
    "boxes_by_intervals": {**INPUTS, "bab.branching.input_split.bound_prop_method": "ibp"},
    "synchronous_boxes": {**INPUTS, "bab.force_synchronous": True},
}
WHOLE: dict[str, dict[str, Any]] = {
    "neurons": NEURONS,
    "inputs": INPUTS,
    "automatic": {},
    "no_attack": {"attack.pgd_order": "skip"},
    "attack_first": {**NEURONS, "attack.pgd_order": "before"},
    "double": {**NEURONS, "general.double_fp": True},
}
ONE_A_ROUND = {"one_by_one", "box_by_box"}  # slow, so that their questions are easier
PAIRS = [
    (family, name)
    for family in FAMILIES
    for name in SEARCHES
    if name != "box_by_box" or family in ("mlp", "leaky", "residual")
]


@cache
def small_case(family: str, seed: int) -> Case:
    return draw(family, seed, rows=2, disjuncts=2, most=6)


def margins(case: Case, seed: int, satisfiable: bool, least: float = 5e-4) -> list[float]:
    """Every disjunct by `least` to 0.1 of its scale below fulfilment, and one of them above if wanted."""
    random = np.random.default_rng([seed, len(case.disjuncts)])
    sizes = 10.0 ** random.uniform(np.log10(least), np.log10(0.1), len(case.disjuncts))
    signs = -np.ones(len(case.disjuncts))
    if satisfiable:
        signs[random.integers(len(signs))] = 1
    return [float(value) for value in signs * sizes]


def decide(case: Case, seed: int, options: Mapping[str, Any], least: float = 5e-4) -> tuple[int, int]:
    """Check the verdicts on both sides of the exact answer; domains that `unsat` and `sat` took."""
    domains = []
    for expected in (Verdict.UNSAT, Verdict.SAT):
        prop = case.property(margins(case, seed, expected is Verdict.SAT, least))
        outcome = search(case, prop, options)
        assert outcome.verdict is expected, outcome.reason
        domains.append(outcome.domains)
    return domains[0], domains[1]


@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_the_search_gives_the_exact_answer(family: str, name: str) -> None:
    """Nothing but branch and bound, which has to branch for most of it."""
    least = 0.05 if name in ONE_A_ROUND else 5e-4
    found = [decide(small_case(family, s), s, {**BARE, **SEARCHES[name]}, least) for s in (1, 2)]
    assert any(unsat > 1 for unsat, _ in found)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_flow_gives_the_exact_answer(family: str, name: str) -> None:
    decide(small_case(family, 3), 3, {**SHORT, **WHOLE[name]})


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_searches_in_many_networks_give_the_exact_answer(family: str, name: str) -> None:
    """With up to `MOST_UNSTABLE` unstable neurons and three disjuncts of three rows."""
    found = []
    least = 0.05 if name in ONE_A_ROUND else 1e-3
    for seed in range(100, 108):
        case = draw(family, seed)
        assert case.unstable <= MOST_UNSTABLE
        found.append(decide(case, seed, {**BARE, **SEARCHES[name]}, least))
    assert 2 * sum(unsat > 1 for unsat, _ in found) > len(found)


@pytest.mark.parametrize("options", [NEURONS, INPUTS], ids=["neurons", "inputs"])
def test_a_second_search_takes_the_same_course(options: Mapping[str, Any]) -> None:
    """Same seed, same tree."""
    case = small_case("convolutional", 1)
    prop = case.property(margins(case, 1, False))
    courses = []
    for _ in range(2):
        rounds = search(case, prop, {**BARE, **options}).rounds
        courses.append([(r.visited, r.verified, r.open, r.worst, r.depth) for r in rounds])
    assert courses[0] == courses[1]
    assert len(courses[0]) > 2


@pytest.mark.parametrize("options", [NEURONS, INPUTS], ids=["neurons", "inputs"])
def test_limits_end_a_search_without_an_answer(options: Mapping[str, Any]) -> None:
    case = small_case("convolutional", 1)
    prop = case.property(margins(case, 1, False))
    for limit, reason in (({"bab.max_iterations": 1}, "rounds"), ({"bab.max_domains": 1.0}, "domains")):
        outcome = search(case, prop, {**BARE, **options, **limit})
        assert outcome.verdict is Verdict.UNKNOWN
        assert reason in outcome.reason
