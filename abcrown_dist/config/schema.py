"""Every configuration key: its section, default, meaning and allowed values.

Sections and names are alpha-beta-CROWN's, so that its YAML files and habits carry over; keys of our
own are marked so. The two largest sections have files of their own. A key is here only if the program
acts on it. The dataclasses are frozen and check themselves, so that a `Config` with an impossible
value cannot exist, whoever builds it.
"""

from __future__ import annotations

from dataclasses import dataclass

from abcrown_dist.config.kinds import (
    Bool,
    Choice,
    Device,
    Float,
    Int,
    IntList,
    OrAuto,
    OrNull,
    Shape,
    Text,
)
from abcrown_dist.config.schema_bab import Bab
from abcrown_dist.config.schema_solver import Solver
from abcrown_dist.config.section import Section, key, section


@dataclass(frozen=True)
class General(Section):
    """What runs where, and where its results go."""

    device: str = key(
        "auto",
        Device(),
        "Where to compute; auto takes CUDA where there is one, else the CPU.",
        "device",
    )
    seed: int = key(
        100, Int(0, 2**63 - 1), "Seed of every random choice (the attack's starting points).", "seed"
    )
    double_fp: bool = key(False, Bool(), "Compute in float64 instead of float32.", "double_fp")
    rounding: str = key(
        "rigorous",
        Choice("rigorous", "estimate"),
        "How errors of bounds are counted: rigorous takes the worst case, of bounds and of the network's "
        "own computation; estimate lets errors cancel as independent ones do, and proves nothing where they "
        "do not.",
        "rounding",
    )
    complete_verifier: str = key(
        "auto",
        Choice("auto", "bab", "mip", "bab-refine", "skip", later=("Customized",)),
        "Complete method for what bounds leave open: bab branches; mip solves one mixed-integer program for "
        "each disjunct (small ReLU networks); bab-refine tightens pre-activations by such programs, then "
        "branches; skip stops; auto is bab.",
        "complete_verifier",
    )
    enable_incomplete_verification: bool = key(
        True,
        Bool(),
        "Try to prove the property by bounds alone, without branching.",
        "enable_incomplete_verification",
        off="no_incomplete",
    )
    csv_name: str | None = key(
        None,
        OrNull(Text()),
        "CSV file of instances (model, property, timeout) to run as a batch.",
        "csv_name",
    )
    results_file: str = key(
        "out.txt", Text(), "File for the verdict and counterexample, in VNN-COMP's format.", "results_file"
    )
    root_path: str = key(
        "",
        Text(empty=True),
        "Folder that relative model, property and CSV paths start from; empty: the current one, "
        "then that of the configuration file.",
        "root_path",
    )
    save_adv_example: bool = key(
        False, Bool(), "Also write a counterexample that is found to attack.cex_path.", "save_adv_example"
    )
    summary_file: str | None = key(
        None,
        OrNull(Text()),
        "File for a JSON summary: verdict, bounds, times, memory (own key).",
        "summary_file",
    )
    plot_file: str | None = key(
        None,
        OrNull(Text()),
        "File for a plot of branch and bound: worst bound and open domains over time, as .png, .pdf or .svg; "
        "needs matplotlib (own key).",
        "plot",
    )
    progress: str = key(
        "auto",
        Choice("auto", "plain", "live", "none"),
        "Progress on the standard error; auto is live on a terminal and plain elsewhere (own key).",
        "progress",
    )


@dataclass(frozen=True)
class Model(Section):
    """The network."""

    onnx_path: str | None = key(
        None, OrNull(Text()), "ONNX file of the network, .onnx or .onnx.gz.", "onnx_path"
    )
    onnx_path_prefix: str = key(
        "",
        Text(empty=True),
        "Folder put before the ONNX path, also before those of a CSV.",
        "onnx_path_prefix",
    )
    input_shape: tuple[int, ...] | None = key(
        None, OrNull(Shape()), "Input shape, for ONNX files that leave axes open.", "input_shape"
    )
    cache_onnx_conversion: bool = key(
        False,
        Bool(),
        "Keep the converted network in model.cache_dir, and take it from there when its files are the same.",
        "cache_onnx_conversion",
    )
    cache_dir: str | None = key(
        None,
        OrNull(Text()),
        "Folder for converted networks; null: abcrown_dist under $XDG_CACHE_HOME or ~/.cache (own key).",
        "cache_dir",
    )


@dataclass(frozen=True)
class Data(Section):
    """Which instances of a CSV to run."""

    start: int = key(0, Int(0), "First instance of the CSV, counted from 0.", "start")
    end: int = key(10_000, Int(0), "Instance of the CSV to stop before.", "end")
    select_instance: tuple[int, ...] | None = key(
        None,
        OrNull(IntList(0)),
        "Instances of the CSV to run, in this order, instead of a range.",
        "select_instance",
    )


@dataclass(frozen=True)
class Specification(Section):
    """What is to be proved."""

    vnnlib_path: str | None = key(
        None, OrNull(Text()), "VNN-LIB file of the property, .vnnlib or .vnnlib.gz.", "vnnlib_path"
    )
    vnnlib_path_prefix: str = key(
        "",
        Text(empty=True),
        "Folder put before the VNN-LIB path, also before those of a CSV.",
        "vnnlib_path_prefix",
    )


@dataclass(frozen=True)
class Attack(Section):
    """Search for counterexamples by projected gradient descent (PGD)."""

    pgd_order: str = key(
        "auto",
        Choice("auto", "before", "middle", "after", "skip", later=("input_bab",)),
        "When to attack: before bounds, in the middle (between plain and optimised bounds), after, never; "
        "auto: briefly before, in full in the middle (alpha-beta-CROWN: before).",
        "pgd_order",
    )
    pgd_steps: int = key(100, Int(1), "Steps from each starting point.", "pgd_steps")
    pgd_restarts: int = key(30, Int(1), "Random starting points.", "pgd_restarts")
    pgd_early_stop: bool = key(
        True,
        Bool(),
        "Stop at the first counterexample.",
        "pgd_early_stop",
        off="disable_pgd_early_stop",
    )
    pgd_lr_decay: float = key(
        0.99, Float(above=0, maximum=1), "Factor of the step size after every step.", "pgd_lr_decay"
    )
    pgd_alpha: float | str = key(
        "auto",
        OrAuto(Float(above=0, maximum=1e30)),
        "Step size in units of the input; auto: a quarter of each input's radius.",
        "pgd_alpha",
    )
    attack_mode: str = key(
        "PGD",
        Choice("PGD", "diversed_PGD", later=("diversed_GAMA_PGD", "boundary")),
        "Starting points: random (PGD) or spread by random output directions (diversed_PGD).",
        "attack_mode",
    )
    cex_path: str = key(
        "./test_cex.txt", Text(), "File for the counterexample, see general.save_adv_example.", "cex_path"
    )


@dataclass(frozen=True)
class Debug(Section):
    """Help with finding faults."""

    traceback: bool = key(
        False, Bool(), "Print the traceback of an error beside its one-line message (own key).", "traceback"
    )


@dataclass(frozen=True)
class Parallel(Section):
    """Several devices (own section)."""

    mode: str = key(
        "none",
        Choice("none", "fsdp", "tp", "auto"),
        "How the network is spread over the ranks of torchrun: none gives each a copy; fsdp shards weights "
        "and gives the same bounds bit for bit; tp shards weights, coefficients and slopes by neuron; auto "
        "takes what the plan recommends.",
    )
    shards: int | str = key(
        "auto",
        OrAuto(Int(1)),
        "Ranks that share one copy of the weights; auto: all that parallel.domain leaves (mode none: 1).",
    )
    domain: int | str = key(
        "auto",
        OrAuto(Int(1)),
        "Copies of the weights, which work on different domains; shards times domain is the number of ranks. "
        "auto: as many as parallel.shards leaves. Under none and fsdp every rank has domains of its own, "
        "under tp every copy.",
    )
    imbalance: float = key(
        0.25,
        Float(above=0, maximum=1e6),
        "Share of a rank's fair part of the domains that it may lack before others hand some over.",
    )
    shard_rows: bool = key(
        False, Bool(), "Under fsdp: each rank bounds its own chunks of a layer's rows, with their slopes."
    )
    prefetch: bool = key(
        True, Bool(), "Under fsdp: gather the next layer's weights while one is used (a second whole layer)."
    )
    backend: str = key(
        "auto", Choice("auto", "gloo", "nccl"), "Communication; auto: nccl on CUDA, gloo on the CPU."
    )
    timeout: float = key(
        600.0, Float(above=0, maximum=1e6), "Seconds after which a rank that is missing is an error."
    )


@dataclass(frozen=True)
class Config(Section):
    """A whole configuration. Hashable; `keys.to_dict` turns it into plain values.

    `source` is the YAML file that it came from, if any: relative paths may start from its folder.
    """

    general: General = section(General, "general")
    model: Model = section(Model, "model")
    data: Data = section(Data, "data")
    specification: Specification = section(Specification, "specification")
    solver: Solver = section(Solver, "solver")
    bab: Bab = section(Bab, "bab")
    attack: Attack = section(Attack, "attack")
    parallel: Parallel = section(Parallel, "parallel")
    debug: Debug = section(Debug, "debug")
    source: str | None = None
