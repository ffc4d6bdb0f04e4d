"""Where files are looked for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from abcrown_dist.config.keys import build
from abcrown_dist.config.paths import config_folder, find_config, locate, locate_model, locate_property
from abcrown_dist.config.schema import Config
from abcrown_dist.util.errors import ConfigError


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """cwd/, conf/ and root/ each hold one file named after themselves, and all hold common.onnx."""
    for name in ("cwd", "conf", "root"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "common.onnx").touch()
        (tmp_path / name / f"{name}.onnx").touch()
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path


def config(tree: Path, **values: str) -> Config:
    named = {key.replace("__", "."): value for key, value in values.items()}
    return dataclasses.replace(build(named), source=str(tree / "conf" / "c.yaml"))


def test_current_folder_then_that_of_the_configuration(tree: Path) -> None:
    made = config(tree)
    assert locate(made, "common.onnx").resolve() == tree / "cwd/common.onnx"
    assert locate(made, "conf.onnx").resolve() == tree / "conf/conf.onnx"
    assert locate(made, "root.onnx", tree / "root").resolve() == tree / "root/root.onnx"
    assert locate(made, "nowhere.onnx") == Path("nowhere.onnx")


def test_root_path_replaces_both(tree: Path) -> None:
    for root in (str(tree / "root"), "../root"):
        made = config(tree, general__root_path=root)
        assert locate(made, "common.onnx").resolve() == tree / "root/common.onnx"
        assert locate(made, "cwd.onnx") == Path(root) / "cwd.onnx"
    assert locate(made, str(tree / "cwd/cwd.onnx")) == tree / "cwd/cwd.onnx"


def test_prefixes_belong_to_their_kind_of_file(tree: Path) -> None:
    made = config(tree, model__onnx_path_prefix="../root", specification__vnnlib_path_prefix="../conf/")
    assert locate_model(made, "root.onnx").resolve() == tree / "root/root.onnx"
    assert locate_property(made, "conf.onnx").resolve() == tree / "conf/conf.onnx"


def test_config_names(tree: Path) -> None:
    (tree / "cwd" / "mine.yaml").touch()
    assert find_config("mine") == find_config("mine.yaml") == Path("mine.yaml")
    shipped = config_folder() / "default.yaml"
    assert find_config("default") == find_config("default.yaml") == shipped
    (tree / "cwd" / "default.yaml").touch()
    assert find_config("default.yaml") == Path("default.yaml")
    with pytest.raises(ConfigError, match="no configuration other"):
        find_config("other")
    with pytest.raises(ConfigError, match="no configuration"):
        find_config(str(tree / "conf"))
    with pytest.raises(ConfigError, match="no configuration"):
        find_config("x" * 5000)
