"""Keys of the section `bab`: branch and bound."""

from __future__ import annotations

import math
from dataclasses import dataclass

from abcrown_dist.config.kinds import (
    Bool,
    Choice,
    Float,
    Int,
    OrAuto,
    OrNull,
    Text,
)
from abcrown_dist.config.section import Section, key, section


@dataclass(frozen=True)
class InputSplit(Section):
    """Branching on inputs."""

    enable: bool | str = key(
        "auto",
        OrAuto(Bool()),
        "Split inputs instead of neurons; auto: when few inputs vary (alpha-beta-CROWN: false).",
    )
    input_dim_threshold: int = key(20, Int(0), "Most varying inputs for which auto splits inputs.")
    batch_size: int | str = key(
        "auto",
        OrAuto(Int(1)),
        "Boxes split at once; auto: as many as about 256 MiB of bounds allow (own key).",
    )
    bound_prop_method: str = key(
        "auto",
        Choice(
            *("auto", "ibp", "crown-ibp", "crown", "forward", "forward+backward", "init-crown", "alpha-crown")
        ),
        "Bound method of the boxes; auto: crown, or forward+backward where that is far cheaper (own key; "
        "alpha-beta-CROWN takes solver.bound_prop_method).",
    )
    clip: bool = key(
        True, Bool(), "Cut off the part of a box that the property's own linear bound refutes (own key)."
    )


@dataclass(frozen=True)
class Branching(Section):
    """What to split."""

    method: str = key(
        "kfsb",
        Choice(
            *("kfsb", "fsb", "babsr", "sb", "naive"),
            later=("kfsb-intercept-only", "brute-force", "nonlinear"),
        ),
        "Neurons: babsr scores them; fsb and kfsb compare the best by their bounds (kfsb with the domain's "
        "slopes and multipliers). Inputs: sb takes the one that the bound is most sensitive to, naive the "
        "longest edge; where inputs are split, all others mean sb, and where neurons are, "
        "sb and naive mean kfsb.",
        "branching_method",
    )
    candidates: int = key(
        3, Int(1), "Neurons of each score that fsb and kfsb compare.", "branching_candidates"
    )
    reduceop: str = key(
        "min",
        Choice("min", "max"),
        "Which of both children's bounds decides between neurons.",
        "branching_reduceop",
    )
    input_split: InputSplit = section(InputSplit, "input_split")


@dataclass(frozen=True)
class Bab(Section):
    """Branch and bound, and the time for an instance."""

    timeout: float = key(
        360.0, Float(above=0, maximum=math.inf), "Seconds for an instance, loading included.", "timeout"
    )
    timeout_scale: float = key(
        1.0, Float(above=0, maximum=1e6), "Factor of the timeout, also of those of a CSV.", "timeout_scale"
    )
    override_timeout: float | None = key(
        None,
        OrNull(Float(above=0, maximum=math.inf)),
        "Seconds for an instance whatever the timeout, its scale or a CSV say.",
        "override_timeout",
    )
    max_domains: float = key(
        math.inf,
        Float(above=0, maximum=math.inf),
        "Open domains above which branching gives up with `unknown`.",
        "max_domains",
    )
    max_iterations: int = key(
        -1, Int(-1), "Rounds of branching after which it gives up; -1: no limit.", "max_iterations"
    )
    pruning_in_iteration: bool = key(
        True,
        Bool(),
        "Let refuted domains leave an optimisation that still goes on for others.",
        off="disable_pruning_in_iteration",
    )
    pruning_in_iteration_ratio: float = key(
        0.2, Float(above=0, maximum=1), "Share of refuted domains from which on they leave."
    )
    recompute_interm: bool = key(
        False, Bool(), "Bound later layers anew in every domain, by plain CROWN.", "recompute_interm"
    )
    force_synchronous: bool = key(
        False,
        Bool(),
        "Do the same work whatever the number of ranks: fixed slices, no choice by what is fast (own key).",
    )
    checkpoint: str | None = key(
        None,
        OrNull(Text()),
        "File to keep the state of a long search in, beside a part of every rank; a run that torchrun "
        "restarts takes it up by itself (own key).",
        "checkpoint",
    )
    checkpoint_interval: float = key(
        300.0, Float(above=0, maximum=math.inf), "Seconds between two checkpoints (own key)."
    )
    resume: str | None = key(
        None,
        OrNull(Text()),
        "Checkpoint to go on from, with as many ranks as there are now, in any mode (own key).",
        "resume",
    )
    branching: Branching = section(Branching, "branching")
