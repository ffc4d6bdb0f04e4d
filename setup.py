"""What the package is and needs. Tool settings stand in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def data_packages() -> dict[str, str]:
    """Folders beside the package that an installed copy needs too, by the package they become.

    configs/digits_mlp.yaml names ../examples/digits/...: the folders keep their relative places.
    """
    return {
        f"abcrown_dist.{folder.replace('/', '.')}": folder
        for folder in ("configs", "examples/digits")
        if (ROOT / folder).is_dir()
    }


PLOT = ["matplotlib"]  # general.plot_file; nothing else needs it, and it takes 90 MB with what it pulls in

setup(
    name="abcrown_dist",
    version=re.search(r'__version__ = "(.+)"', (ROOT / "abcrown_dist/__init__.py").read_text())[1],
    description="A complete neural-network verifier for one device or many",
    license="BSD-3-Clause",
    python_requires=">=3.10",
    packages=[*find_packages(include=["abcrown_dist", "abcrown_dist.*"]), *data_packages()],
    package_dir={"abcrown_dist": "abcrown_dist", **data_packages()},
    package_data={
        "abcrown_dist.config": ["*.txt"],
        "abcrown_dist.configs": ["*.yaml", "*/*.yaml"],
        "abcrown_dist.examples.digits": ["*.onnx", "*.vnnlib", "*.csv"],
    },
    install_requires=[
        "torch>=2.4",  # tensors, autograd, collectives; the trace runs under its dispatch mode
        "numpy",  # what onnxruntime and scipy take and give
        "onnx",  # reading ONNX files
        "onnx2pytorch>=0.6",  # ONNX operators as torch modules, which the trace then runs once
        "torchvision",  # imported by onnx2pytorch, which does not always pull in a matching one
        "onnxruntime",  # the judge: checks every load and confirms every counterexample
        "pyyaml",  # configuration files
        "scipy",  # linear and mixed-integer programs through HiGHS
        "rich",  # live progress and the summary table
    ],
    extras_require={
        "plot": PLOT,
        "test": [
            *PLOT,
            "pytest",
            "pytest-timeout",
            "hypothesis",
            "scikit-learn",  # the digits data that the shipped example is trained on
            "ruff",
            "mypy",
            "types-PyYAML",
        ],
    },
    entry_points={"console_scripts": ["abcrown-dist=abcrown_dist.__main__:console"]},
)
