"""Text of configs/default.yaml, made from the schema: `python -m abcrown_dist.config.document`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import yaml

from abcrown_dist.config.keys import Key, all_keys, all_sections

_HEADER = """\
# Every key with its default, meaning and allowed values.
# Generated from the schema by `python -m abcrown_dist.config.document`: change it there, not here.
# On the command line each key is --section.key, or one of the short options named with it.
"""


def default_yaml() -> str:
    """The defaults as commented YAML, in the order of the schema."""
    return _HEADER + "".join(f"{line}\n" for line in _lines())


def _lines() -> Iterator[str]:
    written: set[str] = set()
    for key in all_keys().values():
        section = key.name.rpartition(".")[0]
        depth = section.count(".")
        if section not in written:
            written.add(section)
            yield from _section_lines(section, depth)
        yield from _key_lines(key, "  " * (depth + 1))


def _section_lines(section: str, depth: int) -> Iterator[str]:
    indent = "  " * depth
    if depth == 0:
        yield ""
    yield f"{indent}# {(all_sections()[section].__doc__ or '').partition(chr(10))[0]}"
    yield f"{indent}{section.rpartition('.')[2]}:"


def _key_lines(key: Key, indent: str) -> Iterator[str]:
    allowed = f"{key.meaning} Values: {key.kind.describe().removeprefix('one of ')}."
    options = ", ".join(f"--{flag}" for flag in key.flags) + (f"; --{key.off} for false" if key.off else "")
    comment = f"{allowed} Options: {options}." if options else allowed
    yield from textwrap.wrap(comment, 108, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
    yield f"{indent}{key.name.rpartition('.')[2]}: {_scalar(key.default)}"


def _scalar(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


if __name__ == "__main__":
    print(default_yaml(), end="")
