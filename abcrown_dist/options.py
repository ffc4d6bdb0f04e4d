"""From the user's configuration to the narrow settings of each part: automatic choices live here."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from abcrown_dist.attack.pgd import Settings as AttackSettings
from abcrown_dist.bab.clauses import batches
from abcrown_dist.bab.heuristics import Branching
from abcrown_dist.bab.loop import LoopSettings
from abcrown_dist.bab.split_input import InputSettings
from abcrown_dist.bab.split_relu import ReluSettings
from abcrown_dist.bounds.alpha import AlphaSettings
from abcrown_dist.bounds.beta import BetaSettings
from abcrown_dist.bounds.chunks import state_bytes
from abcrown_dist.bounds.forward import varying_inputs
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.bounds.types import preactivations
from abcrown_dist.config import Config
from abcrown_dist.spec.property import Property
from abcrown_dist.weights.base import Weights

# Forward mode keeps two forms of K coefficients where a backward pass starts up to two rows for
# every neuron of the widest layer: it has to win by this factor, since its bounds are looser.
_FORWARD_GAIN = 8
_QUICK_DOMAINS = 256  # domains worth a try before slopes of all layers are optimised
_FEW_INPUTS = 6  # so few that halving boxes is tried before splitting neurons
_BOX_BYTES = 256 << 20  # of the bounds of one batch of boxes
_SLICES = 8  # of a batch's children, under bab.force_synchronous


@dataclass(frozen=True)
class NeuronBranching:
    """Branch and bound on neurons."""

    loop: LoopSettings
    relu: ReluSettings


@dataclass(frozen=True)
class InputBranching:
    """Branch and bound on inputs."""

    loop: LoopSettings
    inputs: InputSettings


@dataclass(frozen=True)
class Programs:
    """One mixed-integer program for every open disjunct."""

    bounds: BoundSettings


@dataclass(frozen=True)
class Refinement:
    """Pre-activations tightened by mixed-integer programs; names as in `solver.mip`."""

    bounds: BoundSettings
    refine_neuron_timeout: float
    refine_neuron_time_percentage: float


Step = BoundSettings | AttackSettings | NeuronBranching | InputBranching | Programs | Refinement


def plan(config: Config, weights: Weights, prop: Property, can_bound: bool = True) -> list[Step]:
    """Attacks, bound methods and searches in the order in which they are tried on what is still open.

    Args:
        can_bound: whether every op has a relaxation; if not, the plan holds attacks only.
    """
    methods = _incomplete_steps(config, weights, prop) if can_bound else []
    full = attack_settings(config)
    short = dataclasses.replace(full, restarts=min(full.restarts, 2), steps=min(full.steps, 20))
    orders: dict[str, list[Step]] = {
        "auto": [short, *methods[:1], full, *methods[1:]],
        "before": [full, *methods],
        "middle": [*methods[:1], full, *methods[1:]],
        "after": [*methods, full],
        "skip": [*methods],
    }
    steps = orders[config.attack.pgd_order]
    return _with_searches(config, weights, prop, steps) if can_bound else steps


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


def _incomplete_steps(config: Config, weights: Weights, prop: Property) -> list[Step]:
    if not config.general.enable_incomplete_verification:
        return []
    method = config.solver.bound_prop_method
    names = [method]
    if method == "auto":
        # Cheap ones first: optimising the property's own rows alone costs little more than CROWN.
        first = ["forward+alpha-crown"] if _forward_pays(config, weights, prop) else []
        names = [*first, "init-crown", "alpha-crown"]
    return [bound_settings(config, name) for name in names]


def _with_searches(config: Config, weights: Weights, prop: Property, steps: list[Step]) -> list[Step]:
    """Put the complete methods after, and for `auto` between, the incomplete ones."""
    kind = config.general.complete_verifier
    bounds = bound_settings(config, _intermediate(config))
    if kind == "skip":
        return steps
    if kind == "mip":
        return [*steps, Programs(bounds)]
    neurons = neuron_branching(config, bounds)
    if kind == "bab-refine":
        mip = config.solver.mip
        refinement = Refinement(bounds, mip.refine_neuron_timeout, mip.refine_neuron_time_percentage)
        return [*steps, refinement, neurons]
    varying = _varying(config, weights, prop)
    split = config.bab.branching.input_split
    quick = dataclasses.replace(
        neuron_branching(config, bound_settings(config, "init-crown")),
        loop=dataclasses.replace(neurons.loop, max_visited=_QUICK_DOMAINS),
    )
    staged = config.solver.bound_prop_method == "auto"
    if split.enable is True or (split.enable == "auto" and varying <= split.input_dim_threshold):
        boxes = input_branching(config, weights)
        few = split.enable is True or varying <= _FEW_INPUTS
        return [*_without_last_bounds(steps, staged), *([] if few or not staged else [quick]), boxes]
    if not staged:
        return [*steps, neurons]
    last = next((i for i, step in enumerate(steps) if _is_bounds(step, "alpha-crown")), len(steps))
    return [*steps[:last], quick, *steps[last:], neurons]


def _is_bounds(step: Step, method: str) -> bool:
    return isinstance(step, BoundSettings) and step.method == method


def _without_last_bounds(steps: list[Step], staged: bool) -> list[Step]:
    """Where boxes will be halved, optimising the slopes of all layers over the whole box does not pay."""
    return [step for step in steps if not (staged and _is_bounds(step, "alpha-crown"))]


def _intermediate(config: Config) -> str:
    """Method for the pre-activations at the root of a search on neurons."""
    method = config.solver.bound_prop_method
    return "alpha-crown" if method == "auto" else method


def neuron_branching(config: Config, bounds: BoundSettings) -> NeuronBranching:
    """Settings of a search on neurons from a root bounded by `bounds`."""
    solver, bab = config.solver, config.bab
    beta, synchronous = solver.beta_crown, bab.force_synchronous
    domain = BetaSettings(
        iteration=beta.iteration,
        lr_alpha=beta.lr_alpha,
        lr_beta=beta.lr_beta,
        lr_decay=beta.lr_decay,
        early_stop_patience=solver.early_stop_patience,
        prune=bab.pruning_in_iteration_ratio if bab.pruning_in_iteration and not synchronous else None,
    )
    root = dataclasses.replace(
        domain,
        iteration=solver.alpha_crown.iteration,
        lr_alpha=solver.alpha_crown.lr_alpha,
        lr_decay=solver.alpha_crown.lr_decay,
    )
    method = bab.branching.method
    branching = Branching(
        method=method if method in ("babsr", "fsb") else "kfsb",
        candidates=bab.branching.candidates,
        reduceop=bab.branching.reduceop,
    )
    relu = ReluSettings(
        beta=domain,
        root=root,
        bounds=bounds,
        branching=branching,
        recompute=bab.recompute_interm,
        slice=_slice(solver.batch_size) if synchronous else None,
    )
    return NeuronBranching(_loop(config, solver.batch_size), relu)


def input_branching(config: Config, weights: Weights) -> InputBranching:
    """Settings of a search on inputs."""
    split = config.bab.branching.input_split
    method = "crown" if split.bound_prop_method == "auto" else split.bound_prop_method
    batch = split.batch_size
    if not isinstance(batch, int):
        # The bounds of all neurons, and the rows that start from the widest layer's.
        batch = max(16, min(1 << 15, _BOX_BYTES // max(1, 4 * state_bytes(weights.graph, weights.dtype, 1))))
    inputs = InputSettings(
        bounds=bound_settings(config, method),
        method="naive" if config.bab.branching.method == "naive" else "sb",
        clip=split.clip,
        slice=_slice(batch) if config.bab.force_synchronous else None,
    )
    return InputBranching(_loop(config, batch), inputs)


def _slice(batch: int) -> int:
    return max(1, -(-2 * batch // _SLICES))


def _loop(config: Config, batch: int) -> LoopSettings:
    bab = config.bab
    return LoopSettings(
        batch=batch,
        min_batch_ratio=config.solver.min_batch_size_ratio,
        max_domains=bab.max_domains,
        max_rounds=math.inf if bab.max_iterations < 0 else bab.max_iterations,
    )


def _varying(config: Config, weights: Weights, prop: Property) -> int:
    """Number of inputs that vary, in the first batch of boxes."""
    first = next(batches(prop, weights, range(len(prop.disjuncts)), config.solver.batch_size), None)
    return 0 if first is None else varying_inputs(weights, first.box)


def _forward_pays(config: Config, weights: Weights, prop: Property) -> bool:
    """Whether so few inputs vary that forward mode is far cheaper than backward passes."""
    varying = _varying(config, weights, prop)
    widest = max((weights.graph[name].size for name in preactivations(weights.graph)), default=0)
    return 0 < varying <= config.solver.forward.max_dim and _FORWARD_GAIN * varying <= widest
