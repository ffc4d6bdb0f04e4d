"""From the user's configuration to the narrow settings of each part: automatic choices live here."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from abcrown_dist.attack.pgd import Settings as AttackSettings
from abcrown_dist.bab.clauses import batches
from abcrown_dist.bab.heuristics import Branching
from abcrown_dist.bab.search import LoopSettings
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
_QUICK_BOXES = 8192  # likewise
_SMALL = 4096  # neurons of a network on which many points cost hardly more than a few
_FEW_INPUTS = 6  # so few that neurons are not split at all
_WIDE = 1024  # neurons of a layer from which on backward passes over every box are too dear
_BOX_BYTES = 256 << 20  # of the bounds of one batch of boxes
_SLICES = 8  # of a batch's children, under bab.force_synchronous
_FIXED_ROWS = 64  # of a chunk, likewise
_LEAST_SLICE = 4  # domains; fewer take as long


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
    first: list[Step] = []  # what is cheap: one bound method, a limited search
    rest: list[Step] = []
    if can_bound:
        first, rest = _Proofs(config, weights, prop).steps()
    full = attack_settings(config)
    small = sum(node.size for node in weights.graph) <= _SMALL
    restarts, steps = (full.restarts, 50) if small else (2, 20)
    short = dataclasses.replace(full, restarts=min(full.restarts, restarts), steps=min(full.steps, steps))
    orders: dict[str, list[Step]] = {
        "auto": [short, *first, full, *rest],
        "before": [full, *first, *rest],
        "middle": [*first[:1], full, *first[1:], *rest],
        "after": [*first, *rest, full],
        "skip": [*first, *rest],
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


class _Proofs:
    """Which bound methods and searches to try, in which order.

    With `bound_prop_method: auto`, cheap ones come first: optimising slopes for the property's own rows
    costs little more than CROWN, a search of a few hundred domains often less than optimising the slopes
    of all layers.
    """

    def __init__(self, config: Config, weights: Weights, prop: Property) -> None:
        self.config, self.weights = config, weights
        self.varying = _varying(config, weights, prop)
        self.widest = max((weights.graph[name].size for name in preactivations(weights.graph)), default=0)
        few = 0 < self.varying <= config.solver.forward.max_dim
        self.forward = few and _FORWARD_GAIN * self.varying <= self.widest
        self.automatic = config.solver.bound_prop_method == "auto"

    def steps(self) -> tuple[list[Step], list[Step]]:
        """The cheap ones, and the others."""
        kind = self.config.general.complete_verifier
        bounds = self._incomplete()
        if kind == "skip":
            return bounds[:1], bounds[1:]
        if kind in ("mip", "bab-refine"):
            return bounds[:1], [*bounds[1:], *self._programs(kind)]
        if self._inputs_are_split():
            return self._on_inputs(bounds)
        neurons = self._neurons(self._root())
        if not self.automatic:
            return bounds[:1], [*bounds[1:], neurons]
        return [*bounds[:-1], _limited(self._neurons("init-crown"))], [*bounds[-1:], neurons]

    def _incomplete(self) -> list[Step]:
        if not self.config.general.enable_incomplete_verification:
            return []
        names = [self.config.solver.bound_prop_method]
        if self.automatic:
            names = ["forward+alpha-crown"] if self.forward else []
            names += ["init-crown", "alpha-crown"]
        return [bound_settings(self.config, name) for name in names]

    def _programs(self, kind: str) -> list[Step]:
        root, mip = bound_settings(self.config, self._root()), self.config.solver.mip
        if kind == "mip":
            return [Programs(root)]
        refinement = Refinement(root, mip.refine_neuron_timeout, mip.refine_neuron_time_percentage)
        return [refinement, self._neurons(self._root())]

    def _inputs_are_split(self) -> bool:
        split = self.config.bab.branching.input_split
        if split.enable == "auto":
            return 0 < self.varying <= split.input_dim_threshold
        return bool(split.enable)

    def _on_inputs(self, bounds: list[Step]) -> tuple[list[Step], list[Step]]:
        method = "forward+backward" if self.forward and self.widest >= _WIDE else "crown"
        boxes = input_branching(self.config, self.weights, method)
        if not self.automatic:
            return bounds[:1], [*bounds[1:], boxes]
        # Halving the box is tried at once: tighter bounds over the whole of it cost more.
        quick = dataclasses.replace(boxes, loop=dataclasses.replace(boxes.loop, max_visited=_QUICK_BOXES))
        if self.config.bab.branching.input_split.enable is True or self.varying <= _FEW_INPUTS:
            return [*bounds[:1], quick], [boxes]
        return [*bounds[:1], quick], [*bounds[1:], self._neurons(self._root())]

    def _root(self) -> str:
        """Method for the pre-activations at the root of a search on neurons."""
        return "alpha-crown" if self.automatic else self.config.solver.bound_prop_method

    def _neurons(self, root: str) -> NeuronBranching:
        return neuron_branching(self.config, bound_settings(self.config, root))


def _limited(search: NeuronBranching) -> NeuronBranching:
    return dataclasses.replace(search, loop=dataclasses.replace(search.loop, max_visited=_QUICK_DOMAINS))


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
        recompute=_in_search(config, "crown") if bab.recompute_interm else None,
        slice=_slice(solver.batch_size) if synchronous else None,
    )
    return NeuronBranching(_loop(config, solver.batch_size), relu)


def input_branching(config: Config, weights: Weights, automatic: str = "crown") -> InputBranching:
    """Settings of a search on inputs; `automatic` is the bound method where the user leaves it open."""
    split = config.bab.branching.input_split
    method = automatic if split.bound_prop_method == "auto" else split.bound_prop_method
    batch = split.batch_size
    if not isinstance(batch, int):
        # The bounds of all neurons, and the rows that start from the widest layer's.
        batch = max(16, min(1 << 15, _BOX_BYTES // max(1, 4 * state_bytes(weights.graph, weights.dtype, 1))))
    inputs = InputSettings(
        bounds=_in_search(config, method),
        method="naive" if config.bab.branching.method == "naive" else "sb",
        clip=split.clip,
        slice=_slice(batch) if config.bab.force_synchronous else None,
    )
    return InputBranching(_loop(config, batch), inputs)


def _in_search(config: Config, method: str) -> BoundSettings:
    """Settings for bounding many domains at once."""
    settings = bound_settings(config, method)
    if config.bab.force_synchronous:
        settings = dataclasses.replace(settings, fixed_rows=min(_FIXED_ROWS, settings.batch_rows))
    return settings


def _slice(batch: int) -> int:
    return max(_LEAST_SLICE, -(-2 * batch // _SLICES))


def _loop(config: Config, batch: int) -> LoopSettings:
    bab = config.bab
    return LoopSettings(
        batch=batch,
        min_batch_ratio=config.solver.min_batch_size_ratio,
        max_domains=bab.max_domains,
        max_rounds=math.inf if bab.max_iterations < 0 else bab.max_iterations,
        forced=bab.force_synchronous,
    )


def _varying(config: Config, weights: Weights, prop: Property) -> int:
    """Number of inputs that vary, in the first batch of boxes."""
    first = next(batches(prop, weights, range(len(prop.disjuncts)), config.solver.batch_size), None)
    return 0 if first is None else varying_inputs(weights, first.box)
