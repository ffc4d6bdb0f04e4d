"""Around the main flow: files that are written, batches from a CSV, exit codes, one-line errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import abcrown_dist.flow as flow_module
import abcrown_dist.session as session
from abcrown_dist import cli
from abcrown_dist.config import Config
from abcrown_dist.problem import Instance
from abcrown_dist.spec.property import Verdict
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.util.errors import LoadError
from abcrown_dist.verify import Outcome
from tests import flow
from tests.models import OnnxBuilder, identity

ROOT = Path(__file__).resolve().parent.parent
BOX: list[flow.Range] = [(-1, 1)] * 2

Capture = pytest.CaptureFixture[str]
Run = Callable[..., int]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a network and two properties."""
    monkeypatch.chdir(tmp_path)
    identity(tmp_path / "net.onnx", 2)
    flow.write_property(tmp_path / "unsat.vnnlib", BOX, 2, "(or (<= Y_0 -2) (>= Y_1 3))")
    flow.write_property(tmp_path / "sat.vnnlib", BOX, 2, "(or (<= Y_0 -2) (>= Y_1 0.5))")
    return tmp_path


def main(*words: str) -> int:
    return cli.main(["--device", "cpu", "--progress", "none", *words])


def single(prop: str, *words: str) -> int:
    return main("--onnx_path", "net.onnx", "--vnnlib_path", prop, *words)


def batch(rows: str | bytes, *words: str) -> int:
    content = rows.encode() if isinstance(rows, str) else rows
    Path("list.csv").write_bytes(content)
    return main("--csv_name", "list.csv", *words)


def verdicts(folder: Path) -> dict[str, str]:
    """First lines of all results files."""
    return {path.name: path.read_text().splitlines()[0] for path in sorted(folder.glob("out*.txt"))}


def fail(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def broken(*arguments: Any, **named: Any) -> None:
        raise error

    monkeypatch.setattr(flow_module, "refute", broken)


# One instance


def test_a_proof(files: Path, capsys: Capture) -> None:
    assert single("unsat.vnnlib") == 0
    assert (files / "out.txt").read_text() == "unsat\n"
    out, err = capsys.readouterr()
    assert out.startswith("verdict: unsat (refuted by ")
    assert err == ""


def test_a_counterexample(files: Path) -> None:
    assert single("sat.vnnlib", "--save_adv_example", "--results_file", "new/folder/r.txt") == 0
    first, _, witness = (files / "new/folder/r.txt").read_text().partition("\n")
    assert first == "sat"
    assert witness.startswith("((X_0 ") and "(Y_1 " in witness
    assert (files / "test_cex.txt").read_text() == witness


def test_no_counterexample_file_without_asking_for_it(files: Path) -> None:
    assert single("sat.vnnlib") == 0
    assert not (files / "test_cex.txt").exists()


def test_no_temporary_files_are_left(files: Path) -> None:
    before = set(os.listdir(files))
    assert single("sat.vnnlib", "--summary_file", "s.json", "--save_adv_example") == 0
    assert set(os.listdir(files)) - before == {"out.txt", "s.json", "test_cex.txt"}


def test_the_summary(files: Path) -> None:
    assert single("unsat.vnnlib", "--summary_file", "s.json", "--seed", "7", "--timeout", "33") == 0
    summary = json.loads((files / "s.json").read_text())
    assert summary["verdict"] == "unsat"
    assert summary["reason"].startswith("refuted by ")
    assert summary["instance"] == {"onnx": "net.onnx", "vnnlib": "unsat.vnnlib", "timeout": 33.0}
    assert [bound["disjunct"] for bound in summary["bounds"]] == [0, 1]
    assert [bound["lower"] for bound in summary["bounds"]] == [[1.0], [2.0]]
    assert all(bound["refuted"] and bound["method"] for bound in summary["bounds"])
    seconds = summary["seconds"]
    assert {"load", "attack", "total"} <= set(seconds)
    assert sum(value for name, value in seconds.items() if name != "total") <= seconds["total"]
    assert summary["memory"]["peak_rss_bytes"] > 2**20
    assert {"python", "torch", "onnxruntime", "numpy"} <= set(summary["versions"])
    assert summary["seed"] == 7
    assert summary["config"]["bab"]["timeout"] == 33.0
    assert summary["config"]["solver"]["batch_size"] == 64


NOTHING = ("--no_incomplete", "--pgd_order", "skip", "--complete_verifier", "skip")


def test_the_summary_of_what_is_left_open(files: Path) -> None:
    assert single("sat.vnnlib", "--summary_file", "s.json", *NOTHING) == 0
    summary = json.loads((files / "s.json").read_text())
    assert (summary["verdict"], summary["bounds"]) == ("unknown", [])
    assert (files / "out.txt").read_text() == "unknown\n"


def test_a_timeout_is_a_verdict(files: Path) -> None:
    assert single("unsat.vnnlib", "--timeout", "1e-9", "--summary_file", "s.json") == 0
    assert (files / "out.txt").read_text() == "timeout\n"
    assert json.loads((files / "s.json").read_text())["verdict"] == "timeout"


def test_the_clock_starts_with_the_process(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Deadline] = []

    def verify(config: Config, instance: Instance, deadline: Deadline, *rest: object) -> Outcome:
        seen.append(deadline)
        return Outcome(reason="not tried")

    monkeypatch.setattr(session, "verify", verify)
    config = flow.configure(Path("net.onnx"), Path("sat.vnnlib"), "--timeout", "9")
    assert session.run(config, 12.5) == 0
    assert [(deadline.start, deadline.seconds) for deadline in seen] == [(12.5, 9.0)]


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA out of memory")])
def test_out_of_memory_is_unknown(files: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    fail(monkeypatch, error)
    assert single("unsat.vnnlib") == 0
    assert (files / "out.txt").read_text() == "unknown\n"


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ValueError("a\ndefect"), 4, "internal error: ValueError: a defect; run with --debug.traceback true"),
        (LoadError("net.onnx: bad"), 3, "error: net.onnx: bad"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_a_failure_leaves_an_error(
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    error: BaseException,
    code: int,
    text: str,
) -> None:
    (files / "out.txt").write_text("unsat\n")  # of an earlier run
    (files / "s.json").write_text('{"verdict": "unsat"}')
    fail(monkeypatch, error)
    assert single("unsat.vnnlib", "--summary_file", "s.json") == code
    assert (files / "out.txt").read_text() == "error\n"
    assert json.loads((files / "s.json").read_text())["verdict"] == "error"
    out, err = capsys.readouterr()
    assert (out, err.strip()) == ("", text)


def test_a_traceback_on_request(files: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    fail(monkeypatch, ValueError("a defect"))
    assert single("unsat.vnnlib", "--debug.traceback", "true") == 4
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith("internal error: ValueError: a defect\n")


# Mistakes of users: one line, the right code, and never a traceback


def one_line(capsys: Capture) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    return err.removeprefix("error: ").strip()


@pytest.mark.parametrize("key", ["--results_file", "--summary_file", "--cex_path"])
@pytest.mark.parametrize(
    ("place", "reason"), [(".", "Is a directory"), ("net.onnx/out.txt", "Not a directory")]
)
def test_a_place_that_cannot_be_written_is_found_out_before_the_work(
    files: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, key: str, place: str, reason: str
) -> None:
    def verify(*arguments: Any) -> None:
        raise AssertionError("the work began")

    monkeypatch.setattr(session, "verify", verify)
    assert single("sat.vnnlib", "--save_adv_example", key, place) == 2
    assert one_line(capsys) == f"cannot write '{place}': {reason}"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk(files: Path, capsys: Capture) -> None:
    assert single("unsat.vnnlib", "--results_file", "/dev/full") == 2
    assert one_line(capsys) == "cannot write '/dev/full': No space left on device"


def test_a_stream_is_appended_to(files: Path) -> None:
    """`--results_file /dev/stdout >log` must not replace the log."""
    if not os.path.exists("/dev/fd"):
        pytest.skip("needs /dev/fd")
    with open("log", "w") as log:
        log.write("before\n")
        log.flush()
        assert single("unsat.vnnlib", "--results_file", f"/dev/fd/{log.fileno()}") == 0
        log.write("after\n")
    assert (files / "log").read_text() == "before\nunsat\nafter\n"


def test_a_stream_that_is_closed(files: Path, capsys: Capture) -> None:
    assert single("unsat.vnnlib", "--results_file", "/dev/fd/999") == 2
    assert one_line(capsys).startswith("cannot write '/dev/fd/999': ")


BAD_FILES: dict[str, tuple[str, bytes | None, str]] = {
    "missing_model": ("bad.onnx", None, "bad.onnx: no such file"),
    "empty_model": ("bad.onnx", b"", "bad.onnx: not an ONNX model (it holds no graph with outputs)"),
    "random_model": ("bad.onnx", bytes(range(256)), "bad.onnx: not a readable ONNX file ("),
    "model_not_gzip": ("bad.onnx.gz", b"no", "bad.onnx.gz: not a readable ONNX file ("),
    "missing_property": ("bad.vnnlib", None, "bad.vnnlib: cannot read the property: No such file"),
    "empty_property": ("bad.vnnlib", b"", "bad.vnnlib: no input X_0 is declared"),
    "binary_property": ("bad.vnnlib", b"\xff\xfe\x00", "bad.vnnlib: cannot read the property: 'utf-8' codec"),
    "gzip_cut_off": ("bad.vnnlib", b"\x1f\x8b\x08\x00", "bad.vnnlib: cannot read the property: "),
    "gzip_garbled": (
        "bad.vnnlib",
        b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xff\xff\xff\xff\xff",
        "bad.vnnlib: cannot read the property: ",
    ),
    "property_cut_off": (
        "bad.vnnlib",
        b"(declare-const X_0 Real",
        "bad.vnnlib:1:1: this parenthesis",
    ),
    "property_of_2_0": ("bad.vnnlib", b"(vnnlib-version <2.0>)", "bad.vnnlib:1:2: unknown command"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_cannot_be_read(files: Path, capsys: Capture, name: str) -> None:
    path, content, message = BAD_FILES[name]
    if content is not None:
        (files / path).write_bytes(content)
    model, prop = (path, "sat.vnnlib") if ".onnx" in path else ("net.onnx", path)
    assert main("--onnx_path", model, "--vnnlib_path", prop) == 3
    assert one_line(capsys).startswith(message)
    assert verdicts(files) == {"out.txt": "error"}


def test_folders_in_the_place_of_files(files: Path, capsys: Capture) -> None:
    (files / "folder").mkdir()
    assert main("--onnx_path", "folder", "--vnnlib_path", "sat.vnnlib") == 3
    assert one_line(capsys) == "folder: no such file"
    assert single("folder") == 3
    assert one_line(capsys) == "folder: cannot read the property: Is a directory"


def test_a_zero_byte_in_a_name(files: Path, capsys: Capture) -> None:
    (files / "c.yaml").write_text('specification:\n  vnnlib_path: "a\\0b"\n')
    assert main("--config", "c.yaml", "--onnx_path", "net.onnx") == 3
    assert "cannot read the property: embedded null byte" in one_line(capsys)
    (files / "c.yaml").write_text('general:\n  results_file: "a\\0b"\n')
    assert single("sat.vnnlib", "--config", "c.yaml") == 2
    assert "embedded null byte" in one_line(capsys)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("[1,3]", "net.onnx: the property declares 2 inputs, but the network has 3"),
        ("[2]", "net.onnx: onnxruntime cannot run the model ("),
    ],
)
def test_an_input_shape_that_does_not_fit(files: Path, capsys: Capture, shape: str, message: str) -> None:
    assert single("unsat.vnnlib", "--input_shape", shape) == 3
    assert one_line(capsys).startswith(message)


@pytest.mark.parametrize("before", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte_order_mark"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_text_files_of_every_system(files: Path, before: bytes, end: bytes) -> None:
    for name in ("sat", "unsat"):
        text = (files / f"{name}.vnnlib").read_bytes()
        (files / f"{name}.vnnlib").write_bytes(before + text.replace(b"\n", end))
    rows = [b"net.onnx,sat.vnnlib,10", b"", b'"net.onnx", "unsat.vnnlib"']
    assert batch(before + end.join(rows)) == 0
    assert verdicts(files) == {"out_0.txt": "sat", "out_1.txt": "unsat"}


# A batch


def test_a_batch_goes_on_after_a_failure(files: Path, capsys: Capture) -> None:
    (files / "broken.vnnlib").write_text("(declare-const X_0 Real)\n(assert (<= X_0))\n")
    rows = (
        "net.onnx,unsat.vnnlib,20\nmissing.onnx,unsat.vnnlib,20\n\nnet.onnx\nnet.onnx,sat.vnnlib,-1\n"
        "net.onnx,sat.vnnlib,soon\nnet.onnx,broken.vnnlib\nnet.onnx,sat.vnnlib,20\n"
    )
    assert batch(rows, "--summary_file", "s.json", "--save_adv_example", "--cex_path", "cex.txt") == 3
    assert list(verdicts(files).values()) == ["unsat", *["error"] * 5, "sat"]
    assert list(verdicts(files)) == [f"out_{i}.txt" for i in range(7)]
    assert json.loads((files / "s_6.json").read_text())["verdict"] == "sat"
    assert json.loads((files / "s_1.json").read_text())["verdict"] == "error"
    assert sorted(path.name for path in files.glob("cex*")) == ["cex_6.txt"]
    out, err = capsys.readouterr()
    for text in (
        "missing.onnx: no such file",
        "instance 2 needs a model and a property, found 'net.onnx'",
        "the timeout of instance 3 is not a number of seconds > 0: '-1'",
        "the timeout of instance 4 is not a number of seconds > 0: 'soon'",
        "broken.vnnlib:2:",
        "7 instances: 1 sat, 1 unsat, 5 error",
    ):
        assert text in out
    assert err == ""


def test_a_batch_goes_on_after_a_defect(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    fail(monkeypatch, ValueError("a defect"))
    assert batch("net.onnx,unsat.vnnlib\nnet.onnx,sat.vnnlib\n") == 4
    assert verdicts(files) == {"out_0.txt": "error", "out_1.txt": "sat"}  # found before any bound
    assert "ValueError: a defect" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        ((), [0, 1, 2]),
        (("--start", "1"), [1, 2]),
        (("--end", "2"), [0, 1]),
        (("--start", "1", "--end", "2"), [1]),
        (("--select_instance", "[2,0]"), [2, 0]),
    ],
)
def test_the_chosen_instances(
    files: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], chosen: list[int]
) -> None:
    seen: list[float] = []

    def verify(config: Config, instance: Instance, deadline: Deadline, *rest: object) -> Outcome:
        seen.append(instance.timeout)
        return Outcome(Verdict.UNKNOWN, "not tried")

    monkeypatch.setattr(session, "verify", verify)
    rows = "net.onnx,sat.vnnlib,10\nnet.onnx,sat.vnnlib\nnet.onnx,sat.vnnlib,30\n"
    assert batch(rows, *words, "--timeout", "77") == 0
    assert seen == [[10.0, 77.0, 30.0][i] for i in chosen]
    assert verdicts(files) == {f"out_{i}.txt": "unknown" for i in sorted(chosen)}


def test_each_instance_has_a_clock_of_its_own(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[float] = []

    def verify(config: Config, instance: Instance, deadline: Deadline, *rest: object) -> Outcome:
        starts.append(deadline.start)
        return Outcome(reason="not tried")

    monkeypatch.setattr(session, "verify", verify)
    Path("list.csv").write_text("net.onnx,sat.vnnlib\n" * 3)
    from abcrown_dist.config.load import load_config

    session.run(load_config(["--csv_name", "list.csv", "--progress", "none"]), 1.0)
    first, second, third = starts
    assert first == 1.0
    assert 1.0 < second <= third


@pytest.mark.parametrize(
    ("rows", "words", "message"),
    [
        (b"net.onnx,sat.vnnlib", ("--start", "1"), "there is no instance 1: it lists 1, counted from 0"),
        (b"net.onnx,sat.vnnlib", ("--select_instance", "[0,5]"), "there is no instance 5: it lists 1"),
        (b"\n , \n", (), "there is no instance 0: it lists 0, counted from 0"),
        (b"\xff\xfe", (), "cannot read the list of instances ('utf-8' codec"),
        (b'"' + b"a" * 200_000 + b'"', (), "cannot read the list of instances (field larger than"),
    ],
)
def test_a_list_that_holds_no_such_instance(
    files: Path, capsys: Capture, rows: bytes, words: tuple[str, ...], message: str
) -> None:
    assert batch(rows, *words) == 3
    assert one_line(capsys).startswith(f"list.csv: {message}")
    assert verdicts(files) == {}


def test_a_list_that_is_missing(files: Path, capsys: Capture) -> None:
    assert main("--csv_name", "nowhere.csv") == 3
    assert one_line(capsys).startswith("nowhere.csv: cannot read the list of instances (")


def test_paths_of_a_list_start_from_its_own_folder(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("list.csv").write_text("net.onnx,unsat.vnnlib\n")
    elsewhere = files / "else" / "where"
    elsewhere.mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    assert main("--csv_name", "../../list.csv") == 0
    assert verdicts(elsewhere) == {"out_0.txt": "unsat"}


def test_paths_from_another_folder(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (files / "sub").mkdir()
    monkeypatch.chdir(files / "sub")
    assert main("--onnx_path", "../net.onnx", "--vnnlib_path", "../sat.vnnlib") == 0
    words = ("--onnx_path", "net.onnx", "--vnnlib_path", "unsat.vnnlib", "--root_path", "..")
    assert main(*words, "--results_file", "out_root.txt") == 0
    assert verdicts(files / "sub") == {"out.txt": "sat", "out_root.txt": "unsat"}


def test_results_of_an_earlier_run_are_gone_before_the_work_begins(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed must not leave another one's verdict behind."""
    (files / "out.txt").write_text("unsat\n")
    seen: list[bool] = []

    def verify(*arguments: object) -> Outcome:
        seen.append((files / "out.txt").exists())
        return Outcome(Verdict.UNKNOWN, "nothing was done")

    monkeypatch.setattr("abcrown_dist.session.verify", verify)
    assert single("unsat.vnnlib") == 0
    assert seen == [False]
    assert (files / "out.txt").read_text() == "unknown\n"


def test_a_plot_that_fails_leaves_the_verdict(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise ValueError("no ink")

    monkeypatch.setattr("abcrown_dist.session.write_plot", fail)
    assert single("unsat.vnnlib", "--plot", "course.png") == 0
    assert (files / "out.txt").read_text() == "unsat\n"


def test_a_terminated_run_says_error(files: Path) -> None:
    """SIGTERM in a search that does not end: relu(sum x) - sum relu(x) is 0 along ridges of the box."""
    count = 12
    build = OnnxBuilder()
    weight = np.concatenate([np.eye(count), np.ones((count, 1))], axis=1)
    signs = np.append(-np.ones(count), 1.0)[:, None]
    hidden = build.op("Relu", build.op("MatMul", build.input("x", [1, count]), build.constant(weight)))
    build.output(build.op("MatMul", hidden, build.constant(signs)), [1, 1])
    build.save(files / "ridges.onnx")
    flow.write_property(files / "never.vnnlib", [("-1", "1")] * count, 1, "(>= Y_0 0.01)")
    words = ["--onnx_path", "ridges.onnx", "--vnnlib_path", "never.vnnlib", "--pgd_order", "skip"]
    words += ["--bab.branching.input_split.enable", "true"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "abcrown_dist", *words, "--device", "cpu", "--progress", "plain"],
        cwd=files, env=environment, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if "branch on inputs" in line:  # the short search has given up, the long one begins
            break
    process.send_signal(signal.SIGTERM)
    process.stderr.read()
    assert process.wait(30) == 143
    assert (files / "out.txt").read_text() == "error\n"


def test_a_batch_leaves_no_verdict_of_an_earlier_one(files: Path) -> None:
    """Not where a row cannot even be read; and it touches no file that it does not write."""
    for name in ("out.txt", "out_0.txt", "out_1.txt"):
        (files / name).write_text("unsat\n")
    assert batch("missing.onnx,unsat.vnnlib\nnet.onnx,sat.vnnlib\n") == 3
    assert verdicts(files) == {"out.txt": "unsat", "out_0.txt": "error", "out_1.txt": "sat"}
