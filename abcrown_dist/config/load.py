"""The one loader: command line over YAML over defaults, checked as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from abcrown_dist.config.arguments import parse_arguments
from abcrown_dist.config.entries import Entry
from abcrown_dist.config.keys import build
from abcrown_dist.config.paths import find_config
from abcrown_dist.config.schema import Config
from abcrown_dist.config.yaml_file import read_yaml
from abcrown_dist.util.errors import ConfigError


def load_config(argv: Sequence[str]) -> Config:
    """Configuration from command-line words (without the program's name).

    Raises:
        ConfigError: one line that names the key, its place and what is wrong with it.
        SystemExit: with code 0, after --help or --version has been printed.
    """
    name, given = parse_arguments(argv)
    source = None if name is None else find_config(name)
    entries = {**({} if source is None else read_yaml(source)), **given}
    values = {key: entry.value for key, entry in entries.items()}
    config = build(values, source=None if source is None else str(source))
    _check_inputs(config, entries)
    _check_selection(config, entries)
    return config


def _check_inputs(config: Config, entries: Mapping[str, Entry]) -> None:
    """There is exactly one source of instances: a model with a property, or a CSV."""
    csv, onnx, vnnlib = config.general.csv_name, config.model.onnx_path, config.specification.vnnlib_path
    if csv is not None:
        reason = "the CSV names models and properties itself"
        alone = {"model.onnx_path": onnx, "specification.vnnlib_path": vnnlib}
        if config.bab.resume is not None:
            alone, reason = {"bab.resume": config.bab.resume}, "a checkpoint is of one instance"
        for key, value in alone.items():
            if value is not None:
                raise ConfigError(
                    f"{_at(entries, key)} and {_at(entries, 'general.csv_name')} exclude each other: {reason}"
                )
    elif onnx is None and vnnlib is None:
        raise ConfigError(
            "nothing to verify: set model.onnx_path and specification.vnnlib_path, or general.csv_name "
            "(see --help)"
        )
    elif vnnlib is None:
        raise ConfigError(f"{_at(entries, 'model.onnx_path')} needs specification.vnnlib_path as well")
    elif onnx is None:
        raise ConfigError(f"{_at(entries, 'specification.vnnlib_path')} needs model.onnx_path as well")


def _check_selection(config: Config, entries: Mapping[str, Entry]) -> None:
    """The selection is not empty, is given once, and without a CSV holds the only instance, number 0."""
    data = config.data
    if data.select_instance is None:
        if data.start >= data.end:
            raise ConfigError(
                f"{_at(entries, 'data.start')} = {data.start} and {_at(entries, 'data.end')} = {data.end} "
                "select no instance: the end must be larger"
            )
        key, chosen = "data.start", data.start == 0
    else:
        for other in ("data.start", "data.end"):
            if other in entries:
                raise ConfigError(
                    f"{_at(entries, other)} and {_at(entries, 'data.select_instance')} exclude each other"
                )
        key, chosen = "data.select_instance", data.select_instance == (0,)
    if config.general.csv_name is None and not chosen:
        raise ConfigError(
            f"{_at(entries, key)} selects among the instances of general.csv_name, which is not set"
        )


def _at(entries: Mapping[str, Entry], key: str) -> str:
    """The key with its place."""
    return f"{key} ({entries[key].place if key in entries else 'default'})"
