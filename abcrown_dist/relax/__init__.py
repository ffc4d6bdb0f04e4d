"""Linear relaxations of nonlinear ops, one family per file, found through `REGISTRY`.

To add an op: write a `Relaxation` in a file of its own and enter it here under the op's graph name.
"""

from __future__ import annotations

from abcrown_dist.relax.base import Lines, Relaxation
from abcrown_dist.relax.two_piece import TwoPiece

REGISTRY: dict[str, Relaxation] = {
    "relu": TwoPiece(),
    "leaky_relu": TwoPiece(),
}

__all__ = ["REGISTRY", "Lines", "Relaxation"]
