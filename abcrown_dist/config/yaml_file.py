"""Settings from a YAML file, each with its line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from abcrown_dist.config.entries import Entry
from abcrown_dist.config.keys import all_keys, all_sections
from abcrown_dist.config.known import explain_key
from abcrown_dist.util.errors import ConfigError


def read_yaml(path: Path) -> dict[str, Entry]:
    """Settings of a YAML file, by dotted key.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or holds an unknown or repeated key or a
            value that its key does not accept; the message names file and line.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    try:
        return _Reader(path, text).read()
    except yaml.YAMLError as error:
        raise ConfigError(_syntax_message(path, error)) from None


class _Reader:
    """Walks the node tree of one file, which, unlike loaded values, knows lines and repetitions."""

    def __init__(self, path: Path, text: bytes) -> None:
        self.path = path
        self.loader = yaml.SafeLoader(text)

    def read(self) -> dict[str, Entry]:
        root = self.loader.get_single_node()
        if root is None or self._is_null(root):
            return {}
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{self._place(root)}: expected sections such as general or model")
        return dict(self._entries(root, ""))

    def _entries(self, mapping: yaml.MappingNode, prefix: str) -> Iterator[tuple[str, Entry]]:
        seen: dict[str, str] = {}
        for key_node, value_node in mapping.value:
            place = self._place(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{place}: a key must be one word")
            name = prefix + key_node.value
            if name in seen:
                raise ConfigError(f"{place}: {name} is already set at {seen[name]}")
            seen[name] = place
            if name in all_keys():
                yield name, self._entry(name, value_node, place)
            elif name in all_sections():
                yield from self._section(name, value_node, place)
            else:
                raise ConfigError(f"{place}: {explain_key(name)}")

    def _section(self, name: str, node: yaml.Node, place: str) -> Iterator[tuple[str, Entry]]:
        if isinstance(node, yaml.MappingNode):
            yield from self._entries(node, name + ".")
        elif not self._is_null(node):  # a section whose keys are all commented out reads as null
            raise ConfigError(f"{place}: {name} is a section: expected keys below it, one a line")

    def _entry(self, name: str, node: yaml.Node, place: str) -> Entry:
        try:
            return Entry(all_keys()[name].kind.parse(self._value(node)), place)
        except ValueError as error:
            raise ConfigError(f"{place}: {name}: {error}") from None

    def _value(self, node: yaml.Node) -> Any:
        return self.loader.construct_object(node, deep=True)

    @staticmethod
    def _is_null(node: yaml.Node) -> bool:
        return bool(node.tag == "tag:yaml.org,2002:null")

    def _place(self, node: yaml.Node) -> str:
        return f"{self.path}:{node.start_mark.line + 1}"


def _syntax_message(path: Path, error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{path}:{mark.line + 1}:{mark.column + 1}: not valid YAML: {error.problem}"
    return f"{path}: not valid YAML: {' '.join(str(error).split())}"
