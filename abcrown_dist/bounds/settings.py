"""What a bound pass is told: which method where, and how much memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from abcrown_dist.bounds.alpha import AlphaSettings

AUTOMATIC = 1_000_000_000  # rows: alpha-beta-CROWN's default, which stands for no limit there

# Method of the user's choice -> (method for pre-activations, method for the final rows).
METHODS: dict[str, tuple[str, str]] = {
    "ibp": ("ibp", "ibp"),
    "crown-ibp": ("ibp", "crown"),
    "crown": ("crown", "crown"),
    "forward": ("forward", "forward"),
    "forward+backward": ("forward", "crown"),
    "forward+alpha-crown": ("forward", "alpha-crown"),
    "init-crown": ("crown", "alpha-crown"),
    "alpha-crown": ("alpha-crown", "alpha-crown"),
}


@dataclass(frozen=True)
class BoundSettings:
    """Settings of a whole bounding run.

    Attributes:
        method: a key of `METHODS`.
        alpha: how slopes are optimised.
        compare_with_ibp: intersect pre-activation bounds with interval bounds. Tighter row by row,
            though single rows downstream can loosen (CROWN is not monotone at a fixed slope rule).
        batch_rows: most rows of a coefficient matrix at once; `AUTOMATIC` or more for what is fast.
        budget: bytes that a pass may use, weights included; None for 512 MiB beside the weights.
        gathered: every visit of a layer gathers its weights, so that chunks should be large.
        shard_rows: chunks are dealt out over ranks, so that there should be several.
        fixed_rows: every chunk has this many, filled up where there are fewer: how many rows of a layer are
            bounded depends on all domains that come together, and the bits of a row on its chunk's shape.

    Chunks depend on settings alone and not on how many ranks there are: the same settings give the
    same bits at any number of ranks.
    """

    method: str = "crown"
    alpha: AlphaSettings = field(default_factory=AlphaSettings)
    compare_with_ibp: bool = True
    batch_rows: int = AUTOMATIC
    budget: int | None = None
    gathered: bool = False
    shard_rows: bool = False
    fixed_rows: int | None = None

    @property
    def intermediate(self) -> str:
        return METHODS[self.method][0]

    @property
    def final(self) -> str:
        return METHODS[self.method][1]
