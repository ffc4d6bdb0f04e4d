"""Settings from the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from abcrown_dist import __version__
from abcrown_dist.config.entries import Entry
from abcrown_dist.config.keys import Key, all_keys, all_sections
from abcrown_dist.config.kinds import Bool, IntList, OrNull
from abcrown_dist.config.known import explain_flag, explain_key
from abcrown_dist.util.errors import ConfigError

PLACE = "command line"

_DESCRIPTION = (
    "Complete neural-network verifier: reads an ONNX network and a VNN-LIB property and answers sat, "
    "unsat, unknown or timeout."
)
_EPILOG = """\
`abcrown-dist plan --config FILE --world-size P` foretells memory per rank and recommends a
parallel.mode instead of verifying (see `abcrown-dist plan --help`).
`abcrown-dist prepare --onnx_path FILE --vnnlib_path FILE` only converts the network, for later runs with
model.cache_onnx_conversion.

Every key can be set by its full name (--section.key VALUE or --section.key=VALUE), as well as in
YAML; the command line beats YAML, which beats the defaults.

exit codes:
  0  a verdict was produced (unknown and timeout are verdicts)
  2  bad usage or configuration
  3  a model, property or data file cannot be loaded
  4  internal error
"""


def parse_arguments(argv: Sequence[str]) -> tuple[str | None, dict[str, Entry]]:
    """The configuration's name (if one is given) and the settings by dotted key.

    Raises:
        ConfigError: unknown option, missing or unacceptable value.
        SystemExit: with code 0, after --help or --version has been printed.
    """
    parser = build_parser()
    found, rest = parser.parse_known_args(list(argv))
    if rest:
        raise ConfigError(f"{PLACE}: {_explain(rest[0], parser)}")
    words = vars(found)
    name = words.pop("config", None)
    return name, {key: _entry(all_keys()[key], value) for key, value in words.items()}


def build_parser() -> argparse.ArgumentParser:
    """Parser with one argument per key. It hands on words; the keys' kinds read them."""
    parser = Parser(
        prog="abcrown-dist",
        usage="%(prog)s [--config FILE] [--onnx_path FILE --vnnlib_path FILE] [--section.key VALUE ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=_Formatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--version", action="version", version=f"abcrown_dist {__version__}")
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file: a path, or a name under configs/ (.yaml may be left out)"
    )
    groups = {
        name: parser.add_argument_group(name, (cls.__doc__ or "").partition("\n")[0])
        for name, cls in all_sections().items()
    }
    for key in all_keys().values():
        _add(groups[key.name.rpartition(".")[0]], key)
    return parser


class Parser(argparse.ArgumentParser):
    """Parser whose errors are the program's own, in one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{PLACE}: {message}")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Help that shows an option's value once, not behind each of its names."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, action.dest)
        return f"{', '.join(action.option_strings)} {value}"


def _add(group: argparse._ArgumentGroup, key: Key) -> None:
    names = [f"--{flag}" for flag in (*key.flags, key.name)]
    text = f"{key.meaning} Default: {_shown(key.default)}.".replace("%", "%%")
    group.add_argument(*names, dest=key.name, metavar=key.kind.metavar, help=text, **_arity(key))
    if key.off is not None:
        group.add_argument(
            f"--{key.off}",
            dest=key.name,
            action="store_const",
            const="false",
            help=f"Sets {key.name} to false.",
        )


def _arity(key: Key) -> dict[str, Any]:
    kind = key.kind.kind if isinstance(key.kind, OrNull) else key.kind
    if isinstance(kind, Bool):
        return {"nargs": "?", "const": "true"}
    if isinstance(kind, IntList):
        return {"nargs": "+"}
    return {}


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value) if value != "" else "empty"


def _entry(key: Key, words: str | list[str]) -> Entry:
    text = words if isinstance(words, str) else " ".join(words)
    try:
        return Entry(key.kind.parse_text(text), PLACE)
    except ValueError as error:
        raise ConfigError(f"{PLACE}: {key.name}: {error}") from None


def _explain(word: str, parser: argparse.ArgumentParser) -> str:
    flag = word.partition("=")[0]
    if not flag.startswith("-"):
        return f"unexpected word {word!r} (a configuration file is given with --config)"
    if "." in flag:
        return explain_key(flag.lstrip("-"))
    return explain_flag(flag, parser._option_string_actions)
