"""From configuration to plan: which attacks, bound methods and searches come when, with which settings."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from abcrown_dist.attack.pgd import Settings as AttackSettings
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.config import Config
from abcrown_dist.graph.load_onnx import load_onnx
from abcrown_dist.options import (
    InputBranching,
    NeuronBranching,
    Programs,
    Refinement,
    Step,
    attack_settings,
    bound_settings,
    input_branching,
    neuron_branching,
    plan,
)
from abcrown_dist.spec.property import Property
from abcrown_dist.spec.vnnlib1 import load_vnnlib
from abcrown_dist.weights.local import LocalWeights
from tests import flow
from tests.models import mlp


def problem(folder: Path, inputs: int, width: int, varying: int) -> tuple[LocalWeights, Property]:
    model = mlp(folder / "net.onnx", [inputs, width, 1])
    ranges: list[flow.Range] = [(0, 1) if i < varying else (0, 0) for i in range(inputs)]
    prop = flow.write_property(folder / "p.vnnlib", ranges, 1, "(<= Y_0 0)")
    return LocalWeights(load_onnx(model).graph, torch.float32, torch.device("cpu")), load_vnnlib(prop)


def configure(*words: str) -> Config:
    return flow.configure(Path("net.onnx"), Path("p.vnnlib"), *words)


def names(steps: list[Step]) -> list[str]:
    """Methods by name; an attack by its restarts; a search by what it splits and its bounds."""
    return [_name(step) for step in steps]


def _name(step: Step) -> str:
    if isinstance(step, AttackSettings):
        return f"attack {step.restarts}"
    if isinstance(step, BoundSettings):
        return step.method
    if isinstance(step, NeuronBranching):
        return f"{_few(step)}neurons from {step.relu.bounds.method}"
    if isinstance(step, InputBranching):
        return f"{_few(step)}inputs by {step.inputs.bounds.method}"
    return f"{'refinement' if isinstance(step, Refinement) else 'programs'} from {step.bounds.method}"


def _few(step: NeuronBranching | InputBranching) -> str:
    return "" if step.loop.max_visited == math.inf else "a few "


SPLIT = "--bab.branching.input_split"
FEW = "a few neurons from init-crown"
ALL = "neurons from alpha-crown"
STAGED = ["init-crown", FEW, "alpha-crown", ALL]
BOXES = ["a few inputs by crown", "inputs by crown"]


@pytest.fixture
def wide(tmp_path: Path) -> tuple[LocalWeights, Property]:
    """Too many inputs for forward mode to pay."""
    return problem(tmp_path, 100, 10, 100)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("auto", ["attack 30", "init-crown", FEW, "attack 30", "alpha-crown", ALL]),
        ("before", ["attack 30", *STAGED]),
        ("middle", ["init-crown", "attack 30", FEW, "alpha-crown", ALL]),
        ("after", [*STAGED, "attack 30"]),
        ("skip", STAGED),
    ],
)
def test_the_order(wide: tuple[LocalWeights, Property], order: str, expected: list[str]) -> None:
    assert names(plan(configure("--pgd_order", order), *wide)) == expected


@pytest.mark.parametrize(("width", "restarts", "steps"), [(10, 8, 50), (5000, 2, 20)])
def test_the_first_of_two_attacks_is_short(
    tmp_path: Path, width: int, restarts: int, steps: int
) -> None:
    """On a small network many points cost hardly more than a few."""
    wide = problem(tmp_path, 100, width, 100)
    short, _, _, full, *_ = plan(configure("--pgd_restarts", "8", "--pgd_steps", "70"), *wide)
    assert isinstance(short, AttackSettings) and isinstance(full, AttackSettings)
    assert (short.restarts, short.steps) == (restarts, steps)
    assert (full.restarts, full.steps) == (8, 70)
    short, _, _, full, *_ = plan(configure("--pgd_restarts", "1", "--pgd_steps", "5"), *wide)
    assert short == full


@pytest.mark.parametrize("method", ["ibp", "crown-ibp", "crown", "forward", "init-crown", "alpha-crown"])
def test_one_method_of_the_users_choice(wide: tuple[LocalWeights, Property], method: str) -> None:
    """The search begins with what that method finds, and no other method runs before it."""
    steps = plan(configure("--bound_prop_method", method, "--pgd_order", "skip"), *wide)
    assert names(steps) == [method, f"neurons from {method}"]


@pytest.mark.parametrize(
    ("kind", "last"),
    [
        ("skip", []),
        ("mip", ["programs from alpha-crown"]),
        ("bab-refine", ["refinement from alpha-crown", ALL]),
    ],
)
@pytest.mark.parametrize("inputs", ["auto", "true"])
def test_the_other_complete_verifiers_come_last(
    wide: tuple[LocalWeights, Property], kind: str, last: list[str], inputs: str
) -> None:
    words = ("--pgd_order", "skip", "--complete_verifier", kind, f"{SPLIT}.enable", inputs)
    assert names(plan(configure(*words), *wide)) == ["init-crown", "alpha-crown", *last]
    expected = ["crown-ibp", *(name.replace("alpha-crown", "crown-ibp") for name in last)]
    assert names(plan(configure(*words, "--bound_prop_method", "crown-ibp"), *wide)) == expected


def test_bab_is_what_auto_takes(wide: tuple[LocalWeights, Property]) -> None:
    assert plan(configure("--complete_verifier", "bab"), *wide) == plan(configure(), *wide)


@pytest.mark.parametrize(
    ("varying", "words", "expected"),
    [
        (6, (), ["init-crown", *BOXES]),
        (7, (), ["init-crown", BOXES[0], "alpha-crown", ALL]),
        (20, (), ["init-crown", BOXES[0], "alpha-crown", ALL]),
        (21, (), STAGED),
        (21, (f"{SPLIT}.input_dim_threshold", "21"), ["init-crown", BOXES[0], "alpha-crown", ALL]),
        (21, (f"{SPLIT}.enable", "true"), ["init-crown", *BOXES]),
        (0, (), STAGED),
        (6, (f"{SPLIT}.enable", "false"), STAGED),
        (6, (f"{SPLIT}.input_dim_threshold", "5"), STAGED),
        (6, ("--bound_prop_method", "alpha-crown"), ["alpha-crown", "inputs by crown"]),
        (7, ("--bound_prop_method", "crown"), ["crown", "inputs by crown"]),
        (6, ("--no_incomplete",), BOXES),
        (
            6,
            (f"{SPLIT}.bound_prop_method", "ibp"),
            ["init-crown", "a few inputs by ibp", "inputs by ibp"],
        ),
    ],
)
def test_inputs_are_split_where_few_vary(
    tmp_path: Path, varying: int, words: tuple[str, ...], expected: list[str]
) -> None:
    steps = plan(configure("--pgd_order", "skip", *words), *problem(tmp_path, 30, 4, varying))
    assert names(steps) == expected


@pytest.mark.parametrize(("width", "method"), [(1023, "crown"), (1024, "forward+backward")])
def test_boxes_of_wide_networks_are_bounded_forwards(tmp_path: Path, width: int, method: str) -> None:
    """Unless the user says how."""
    net = problem(tmp_path, 4, width, 4)
    boxes = [f"a few inputs by {method}", f"inputs by {method}"]
    assert names(plan(configure("--pgd_order", "skip"), *net)) == ["forward+alpha-crown", *boxes]
    steps = plan(configure("--pgd_order", "skip", f"{SPLIT}.bound_prop_method", "ibp"), *net)
    assert names(steps)[1:] == ["a few inputs by ibp", "inputs by ibp"]


def test_attacks_come_between_cheap_and_dear_searches_on_inputs(tmp_path: Path) -> None:
    net = problem(tmp_path, 3, 4, 3)
    few, many = BOXES
    assert names(plan(configure(), *net)) == ["attack 30", "init-crown", few, "attack 30", many]
    assert names(plan(configure("--pgd_order", "middle"), *net)) == ["init-crown", "attack 30", few, many]


def test_without_incomplete_methods_a_search_is_all(wide: tuple[LocalWeights, Property]) -> None:
    steps = plan(configure("--no_incomplete", "--pgd_order", "skip"), *wide)
    assert names(steps) == [FEW, ALL]


@pytest.mark.parametrize("order", ["auto", "before", "middle", "after"])
def test_attacks_are_what_is_left_without_bounds(wide: tuple[LocalWeights, Property], order: str) -> None:
    words = ("--pgd_order", order)
    alone = ("--no_incomplete", "--complete_verifier", "skip")
    without_relaxations = plan(configure(*words), *wide, can_bound=False)
    for steps in (without_relaxations, plan(configure(*alone, *words), *wide)):
        assert steps and all(isinstance(step, AttackSettings) for step in steps)


def test_nothing_at_all(wide: tuple[LocalWeights, Property]) -> None:
    assert plan(configure("--pgd_order", "skip"), *wide, can_bound=False) == []


@pytest.mark.parametrize(
    ("inputs", "width", "varying", "words", "forward"),
    [
        (4, 32, 4, (), True),
        (4, 31, 4, (), False),  # too narrow
        (50, 32, 4, (), True),  # fixed inputs do not count
        (4, 32, 4, ("--solver.forward.max_dim", "3"), False),
        (80, 700, 70, (), False),  # more than max_dim
    ],
)
def test_forward_mode_comes_first_where_few_inputs_vary(
    tmp_path: Path, inputs: int, width: int, varying: int, words: tuple[str, ...], forward: bool
) -> None:
    words = ("--pgd_order", "skip", "--complete_verifier", "skip", *words)
    steps = plan(configure(*words), *problem(tmp_path, inputs, width, varying))
    first = ["forward+alpha-crown"] if forward else []
    assert names(steps) == [*first, "init-crown", "alpha-crown"]


def test_a_property_without_disjuncts_has_a_plan(tmp_path: Path) -> None:
    weights, prop = problem(tmp_path, 4, 32, 4)
    empty = Property(prop.num_inputs, prop.num_outputs, ())
    steps = plan(configure("--pgd_order", "skip", "--complete_verifier", "skip"), weights, empty)
    assert names(steps) == ["init-crown", "alpha-crown"]
    assert plan(configure("--pgd_order", "skip"), weights, empty)


def test_settings_reach_the_engine() -> None:
    config = configure(
        *("--crown_batch_size", "7", "--memory_budget", "3MiB", "--compare_crown_with_ibp", "false"),
        *("--init_iteration", "11", "--lr_init_alpha", "0.25", "--solver.alpha-crown.lr_decay", "0.5"),
        *("--early_stop_patience", "4"),
    )
    settings = bound_settings(config, "crown")
    assert isinstance(settings, BoundSettings)
    assert (settings.method, settings.batch_rows, settings.budget) == ("crown", 7, 3 * 2**20)
    assert settings.compare_with_ibp is False
    alpha = settings.alpha
    assert (alpha.iteration, alpha.lr_alpha, alpha.lr_decay, alpha.early_stop_patience) == (11, 0.25, 0.5, 4)


def test_settings_reach_the_attack() -> None:
    config = configure(
        *("--pgd_steps", "3", "--pgd_restarts", "4", "--pgd_alpha", "0.5", "--pgd_lr_decay", "0.75"),
        *("--disable_pgd_early_stop", "--attack_mode", "diversed_PGD"),
    )
    settings = attack_settings(config)
    assert (settings.steps, settings.restarts, settings.alpha, settings.lr_decay) == (3, 4, 0.5, 0.75)
    assert (settings.early_stop, settings.mode) == (False, "diversed_PGD")
    assert attack_settings(configure()).alpha == "auto"


# Settings of searches

LOOP = ("--solver.min_batch_size_ratio", "0.5", "--bab.max_domains", "1e5", "--bab.max_iterations", "9")


def neurons(*words: str) -> NeuronBranching:
    config = configure(*words)
    return neuron_branching(config, bound_settings(config, "crown"))


def test_settings_reach_a_search_on_neurons() -> None:
    step = neurons(
        *("--batch_size", "32", "--iteration", "7", "--lr_alpha", "0.25", "--lr_beta", "0.75"),
        *("--lr_decay", "0.5", "--early_stop_patience", "3", "--bab.pruning_in_iteration_ratio", "0.375"),
        *("--init_iteration", "11", "--lr_init_alpha", "0.125", "--solver.alpha-crown.lr_decay", "0.625"),
        *("--bab.recompute_interm", "true", "--branching_candidates", "5", "--branching_reduceop", "max"),
        *LOOP,
    )
    loop, relu = step.loop, step.relu
    assert (loop.batch, loop.min_batch_ratio, loop.max_domains, loop.max_rounds) == (32, 0.5, 1e5, 9)
    assert loop.max_visited == math.inf
    domain, root = relu.beta, relu.root
    assert (domain.iteration, domain.lr_alpha, domain.lr_beta, domain.lr_decay) == (7, 0.25, 0.75, 0.5)
    assert (domain.early_stop_patience, domain.prune) == (3, 0.375)
    assert (root.iteration, root.lr_alpha, root.lr_decay) == (11, 0.125, 0.625)
    assert relu.bounds.method == "crown"
    assert relu.recompute is not None and relu.recompute.method == "crown"
    assert relu.slice is None
    assert (relu.branching.candidates, relu.branching.reduceop) == (5, "max")


def test_settings_of_a_search_by_default() -> None:
    loop, relu = neurons().loop, neurons().relu
    assert (loop.batch, loop.max_domains, loop.max_rounds) == (64, math.inf, math.inf)
    assert (relu.recompute, relu.slice, relu.beta.prune, relu.branching.method) == (None, None, 0.2, "kfsb")


@pytest.mark.parametrize(
    ("method", "on_neurons", "on_inputs"),
    [
        ("kfsb", "kfsb", "sb"),
        ("fsb", "fsb", "sb"),
        ("babsr", "babsr", "sb"),
        ("sb", "kfsb", "sb"),
        ("naive", "kfsb", "naive"),
    ],
)
def test_the_branching_method(
    wide: tuple[LocalWeights, Property], method: str, on_neurons: str, on_inputs: str
) -> None:
    words = ("--branching_method", method)
    assert neurons(*words).relu.branching.method == on_neurons
    assert input_branching(configure(*words), wide[0]).inputs.method == on_inputs


def test_settings_reach_a_search_on_inputs(wide: tuple[LocalWeights, Property]) -> None:
    words = (f"{SPLIT}.batch_size", "40", f"{SPLIT}.clip", "false", f"{SPLIT}.bound_prop_method", "ibp")
    step = input_branching(configure(*words, *LOOP), wide[0])
    loop = step.loop
    assert (loop.batch, loop.min_batch_ratio, loop.max_domains, loop.max_rounds) == (40, 0.5, 1e5, 9)
    assert (step.inputs.clip, step.inputs.bounds.method, step.inputs.slice) == (False, "ibp", None)
    assert input_branching(configure(), wide[0]).inputs.clip is True


def test_fewer_boxes_at_once_where_they_take_more(tmp_path: Path) -> None:
    sizes = []
    for width in (4, 20_000, 2_000_000):
        weights, _ = problem(tmp_path, 1, width, 1)
        sizes.append(input_branching(configure(), weights).loop.batch)
    assert sizes[0] == 1 << 15
    assert 16 < sizes[1] < sizes[0]
    assert sizes[2] == 16


def test_forced_synchronous_work_comes_in_slices_and_nothing_leaves_early(
    wide: tuple[LocalWeights, Property],
) -> None:
    """An eighth of both children of a batch, and at least four."""
    forced = ("--bab.force_synchronous", "true")
    for batch, size in ((64, 16), (4, 4), (1, 4), (33, 9)):
        relu = neurons(*forced, "--batch_size", str(batch)).relu
        assert (relu.slice, relu.beta.prune, relu.root.prune) == (size, None, None)
    words = (*forced, f"{SPLIT}.batch_size", "40")
    assert input_branching(configure(*words), wide[0]).inputs.slice == 10
    assert neurons("--disable_pruning_in_iteration").relu.beta.prune is None


def test_settings_reach_the_programs(wide: tuple[LocalWeights, Property]) -> None:
    words = ("--pgd_order", "skip", "--bound_prop_method", "crown", "--complete_verifier")
    mip = ("--solver.mip.refine_neuron_timeout", "2.5", "--solver.mip.refine_neuron_time_percentage", "0.25")
    _, refinement, search = plan(configure(*words, "bab-refine", *mip), *wide)
    assert isinstance(refinement, Refinement) and isinstance(search, NeuronBranching)
    assert (refinement.refine_neuron_timeout, refinement.refine_neuron_time_percentage) == (2.5, 0.25)
    assert refinement.bounds == search.relu.bounds
    _, programs = plan(configure(*words, "mip", "--crown_batch_size", "7"), *wide)
    assert isinstance(programs, Programs)
    assert (programs.bounds.method, programs.bounds.batch_rows) == ("crown", 7)
