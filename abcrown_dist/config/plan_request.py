"""The words of `abcrown-dist plan`: its own two options, all others as for a verification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from abcrown_dist.config.arguments import PLACE, Parser
from abcrown_dist.config.kinds import Int, Kind, Size
from abcrown_dist.util.errors import ConfigError

COMMAND = "plan"

_DESCRIPTION = (
    "Foretell, without running it, how much memory a verification needs on each rank in every parallel.mode, "
    "and recommend one. All options of a verification are understood as well (abcrown-dist --help)."
)


@dataclass(frozen=True)
class PlanRequest:
    """What to plan for.

    Attributes:
        world_size: number of ranks.
        device_memory: bytes of one device; None for what this machine has.
    """

    world_size: int
    device_memory: int | None = None


def parse_plan(words: Sequence[str]) -> tuple[PlanRequest, list[str]]:
    """The request, and the words that are left for the configuration.

    Raises:
        ConfigError: a missing or unacceptable value.
        SystemExit: with code 0, after --help has been printed.
    """
    found, rest = build_plan_parser().parse_known_args(list(words))
    if found.world_size is None:
        raise ConfigError(f"{PLACE}: {COMMAND} needs --world-size P, the number of ranks")
    memory = found.device_memory
    return (
        PlanRequest(
            _value(Int(1), "--world-size", found.world_size),
            None if memory is None else _value(Size(), "--device-memory", memory),
        ),
        rest,
    )


def build_plan_parser() -> Parser:
    """Parser of the request's own options."""
    parser = Parser(
        prog=f"abcrown-dist {COMMAND}",
        usage="%(prog)s --config FILE --world-size P [--device-memory SIZE] [--section.key VALUE ...]",
        description=_DESCRIPTION,
        allow_abbrev=False,
    )
    parser.add_argument("--world-size", metavar="P", help="Number of ranks that would share the work.")
    parser.add_argument(
        "--device-memory",
        metavar="SIZE",
        help="Memory of one device, e.g. 24GiB. Default: that of the configured device.",
    )
    return parser


def _value(kind: Kind[int], name: str, text: str) -> Any:
    try:
        return kind.parse_text(text)
    except ValueError as error:
        raise ConfigError(f"{PLACE}: {name}: {error}") from None
