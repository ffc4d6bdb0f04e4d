"""How configuration sections are declared, and that they check themselves."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeVar

from abcrown_dist.config.kinds import Kind
from abcrown_dist.util.errors import ConfigError

T = TypeVar("T")
S = TypeVar("S", bound="Section")


def key(default: T, kind: Kind[T], meaning: str, *flags: str, off: str | None = None) -> T:
    """Declare a key.

    Args:
        default: value when nobody sets it.
        kind: what it accepts.
        meaning: one sentence, shown by --help and in configs/default.yaml.
        flags: command-line names beside `--section.key`, without dashes.
        off: command-line name of a switch that sets the key to false.
    """
    metadata = {"kind": kind, "meaning": meaning, "flags": flags, "off": off}
    return dataclasses.field(default=default, metadata=metadata)


def section(cls: type[S], name: str) -> S:
    """Declare a section inside another, under its name in YAML."""
    return dataclasses.field(default_factory=cls, metadata={"section": name})


@dataclass(frozen=True)
class Section:
    """Base of all sections: checks every value on creation.

    Raises:
        ConfigError: a value is not of its key's kind.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            kind = field.metadata.get("kind")
            if kind is None:
                continue
            try:
                object.__setattr__(self, field.name, kind.parse(getattr(self, field.name)))
            except ValueError as error:
                raise ConfigError(f"{type(self).__name__}.{field.name}: {error}") from None
