"""Keys of the section `solver`: how bounds are computed and optimised."""

from __future__ import annotations

import math
from dataclasses import dataclass

from abcrown_dist.config.kinds import (
    Bool,
    Choice,
    Float,
    Int,
    OrNull,
    Size,
)
from abcrown_dist.config.section import Section, key, section


@dataclass(frozen=True)
class Crown(Section):
    """Backward bound propagation (CROWN)."""

    batch_size: int = key(
        1_000_000_000,
        Int(1),
        "Most rows of coefficient matrices propagated at once; the default leaves it to what is fast.",
        "crown_batch_size",
    )
    memory_budget: int | None = key(
        None,
        OrNull(Size()),
        "Memory that one pass may use, weights included, which sets the rows at once; "
        "null: 512 MiB beside the weights (own key).",
        "memory_budget",
    )
    compare_crown_with_ibp: bool = key(
        True,
        Bool(),
        "Intersect intermediate CROWN bounds with interval bounds (alpha-beta-CROWN: false).",
        "compare_crown_with_ibp",
    )


@dataclass(frozen=True)
class AlphaCrown(Section):
    """Optimisation of the lower slopes (alpha-CROWN)."""

    iteration: int = key(
        100, Int(1), "Steps of gradient ascent on each bound.", "init_iteration"
    )
    lr_alpha: float = key(0.1, Float(above=0, maximum=1e6), "Step size.", "lr_init_alpha")
    lr_decay: float = key(0.98, Float(above=0, maximum=1), "Factor of the step size after every step.")


@dataclass(frozen=True)
class BetaCrown(Section):
    """Optimisation of slopes and split multipliers in the domains of branch and bound (beta-CROWN)."""

    iteration: int = key(
        10, Int(1), "Steps of gradient ascent in each domain (alpha-beta-CROWN: 50).", "iteration"
    )
    lr_alpha: float = key(
        0.05,
        Float(above=0, maximum=1e6),
        "Step size of the slopes (alpha-beta-CROWN: 0.01).",
        "lr_alpha",
    )
    lr_beta: float = key(
        0.1,
        Float(above=0, maximum=1e6),
        "Step size of the multipliers (alpha-beta-CROWN: 0.05).",
        "lr_beta",
    )
    lr_decay: float = key(
        0.98, Float(above=0, maximum=1), "Factor of both step sizes after every step.", "lr_decay"
    )


@dataclass(frozen=True)
class Mip(Section):
    """Mixed-integer programs, solved by HiGHS: complete_verifier mip and bab-refine."""

    refine_neuron_timeout: float = key(
        15.0, Float(above=0, maximum=math.inf), "Seconds for one bound of one neuron (bab-refine)."
    )
    refine_neuron_time_percentage: float = key(
        0.8, Float(above=0, maximum=1), "Share of the time left that bab-refine spends before branching."
    )


@dataclass(frozen=True)
class Forward(Section):
    """Forward linear bounds."""

    max_dim: int = key(
        64,
        Int(0),
        "Most varying inputs for which auto chooses forward mode: it keeps one coefficient per "
        "varying input and neuron, which beats backward passes only when these are few.",
    )


@dataclass(frozen=True)
class Solver(Section):
    """How bounds are computed."""

    batch_size: int = key(64, Int(1), "Boxes bounded, or domains split, at once.", "batch_size")
    min_batch_size_ratio: float = key(
        0.1,
        Float(above=0, maximum=1),
        "While fewer domains than this share of a batch are open, each is split several times at once.",
        "min_batch_size_ratio",
    )
    bound_prop_method: str = key(
        "auto",
        Choice(
            "auto",
            "ibp",
            "crown-ibp",
            "crown",
            "forward",
            "forward+backward",
            "init-crown",
            "alpha-crown",
            later=("forward+crown", "alpha-forward"),
        ),
        "Bound method; init-crown optimises slopes for the property's rows only; auto goes from cheap to "
        "tight, beginning with forward mode where few inputs vary.",
        "bound_prop_method",
    )
    early_stop_patience: int = key(
        10, Int(1), "Steps without improvement after which an optimisation ends.", "early_stop_patience"
    )
    crown: Crown = section(Crown, "crown")
    alpha_crown: AlphaCrown = section(AlphaCrown, "alpha-crown")
    beta_crown: BetaCrown = section(BetaCrown, "beta-crown")
    mip: Mip = section(Mip, "mip")
    forward: Forward = section(Forward, "forward")
