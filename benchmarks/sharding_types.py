"""What the parts of `sharding.py` tell each other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Job:
    """What to measure.

    Attributes:
        network: `mlp` (784 - depth times width - 10), `pair` (4096 - width - 4096), or `standin`, the
            ResNet of examples/cifar100_resnet_large.py.
        width, depth: of the network, as far as it has them.
        mode: `none`, `fsdp` or `tp`.
        rows: most rows of a coefficient matrix at once; 0 for all.
        shard_rows, prefetch: as in the configuration's section `parallel`.
        dealt: cut rows as for shard_rows, whether or not they are dealt out.
        repeat: passes of which the fastest counts, long ones aside.
        device: `cpu` or `cuda`.
    """

    network: str
    width: int = 0
    depth: int = 0
    mode: str = "none"
    rows: int = 0
    shard_rows: bool = False
    prefetch: bool = True
    dealt: bool = False
    repeat: int = 3
    device: str = "cpu"

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Measured:
    """Figures of one group of processes, the largest over its ranks; bytes and seconds.

    Attributes:
        rest, peak: bytes of live tensors before and at most during the pass.
        rss, loading: resident set above the import baseline during the pass, and while loading.
        seconds, cpu, waited: of the pass, by the clock and by the processor, and inside collectives.
        moved: bytes received.
        layer: bytes of the largest layer's weights.
        deviation: of bounds from the single process's, relative.
        bounds: the bounds themselves.
    """

    rest: int
    peak: int
    rss: int
    loading: int
    seconds: float
    cpu: float
    waited: float
    moved: int
    layer: int
    deviation: float
    bounds: Sequence[float]
