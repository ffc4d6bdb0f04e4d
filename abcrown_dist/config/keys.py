"""The keys of the schema as a flat table, and configurations as plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from abcrown_dist.config.kinds import Kind
from abcrown_dist.config.schema import Config, Section


@dataclass(frozen=True)
class Key:
    """One key: its dotted name as in YAML, and what its declaration says (see `schema.key`)."""

    name: str
    kind: Kind[Any]
    default: Any
    meaning: str
    flags: tuple[str, ...]
    off: str | None


@cache
def all_keys() -> Mapping[str, Key]:
    """Every key by its dotted name, in the order of the schema."""
    return {found.name: found for found in _walk(Config, "")}


@cache
def all_sections() -> Mapping[str, type[Section]]:
    """Every section, nested ones included, by its dotted name."""
    return dict(_sections(Config, ""))


def build(values: Mapping[str, Any], source: str | None = None) -> Config:
    """Configuration with `values` (by dotted name) in place of the defaults.

    Raises:
        ConfigError: a value that its key does not accept.
        KeyError: a name that is no key.
    """
    if unknown := values.keys() - all_keys().keys():
        raise KeyError(f"no such key: {', '.join(sorted(unknown))}")
    filled: Config = _fill(Config, "", values)
    return dataclasses.replace(filled, source=source)


def to_dict(config: Section) -> dict[str, Any]:
    """Nested plain values under the names of YAML: fit for JSON and YAML. Leaves `source` out."""
    plain: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, Section):
            plain[field.metadata["section"]] = to_dict(value)
        elif "kind" in field.metadata:
            plain[field.name] = list(value) if isinstance(value, tuple) else value
    return plain


def to_yaml(config: Section) -> str:
    """`to_dict` as YAML text, which the loader reads back to an equal configuration."""
    import yaml

    return yaml.safe_dump(to_dict(config), sort_keys=False)


def _sections(cls: type[Section], prefix: str) -> Iterator[tuple[str, type[Section]]]:
    for field in dataclasses.fields(cls):
        if "section" in field.metadata:
            name = prefix + field.metadata["section"]
            inner: Any = field.default_factory
            yield name, inner
            yield from _sections(inner, name + ".")


def _walk(cls: type[Section], prefix: str) -> Iterator[Key]:
    for field in dataclasses.fields(cls):
        if "kind" in field.metadata:
            yield Key(name=prefix + field.name, default=field.default, **field.metadata)
        elif "section" in field.metadata:
            inner: Any = field.default_factory
            yield from _walk(inner, f"{prefix}{field.metadata['section']}.")


def _fill(cls: Any, prefix: str, values: Mapping[str, Any]) -> Any:
    given: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if "section" in field.metadata:
            inner = f"{prefix}{field.metadata['section']}."
            given[field.name] = _fill(field.default_factory, inner, values)
        elif prefix + field.name in values:
            given[field.name] = values[prefix + field.name]
    return cls(**given)
