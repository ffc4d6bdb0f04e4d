"""From the user's configuration to the narrow settings of each part: automatic choices live here."""

from __future__ import annotations

import dataclasses

from abcrown_dist.attack.pgd import Settings as AttackSettings
from abcrown_dist.bab.clauses import batches
from abcrown_dist.bounds.alpha import AlphaSettings
from abcrown_dist.bounds.forward import varying_inputs
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.bounds.types import preactivations
from abcrown_dist.config import Config
from abcrown_dist.spec.property import Property
from abcrown_dist.weights.base import Weights

Step = BoundSettings | AttackSettings

# Forward mode keeps two forms of K coefficients where a backward pass starts up to two rows for
# every neuron of the widest layer: it has to win by this factor, since its bounds are looser.
_FORWARD_GAIN = 8


def plan(config: Config, weights: Weights, prop: Property, can_bound: bool = True) -> list[Step]:
    """Attacks and bound methods in the order in which they are tried on what is still open.

    Args:
        can_bound: whether every op has a relaxation; if not, the plan holds attacks only.
    """
    methods = _bound_steps(config, weights, prop) if can_bound else []
    full = attack_settings(config)
    short = dataclasses.replace(full, restarts=min(full.restarts, 2), steps=min(full.steps, 20))
    orders: dict[str, list[Step]] = {
        "auto": [short, *methods[:1], full, *methods[1:]],
        "before": [full, *methods],
        "middle": [*methods[:1], full, *methods[1:]],
        "after": [*methods, full],
        "skip": [*methods],
    }
    return orders[config.attack.pgd_order]


def attack_settings(config: Config) -> AttackSettings:
    """The full attack that the configuration asks for."""
    attack = config.attack
    return AttackSettings(
        steps=attack.pgd_steps,
        restarts=attack.pgd_restarts,
        alpha=attack.pgd_alpha,  # type: ignore[arg-type]  # a float or "auto", by its kind
        lr_decay=attack.pgd_lr_decay,
        early_stop=attack.pgd_early_stop,
        mode=attack.attack_mode,
    )


def bound_settings(config: Config, method: str) -> BoundSettings:
    """Settings of one bound method."""
    solver = config.solver
    return BoundSettings(
        method=method,
        alpha=AlphaSettings(
            iteration=solver.alpha_crown.iteration,
            lr_alpha=solver.alpha_crown.lr_alpha,
            lr_decay=solver.alpha_crown.lr_decay,
            early_stop_patience=solver.early_stop_patience,
        ),
        compare_with_ibp=solver.crown.compare_crown_with_ibp,
        batch_rows=solver.crown.batch_size,
        budget=solver.crown.memory_budget,
        gathered=config.parallel.mode == "fsdp",
        shard_rows=config.parallel.shard_rows,
    )


def _bound_steps(config: Config, weights: Weights, prop: Property) -> list[Step]:
    if not config.general.enable_incomplete_verification:
        return []
    method = config.solver.bound_prop_method
    names = [method]
    if method == "auto":
        # Cheap ones first: optimising the property's own rows alone costs little more than CROWN.
        first = ["forward+alpha-crown"] if _forward_pays(config, weights, prop) else []
        names = [*first, "init-crown", "alpha-crown"]
    return [bound_settings(config, name) for name in names]


def _forward_pays(config: Config, weights: Weights, prop: Property) -> bool:
    """Whether so few inputs vary that forward mode is far cheaper than backward passes."""
    first = next(batches(prop, weights, range(len(prop.disjuncts)), config.solver.batch_size), None)
    if first is None:
        return False
    varying = varying_inputs(weights, first.box)
    widest = max((weights.graph[name].size for name in preactivations(weights.graph)), default=0)
    return varying <= config.solver.forward.max_dim and _FORWARD_GAIN * varying <= widest
