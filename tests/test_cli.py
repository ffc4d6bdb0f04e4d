"""The command line: one program under four names, exit codes, and one-line errors."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from abcrown_dist import __version__, cli
from abcrown_dist.config import Config
from abcrown_dist.util.errors import ConfigError, LoadError

ROOT = Path(__file__).resolve().parent.parent
MODEL = ["--onnx_path", "m.onnx", "--vnnlib_path", "p.vnnlib"]

UseRun = Callable[[Callable[[Config, float], int]], None]


@pytest.fixture
def use_run(monkeypatch: pytest.MonkeyPatch) -> UseRun:
    """Puts a function in the place of `verify.run`."""

    def use(run: Callable[[Config, float], int]) -> None:
        module = types.ModuleType("abcrown_dist.session")
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "abcrown_dist.session", module)

    return use


def raising(error: BaseException) -> Callable[[Config, float], int]:
    def run(config: Config, start: float) -> int:
        raise error

    return run


def test_run_gets_the_configuration_and_its_code_is_returned(use_run: UseRun) -> None:
    seen: list[tuple[Config, float]] = []

    def run(config: Config, start: float) -> int:
        seen.append((config, start))
        return 0

    use_run(run)
    assert cli.main([*MODEL, "--timeout", "7"]) == 0
    ((config, start),) = seen
    assert config.bab.timeout == 7.0
    assert start > 0


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("no such\n  device"), 2, "error: no such device\n"),
        (LoadError("m.onnx: not there"), 3, "error: m.onnx: not there\n"),
        (
            RuntimeError("a\nb"),
            4,
            "internal error: RuntimeError: a b; run with --debug.traceback true\n",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_are_one_line_with_their_code(
    use_run: UseRun, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, line: str
) -> None:
    use_run(raising(error))
    assert cli.main(MODEL) == code
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("error", [LoadError("bad"), RuntimeError("bad")])
def test_a_traceback_on_request(
    use_run: UseRun, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    use_run(raising(error))
    assert cli.main([*MODEL, "--debug.traceback", "true"]) == (3 if isinstance(error, LoadError) else 4)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1] in ("error: bad", "internal error: RuntimeError: bad")


def test_the_run_is_not_reached_with_a_wrong_configuration(
    use_run: UseRun, capsys: pytest.CaptureFixture[str]
) -> None:
    use_run(raising(AssertionError("reached")))
    assert cli.main([*MODEL, "--timeout", "-1"]) == 2
    assert capsys.readouterr().err == "error: command line: bab.timeout: expected a number > 0, got -1\n"
    assert cli.main([*MODEL, "--timout", "1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"abcrown_dist {__version__}\n"
    assert cli.main(["--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())  # where lines break depends on the terminal
    for part in (
        "exit codes:",
        "--onnx_path",
        "--solver.alpha-crown.iteration",
        "Default: 360.0.",
        "--config",
    ):
        assert part in text


def test_log_lines_go_to_stderr_unless_progress_is_off(
    use_run: UseRun, capsys: pytest.CaptureFixture[str]
) -> None:
    import logging

    def run(config: Config, start: float) -> int:
        logging.getLogger("abcrown_dist.some.module").info("a line")
        logging.getLogger("other").info("noise")
        return 0

    use_run(run)
    cli.main(MODEL)
    cli.main(MODEL)
    assert capsys.readouterr().err == "a line\na line\n"
    cli.main([*MODEL, "--progress", "none"])
    assert capsys.readouterr().err == ""


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from abcrown_dist.cli import main; assert main(['--help']) == 0; "
        "heavy = {'torch', 'numpy', 'onnx', 'onnx2pytorch', 'onnxruntime', 'scipy', 'rich'}; "
        "heavy &= set(sys.modules); "
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.parametrize(
    ("launch", "cwd"),
    [
        (["-m", "abcrown_dist"], ROOT),
        ([str(ROOT / "abcrown_dist.py")], ROOT),
        ([str(ROOT / "abcrown_dist.py")], ROOT.parent),
        (["abcrown_dist.py"], ROOT),
    ],
)
def test_one_program(launch: list[str], cwd: Path) -> None:
    found = subprocess.run([sys.executable, *launch, "--version"], cwd=cwd, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, f"abcrown_dist {__version__}\n")
    found = subprocess.run([sys.executable, *launch, "--nonsense"], cwd=cwd, capture_output=True, text=True)
    assert found.returncode == 2
    assert re.fullmatch(r"error: command line: unknown option --nonsense; nearest .*\n", found.stderr)


def test_the_console_script_is_the_same_program(tmp_path: Path) -> None:
    script = shutil.which("abcrown-dist", path=str(Path(sys.executable).parent))
    if script is None:
        pytest.skip("abcrown-dist is not installed beside this Python (make install)")
    found = subprocess.run([script, "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, f"abcrown_dist {__version__}\n")


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    words = ["-m", "torch.distributed.run", "--nproc_per_node=1", str(ROOT / "abcrown_dist.py"), "--version"]
    found = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert f"abcrown_dist {__version__}\n" in found.stdout


@pytest.mark.parametrize("command", [["plan", "--world-size", "2"], ["prepare"]], ids=" ".join)
def test_under_torchrun_one_process_plans_and_prepares(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others have nothing to do: not even the configuration is read."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert cli.main([*command, "--no-such-option"]) == 0
    monkeypatch.setenv("RANK", "0")
    assert cli.main([*command, "--no-such-option"]) == 2
    assert "no-such-option" in capsys.readouterr().err
