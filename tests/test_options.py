"""From configuration to plan: which attacks and bound methods come in which order, with which settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from abcrown_dist.attack.pgd import Settings as AttackSettings
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.config import Config
from abcrown_dist.graph.load_onnx import load_onnx
from abcrown_dist.options import Step, attack_settings, bound_settings, plan
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
    """Methods by name; an attack by its restarts."""
    return [f"attack {step.restarts}" if isinstance(step, AttackSettings) else step.method for step in steps]


@pytest.fixture
def wide(tmp_path: Path) -> tuple[LocalWeights, Property]:
    """Too many inputs for forward mode to pay."""
    return problem(tmp_path, 100, 10, 100)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("auto", ["attack 2", "init-crown", "attack 30", "alpha-crown"]),
        ("before", ["attack 30", "init-crown", "alpha-crown"]),
        ("middle", ["init-crown", "attack 30", "alpha-crown"]),
        ("after", ["init-crown", "alpha-crown", "attack 30"]),
        ("skip", ["init-crown", "alpha-crown"]),
    ],
)
def test_the_order(wide: tuple[LocalWeights, Property], order: str, expected: list[str]) -> None:
    assert names(plan(configure("--pgd_order", order), *wide)) == expected


def test_the_first_of_two_attacks_is_short(wide: tuple[LocalWeights, Property]) -> None:
    short, _, full, _ = plan(configure("--pgd_restarts", "8", "--pgd_steps", "50"), *wide)
    assert isinstance(short, AttackSettings) and isinstance(full, AttackSettings)
    assert (short.restarts, short.steps) == (2, 20)
    assert (full.restarts, full.steps) == (8, 50)
    short, _, full, _ = plan(configure("--pgd_restarts", "1", "--pgd_steps", "5"), *wide)
    assert short == full


def test_one_method_of_the_users_choice(wide: tuple[LocalWeights, Property]) -> None:
    steps = plan(configure("--bound_prop_method", "crown-ibp", "--pgd_order", "skip"), *wide)
    assert names(steps) == ["crown-ibp"]


@pytest.mark.parametrize("order", ["auto", "before", "middle", "after"])
def test_attacks_are_what_is_left_without_bounds(wide: tuple[LocalWeights, Property], order: str) -> None:
    words = ("--pgd_order", order)
    without_relaxations = plan(configure(*words), *wide, can_bound=False)
    for steps in (without_relaxations, plan(configure("--no_incomplete", *words), *wide)):
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
    steps = plan(configure("--pgd_order", "skip", *words), *problem(tmp_path, inputs, width, varying))
    first = ["forward+alpha-crown"] if forward else []
    assert names(steps) == [*first, "init-crown", "alpha-crown"]


def test_a_property_without_disjuncts_has_a_plan(tmp_path: Path) -> None:
    weights, prop = problem(tmp_path, 4, 32, 4)
    empty = Property(prop.num_inputs, prop.num_outputs, ())
    assert names(plan(configure("--pgd_order", "skip"), weights, empty)) == ["init-crown", "alpha-crown"]


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
