"""configs/default.yaml says what the schema says."""

from __future__ import annotations

from abcrown_dist.config.document import default_yaml
from abcrown_dist.config.keys import all_keys, build
from abcrown_dist.config.paths import config_folder
from abcrown_dist.config.schema import Config
from abcrown_dist.config.yaml_file import read_yaml


def test_the_file_is_in_step() -> None:
    path = config_folder() / "default.yaml"
    assert path.read_text(encoding="utf-8") == default_yaml(), (
        "out of date: run python -m abcrown_dist.config.document > configs/default.yaml"
    )


def test_it_sets_every_key_to_its_default() -> None:
    entries = read_yaml(config_folder() / "default.yaml")
    assert list(entries) == list(all_keys())
    assert build({key: entry.value for key, entry in entries.items()}) == Config()


def test_every_key_is_explained() -> None:
    for key in all_keys().values():
        assert key.meaning.endswith(".")
        assert key.kind.parse(key.default) == key.default
