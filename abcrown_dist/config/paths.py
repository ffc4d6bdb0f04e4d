"""Where configuration, model, property and CSV files are found."""

from __future__ import annotations

import os.path
from pathlib import Path

from abcrown_dist.config.schema import Config
from abcrown_dist.util.errors import ConfigError


def config_folder() -> Path:
    """Folder of the shipped configurations: inside the package once installed, else beside it."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def find_config(name: str) -> Path:
    """Configuration file that `name` means: a path, then a name under `configs/`; .yaml may be left out.

    Raises:
        ConfigError: there is none.
    """
    shipped = config_folder()
    for base in (Path(), shipped):
        for candidate in (base / Path(name).expanduser(), base / f"{name}.yaml"):
            if os.path.isfile(candidate):  # False, too, for what no path can be
                return candidate
    raise ConfigError(f"no configuration {name}: looked for it as a path and under {shipped}")


def locate(config: Config, name: str, *folders: Path) -> Path:
    """File that a path of the configuration means. It need not exist.

    A relative path starts from `general.root_path`; if that is empty, from the current folder and
    then from that of the configuration file. `folders` are tried after these (such as the CSV's
    own, for the paths that it holds). The first file that exists is taken, else the first tried.
    """
    path = Path(name).expanduser()
    bases = [*_bases(config), *folders]
    return next((base / path for base in bases if os.path.exists(base / path)), bases[0] / path)


def locate_model(config: Config, name: str, *folders: Path) -> Path:
    """`locate` for an ONNX file, with `model.onnx_path_prefix` before its name."""
    return locate(config, str(Path(config.model.onnx_path_prefix) / name), *folders)


def locate_property(config: Config, name: str, *folders: Path) -> Path:
    """`locate` for a VNN-LIB file, with `specification.vnnlib_path_prefix` before its name."""
    return locate(config, str(Path(config.specification.vnnlib_path_prefix) / name), *folders)


def _bases(config: Config) -> list[Path]:
    beside = [] if config.source is None else [Path(config.source).parent]
    if not config.general.root_path:
        return [Path(), *beside]
    root = Path(config.general.root_path).expanduser()
    found = next((base / root for base in (Path(), *beside) if (base / root).is_dir()), root)
    return [found]
