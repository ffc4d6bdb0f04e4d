"""Answers for keys that the schema does not hold: which one was meant, or that it is still to come."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from abcrown_dist.config.keys import all_keys, all_sections


@cache
def unimplemented() -> frozenset[str]:
    """Keys of alpha-beta-CROWN that the schema does not hold, by dotted name."""
    text = Path(__file__).with_name("abcrown_keys.txt").read_text(encoding="utf-8")
    return frozenset(text.split()) - frozenset(all_keys())


def explain_key(name: str) -> str:
    """Why the dotted `name` is not accepted, with the nearest valid key if it is unknown."""
    if name in all_sections():
        return f"{name} is a section: name one of its keys, such as {nearest_key(name + '.')}"
    if name in unimplemented():
        return f"{name} is a key of alpha-beta-CROWN that abcrown_dist does not implement yet"
    if any(other.startswith(name + ".") for other in unimplemented()):
        return f"{name} is a section of alpha-beta-CROWN that abcrown_dist does not implement yet"
    if "." not in name and not _same_last_part(name):
        return f"unknown section {name}; nearest valid section: {nearest(name, _top_sections())}"
    return f"unknown key {name}; nearest valid key: {nearest_key(name)}"


def explain_flag(flag: str, flags: Iterable[str]) -> str:
    """Why the command-line `flag` (with its dashes) is not accepted."""
    name = flag.lstrip("-")
    later = sorted(key for key in unimplemented() if name in (key, _last(key)))
    if later:
        return f"{flag} sets {' or '.join(later)} in alpha-beta-CROWN; abcrown_dist does not implement it yet"
    return f"unknown option {flag}; nearest valid option: {nearest(flag, flags)}"


def nearest_key(name: str) -> str:
    """Valid key closest to `name`: one of the same last part in another section, if there is one."""
    return nearest(name, _same_last_part(name) or all_keys())


def nearest(word: str, words: Iterable[str]) -> str:
    """The one of `words` most similar to `word`."""
    return difflib.get_close_matches(word, list(words), n=1, cutoff=0.0)[0]


def _same_last_part(name: str) -> list[str]:
    same = [key for key in all_keys() if _last(key) == _last(name)]
    # Who misplaces a key most likely means alpha-beta-CROWN's, not one of our own section.
    return [key for key in same if not key.startswith("parallel.")] or same


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _top_sections() -> list[str]:
    return [name for name in all_sections() if "." not in name]
