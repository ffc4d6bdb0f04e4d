"""The competition's scripts, called as its harness does: with a stand-in for the interpreter, and in full."""

from __future__ import annotations

import gzip
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from abcrown_dist.spec.vnnlib1 import load_vnnlib

SCRIPTS = Path(__file__).resolve().parent.parent / "vnncomp_scripts"

# The stand-in records its arguments, one a line, and then does what $FAKE says.
INTERPRETER = """#!/usr/bin/env bash
printf '%s\\n' "$@" >"$RECORD"
while [[ $# -gt 0 ]]; do
    [[ $1 == --results_file ]] && results=$2
    shift
done
answer() { printf "$1" >"$results.new" && mv "$results.new" "$results"; }
eval "$FAKE"
"""


class Harness:
    """A copy of the scripts in a repository of their own, in a folder whose name has spaces."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "the repository"
        self.record = folder / "record"
        shutil.copytree(SCRIPTS, self.root / "vnncomp_scripts")
        self.python = folder / "an interpreter"
        self.python.write_text(INTERPRETER)
        self.python.chmod(0o755)
        self.onnx = folder / "a net.onnx.gz"
        self.vnnlib = folder / "a prop.vnnlib.gz"
        for file in (self.onnx, self.vnnlib):
            file.write_bytes(b"")
        self.results = folder / "new folder" / "out.txt"

    def start(self, script: str, *arguments: object, fake: str = "") -> subprocess.Popen[str]:
        environment = os.environ | {
            "ABCROWN_PYTHON": str(self.python),
            "RECORD": str(self.record),
            "FAKE": fake,
        }
        return subprocess.Popen(
            [str(self.root / "vnncomp_scripts" / script), *map(str, arguments)],
            env=environment,
            cwd=self.root.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def call(self, script: str, *arguments: object, fake: str = "") -> tuple[int, str]:
        """Exit code and standard error."""
        process = self.start(script, *arguments, fake=fake)
        _, errors = process.communicate(timeout=60)
        return process.returncode, errors

    def run(self, fake: str, timeout: object = 100, category: str = "nobody_knows") -> str:
        """Content of the results file after run_instance.sh."""
        code, errors = self.call(
            *("run_instance.sh", "v1", category, self.onnx, self.vnnlib, self.results, timeout), fake=fake
        )
        assert code == 0, errors
        return self.results.read_text()

    def arguments(self) -> list[str]:
        """What the interpreter was called with."""
        return self.record.read_text().splitlines()


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


def test_run_passes_paths_and_a_limit_below_the_timeout(harness: Harness) -> None:
    assert harness.run("answer 'unsat\\n'", timeout=100) == "unsat\n"
    *call, limit = harness.arguments()
    assert call == [
        *("-m", "abcrown_dist", "--onnx_path", str(harness.onnx), "--vnnlib_path", str(harness.vnnlib)),
        *("--cache_onnx_conversion", "--results_file", str(harness.results), "--timeout"),
    ]
    assert float(limit) == 99


def test_run_makes_relative_paths_absolute(harness: Harness) -> None:
    files = [
        path.relative_to(harness.root.parent) for path in (harness.onnx, harness.vnnlib, harness.results)
    ]
    code, errors = harness.call("run_instance.sh", "v1", "x", *files, "2.5", fake="answer 'unknown\\n'")
    assert (code, errors) == (0, "")
    assert harness.results.read_text() == "unknown\n"
    assert {str(harness.onnx), str(harness.vnnlib), str(harness.results)} < set(harness.arguments())
    assert 0 < float(harness.arguments()[-1]) < 2.5


def test_run_takes_the_settings_of_the_category(harness: Harness) -> None:
    config = harness.root / "configs" / "vnncomp" / "acasxu.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("{}")
    harness.run("answer 'unsat\\n'", category="acasxu")
    assert harness.arguments()[2:4] == ["--config", str(config)]
    harness.run("answer 'unsat\\n'", category="another")
    assert "--config" not in harness.arguments()


def test_run_keeps_a_witness(harness: Harness) -> None:
    assert harness.run("answer 'sat\\n((X_0 1)\\n (Y_0 2))\\n'") == "sat\n((X_0 1)\n (Y_0 2))\n"


def test_run_keeps_a_verdict_of_a_program_that_died_after_it(harness: Harness) -> None:
    assert harness.run("answer 'unsat\\n'; exit 4") == "unsat\n"


@pytest.mark.parametrize(
    "fake",
    ["exit 3", "exit 0", "answer 'sa'; exit 1", "answer ''", "answer '\\nunsat\\n'", "kill -KILL $$"],
)
def test_run_reports_an_error_for_a_program_without_a_verdict(harness: Harness, fake: str) -> None:
    assert harness.run(fake) == "error\n"


def test_run_without_an_interpreter_is_an_error(harness: Harness) -> None:
    harness.python.unlink()
    assert harness.run("") == "error\n"


@pytest.mark.parametrize("fake", ["sleep 50", "trap '' TERM; while :; do sleep 0.1; done"])
def test_run_ends_a_program_that_does_not(harness: Harness, fake: str) -> None:
    assert harness.run(fake, timeout="1.0") == "timeout\n"


def test_run_keeps_the_programs_own_timeout(harness: Harness) -> None:
    assert harness.run("answer 'timeout\\n'") == "timeout\n"


def test_run_forgets_the_result_of_an_earlier_run(harness: Harness) -> None:
    harness.results.parent.mkdir()
    harness.results.write_text("sat\n((X_0 1))\n")
    assert harness.run("exit 4") == "error\n"


def test_run_has_a_first_line_even_when_it_is_killed(harness: Harness) -> None:
    process = harness.start(
        *("run_instance.sh", "v1", "x", harness.onnx, harness.vnnlib, harness.results, 100), fake="sleep 50"
    )
    while not harness.record.exists():
        time.sleep(0.02)
    assert harness.results.read_text() == "timeout"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert harness.results.read_text() == "timeout\n"


@pytest.mark.parametrize("timeout", ["0", "-1", "soon", "", "0.0", "1e3"])
def test_run_refuses_a_timeout_that_is_none(harness: Harness, timeout: str) -> None:
    code, errors = harness.call(
        "run_instance.sh", "v1", "x", harness.onnx, harness.vnnlib, harness.results, timeout
    )
    assert code == 2
    assert "is not a positive number" in errors
    assert not harness.record.exists()


@pytest.mark.parametrize("script", ["install_tool.sh", "prepare_instance.sh", "run_instance.sh"])
@pytest.mark.parametrize("arguments", [(), ("v2",), ("v1", "a", "b", "c", "d", "e", "f", "g")])
def test_wrong_calls_are_refused(harness: Harness, script: str, arguments: tuple[str, ...]) -> None:
    code, errors = harness.call(script, *arguments)
    assert code == 2
    assert errors.startswith("usage:")


def test_prepare_converts_the_network(harness: Harness) -> None:
    files = [path.relative_to(harness.root.parent) for path in (harness.onnx, harness.vnnlib)]
    assert harness.call("prepare_instance.sh", "v1", "x", *files) == (0, "")
    paths = ["--onnx_path", str(harness.onnx), "--vnnlib_path", str(harness.vnnlib)]
    assert harness.arguments() == ["-m", "abcrown_dist", "prepare", *paths]


def test_prepare_takes_the_settings_of_the_category(harness: Harness) -> None:
    """An input shape that it names decides how the network is converted."""
    config = harness.root / "configs" / "vnncomp" / "acasxu.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("{}")
    assert harness.call("prepare_instance.sh", "v1", "acasxu", harness.onnx, harness.vnnlib) == (0, "")
    assert harness.arguments()[2:5] == ["prepare", "--config", str(config)]


@pytest.mark.parametrize("fake", ["echo broken >&2; exit 3", "kill -KILL $$"])
def test_what_prepare_cannot_convert_is_left_to_the_run(harness: Harness, fake: str) -> None:
    """A failed preparation would take the instance out of the competition."""
    code, errors = harness.call("prepare_instance.sh", "v1", "x", harness.onnx, harness.vnnlib, fake=fake)
    assert code == 0
    assert "is not converted ahead; run_instance.sh will try" in errors


@pytest.mark.parametrize("missing", ["onnx", "vnnlib"])
def test_prepare_names_a_missing_file(harness: Harness, missing: str) -> None:
    path: Path = getattr(harness, missing)
    path.unlink()
    code, errors = harness.call("prepare_instance.sh", "v1", "x", harness.onnx, harness.vnnlib)
    assert code == 1
    assert str(path) in errors


def test_install_makes_the_environment_and_tries_it(harness: Harness) -> None:
    installed = harness.root / ".venv" / "bin" / "python"
    (harness.root / "Makefile").write_text(
        f'install:\n\tmkdir -p .venv/bin\n\tcp "{harness.python}" .venv/bin/python\n'
    )
    code, errors = harness.call("install_tool.sh", "v1")
    assert code == 0, errors
    assert installed.exists()
    assert harness.arguments() == ["-m", "abcrown_dist", "--help"]


def test_install_fails_when_the_program_does_not_start(harness: Harness) -> None:
    (harness.root / "Makefile").write_text(
        f'install:\n\tmkdir -p .venv/bin\n\tcp "{harness.python}" .venv/bin/python\n'
    )
    assert harness.call("install_tool.sh", "v1", fake="exit 1")[0] != 0


# The real program, from the real repository

DIGITS = SCRIPTS.parent / "examples" / "digits"


def compress(source: Path, target: Path) -> Path:
    target.write_bytes(gzip.compress(source.read_bytes()))
    return target


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the graph cache, instead of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches" / "abcrown_dist"


def call(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script as the harness does: from another folder, with a bare environment."""
    environment = {name: os.environ[name] for name in ("PATH", "XDG_CACHE_HOME")}
    environment["ABCROWN_PYTHON"] = sys.executable
    command = [str(SCRIPTS / script), "v1", *map(str, arguments)]
    return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "verdict", "category", "compressed"),
    [("crown", "unsat", "digits_2026", False), ("false", "sat", "a category of no year", True)],
)
def test_the_digits(
    tmp_path: Path, own_cache: Path, kind: str, verdict: str, category: str, compressed: bool
) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    onnx, vnnlib = DIGITS / "digits_mlp.onnx", DIGITS / f"digits_mlp_{kind}.vnnlib"
    if compressed:
        onnx, vnnlib = compress(onnx, folder / "a net.onnx.gz"), compress(vnnlib, folder / "a prop.vnnlib.gz")
    results = folder / "new" / "a result.txt"
    prepared = call("prepare_instance.sh", category, onnx, vnnlib)
    assert (prepared.returncode, prepared.stderr) == (0, "")
    kept = {file: file.stat().st_mtime_ns for file in own_cache.iterdir()}
    assert sorted(file.suffix for file in kept) == [".compared", ".graph"]
    ran = call("run_instance.sh", category, onnx, vnnlib, results, 60)
    assert ran.returncode == 0, ran.stderr
    first, *witness = results.read_text().splitlines()
    assert first == verdict
    assert {file: file.stat().st_mtime_ns for file in own_cache.iterdir()} == kept
    assert sorted(path.name for path in results.parent.iterdir()) == [results.name]
    if verdict == "sat":
        assert_counterexample(onnx, vnnlib, witness)
    else:
        assert witness == []


def assert_counterexample(onnx: Path, vnnlib: Path, witness: list[str]) -> None:
    """Replay as the competition's checker does: the X as printed, in float32, through onnxruntime."""
    import numpy as np
    import onnxruntime

    pairs = [line.strip(" ()").split() for line in witness]
    x = np.array([float(value) for name, value in pairs if name.startswith("X_")], dtype=np.float32)
    session = onnxruntime.InferenceSession(gzip.decompress(onnx.read_bytes()))
    (wanted,) = session.get_inputs()
    shape = [extent if isinstance(extent, int) and extent > 0 else 1 for extent in wanted.shape]
    (y,) = session.run(None, {wanted.name: x.reshape(shape)})
    prop = load_vnnlib(vnnlib)
    values = {f"Y_{i}": value for i, value in enumerate(y.ravel().tolist())}
    values |= {f"X_{i}": value for i, value in enumerate(x.tolist())}
    assert any(
        all(
            sum(float(factor) * values[name] for name, factor in terms.items()) <= float(rhs)
            for terms, rhs in disjunct.terms
        )
        and all(
            float(low) - 1e-7 <= value <= float(high) + 1e-7
            for low, value, high in zip(disjunct.box.lower, x.tolist(), disjunct.box.upper, strict=True)
        )
        for disjunct in prop.disjuncts
    )


@pytest.mark.slow
def test_too_little_time_for_the_digits(tmp_path: Path) -> None:
    results = tmp_path / "out.txt"
    vnnlib = DIGITS / "digits_mlp_crown.vnnlib"
    assert call("run_instance.sh", "x", DIGITS / "digits_mlp.onnx", vnnlib, results, 0.2).returncode == 0
    assert results.read_text() == "timeout\n"


@pytest.mark.slow
def test_a_broken_network_is_an_error(tmp_path: Path) -> None:
    results, onnx = tmp_path / "out.txt", tmp_path / "net.onnx"
    onnx.write_bytes(b"\x00\x01")
    ran = call("run_instance.sh", "x", onnx, DIGITS / "digits_mlp_crown.vnnlib", results, 60)
    assert results.read_text() == "error\n"
    assert "not a readable ONNX file" in ran.stderr
    assert "Traceback" not in ran.stderr
