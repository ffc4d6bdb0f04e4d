"""The graph cache: what it gives is what a conversion gives, whatever has happened to its folder."""

from __future__ import annotations

import gzip
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from abcrown_dist.graph import cache as cache_module
from abcrown_dist.graph.cache import GraphCache, default_folder
from abcrown_dist.graph.load_onnx import LoadedModel, load_onnx
from abcrown_dist.graph.stored import write_model
from abcrown_dist.util.errors import DeadlineExceeded, LoadError
from tests.graph.test_stored import assert_same
from tests.models import OnnxBuilder, mlp, residual_cnn, transpose_broadcast

ROOT = Path(__file__).resolve().parent.parent.parent
LOW, HIGH = np.zeros(3), np.ones(3)


class Calls:
    """Counts what a cache lets others do: conversions, and comparisons with onnxruntime of its own."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.conversions = self.comparisons = 0
        self._load, self._compare = cache_module.load_onnx, cache_module.find_difference
        patch.setattr(cache_module, "load_onnx", self._convert)
        patch.setattr(cache_module, "find_difference", self._find)

    def _convert(self, *arguments: Any) -> LoadedModel:
        self.conversions += 1
        return self._load(*arguments)

    def _find(self, *arguments: Any) -> Any:
        self.comparisons += 1
        return self._compare(*arguments)

    def take(self) -> tuple[int, int]:
        """Conversions and comparisons since the last call."""
        found = self.conversions, self.comparisons
        self.conversions = self.comparisons = 0
        return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


@pytest.fixture
def cache(tmp_path: Path) -> GraphCache:
    return GraphCache(tmp_path / "new" / "cache")


@pytest.fixture
def net(tmp_path: Path) -> Path:
    return mlp(tmp_path / "net.onnx", [3, 6, 2])


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Every warning of the cache must be one that the test expects, by clearing it."""
    caplog.set_level(logging.WARNING)
    yield caplog
    assert caplog.messages == []


def expect_warning(heard: pytest.LogCaptureFixture, part: str) -> None:
    (message,) = heard.messages
    assert part in message
    heard.clear()


def graph_file(cache: GraphCache) -> Path:
    (found,) = cache.folder.glob("*.graph")
    return found


# What is found


@pytest.mark.parametrize("make", [residual_cnn, transpose_broadcast])
def test_a_hit_is_the_conversion_bit_for_bit(
    tmp_path: Path, cache: GraphCache, calls: Calls, make: Any
) -> None:
    path = make(tmp_path / "m.onnx")
    plain, cold = load_onnx(path), cache.load(path)
    assert calls.take() == (1, 0)
    warm = cache.load(path)
    assert calls.take() == (0, 0)
    for found in (cold, warm):
        assert_same(found, plain)
        assert (found.path, found.warnings) == (str(path), ())


def test_real_networks(bench: Path, cache: GraphCache, calls: Calls) -> None:
    paths = sorted([*bench.rglob("*.onnx"), *bench.rglob("*.onnx.gz")])
    for path in paths:
        cold = cache.load(path)
        assert_same(cache.load(path), cold)
    assert calls.take() == (len(paths), 0)


def test_a_copy_of_the_file_is_the_same_network(cache: GraphCache, net: Path, calls: Calls) -> None:
    cache.load(net)
    copy = Path(shutil.copy(net, net.with_name("copy.onnx")))
    assert cache.load(copy).path == str(copy)
    assert calls.take() == (1, 0)


def test_another_content_is_another_network(cache: GraphCache, net: Path, calls: Calls) -> None:
    cache.load(net)
    mlp(net, [3, 6, 2], seed=1)
    assert_same(cache.load(net), load_onnx(net))
    assert calls.take() == (2, 0)
    assert len(list(cache.folder.glob("*.graph"))) == 2


def test_compressed_and_plain_files_do_not_mix(cache: GraphCache, net: Path, calls: Calls) -> None:
    """The same bytes under another suffix are read in another way: here, not at all."""
    packed = net.with_name("net.onnx.gz")
    packed.write_bytes(gzip.compress(net.read_bytes()))
    cache.load(packed)
    assert_same(cache.load(packed), load_onnx(net))
    assert calls.take() == (1, 0)
    with pytest.raises(LoadError, match="not a readable ONNX file"):
        cache.load(Path(shutil.copy(packed, net.with_name("wrong.onnx"))))


def test_the_input_shape_counts(tmp_path: Path, cache: GraphCache, calls: Calls) -> None:
    build = OnnxBuilder()
    build.output(build.op("Relu", build.input("x", ["n", "m"]), name="y"), ["n", "m"])
    path = build.save(tmp_path / "m.onnx")
    shapes = [None, [1, 4], [1, 5], (1, 4)]
    found = [cache.load(path, shape).input_shapes for shape in shapes]
    assert found == [((1, 1),), ((1, 4),), ((1, 5),), ((1, 4),)]
    assert calls.take() == (3, 0)


@pytest.mark.parametrize("what", ["FORMAT", "__version__"])
def test_another_version_converts_anew(
    cache: GraphCache, net: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    cache.load(net)
    monkeypatch.setattr(cache_module, what, "of tomorrow")
    cache_module._converter.cache_clear()
    try:
        cache.load(net)
    finally:
        cache_module._converter.cache_clear()
    assert calls.take() == (2, 0)


def test_a_change_of_the_code_that_converts_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that nobody thought worth a new version."""
    converter = cache_module._converter.__wrapped__  # without its memory
    before = converter()
    copy = Path(shutil.copytree(Path(cache_module.__file__).parent, tmp_path / "graph"))
    monkeypatch.setattr(cache_module, "__file__", str(copy / "cache.py"))
    assert converter() == before
    with open(copy / "fuse.py", "a") as stream:
        stream.write("# changed\n")
    assert converter() != before


def test_every_library_that_converts_counts() -> None:
    found = " ".join(cache_module._converter())
    assert all(f"{name} " in found for name in ("torch", "onnx", "onnx2pytorch", "onnxruntime"))
    assert torch.__version__.partition("+")[0] in found


def external(path: Path, seed: int) -> Path:
    """A network whose weights lie in a file beside it; the network's own bytes do not depend on them."""
    path.with_name("w.bin").unlink(missing_ok=True)  # which onnx would append to
    build = OnnxBuilder(seed)
    build.output(build.gemm(build.input("x", [1, 3]), 3, 2, name="y"), [1, 2])
    onnx.save(build.model(), str(path), save_as_external_data=True, location="w.bin", size_threshold=0)
    return path


@pytest.mark.parametrize("packed", [False, True])
def test_external_data_counts(tmp_path: Path, cache: GraphCache, calls: Calls, packed: bool) -> None:
    path = external(tmp_path / "m.onnx", 0)
    if packed:
        zipped = tmp_path / "m.onnx.gz"
        zipped.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
        path = zipped
    first = cache.load(path, None, LOW, HIGH)
    assert_same(cache.load(path, None, LOW, HIGH), first)
    cache.load(path, None, LOW, HIGH + 1)  # another box: onnxruntime finds the data, too
    assert calls.take() == (1, 1)
    before = path.read_bytes()
    external(tmp_path / "m.onnx", 1)
    assert path.read_bytes() == before
    second = cache.load(path)
    assert calls.take() == (1, 0)
    assert_same(second, load_onnx(path))
    with pytest.raises(AssertionError):
        assert_same(second, first)
    (tmp_path / "w.bin").unlink()
    with pytest.raises(LoadError):
        cache.load(path)


def test_external_data_of_inner_graphs_is_found(tmp_path: Path) -> None:
    def tensor(name: str) -> onnx.TensorProto:
        found = onnx.TensorProto(name=name, data_type=1, dims=[1], data_location=onnx.TensorProto.EXTERNAL)
        found.external_data.add(key="location", value=f"{name}.bin")
        found.external_data.add(key="offset", value="0")
        return found

    helper = onnx.helper
    constant = helper.make_node("Constant", [], ["c"], value=tensor("attribute"))
    inner = helper.make_graph([constant], "inner", [], [], [tensor("inner")])
    branch = helper.make_node("If", ["b"], ["y"], then_branch=inner, else_branch=inner)
    outer = helper.make_graph([branch], "outer", [], [], [tensor("outer"), tensor("outer")])
    path = tmp_path / "m.onnx"
    path.write_bytes(helper.make_model(outer).SerializeToString())
    assert cache_module.external_files(path) == ["attribute.bin", "inner.bin", "outer.bin"]


# The comparison with onnxruntime


def test_each_box_is_compared_once(cache: GraphCache, net: Path, calls: Calls) -> None:
    cache.load(net, None, LOW, HIGH)
    assert calls.take() == (1, 0)
    for low, high in ((LOW, HIGH + 1), (LOW - 1, HIGH), (None, None)):
        cache.load(net, None, low, high)
        assert calls.take() == (0, 1)
        cache.load(net, None, low, high)
        assert calls.take() == (0, 0)


def forge(cache: GraphCache, net: Path) -> None:
    """Put a wrong network, with right digests, in the place of the one that is there."""
    model = load_onnx(net)
    constants = {key: value * 1.01 for key, value in model.graph.constants.items()}
    wrong = replace(model, graph=replace(model.graph, constants=constants))
    file = graph_file(cache)
    with open(file, "wb") as stream:
        write_model(stream, wrong, {"key": file.stem, "external": {}})


def test_a_wrong_graph_does_not_pass_for_the_compared_one(
    cache: GraphCache, net: Path, calls: Calls
) -> None:
    """A note of a comparison is about one graph, not about what bears its name."""
    cache.load(net, None, LOW, HIGH)
    forge(cache, net)
    assert_same(cache.load(net, None, LOW, HIGH), load_onnx(net))
    assert calls.take() == (2, 1)
    cache.load(net, None, LOW, HIGH)
    assert calls.take() == (0, 0)


def test_a_wrong_graph_shows_at_the_next_box(cache: GraphCache, net: Path, calls: Calls) -> None:
    cache.load(net, None, LOW, HIGH)
    forge(cache, net)
    assert_same(cache.load(net, None, LOW, HIGH + 1), load_onnx(net))
    assert calls.take() == (2, 1)


def test_a_note_under_the_name_of_another_box_counts_for_nothing(
    cache: GraphCache, net: Path, calls: Calls
) -> None:
    cache.load(net, None, LOW, HIGH)
    (note,) = cache.folder.glob("*.compared")
    cache.load(net, None, LOW, HIGH + 1)
    (other,) = set(cache.folder.glob("*.compared")) - {note}
    shutil.copy(note, other)
    calls.take()
    cache.load(net, None, LOW, HIGH + 1)
    assert calls.take() == (0, 1)


def test_a_box_of_another_size_is_refused(cache: GraphCache, net: Path) -> None:
    cache.load(net)
    with pytest.raises(LoadError, match="the property declares 2 inputs, but the network has 3"):
        cache.load(net, None, LOW[:2], HIGH[:2])


def test_a_warning_of_the_network_is_given_each_time(tmp_path: Path, cache: GraphCache, calls: Calls) -> None:
    build = OnnxBuilder()
    weight = build.constant(np.array([[np.nan, 1.0], [1.0, 1.0]]))
    build.output(build.op("Gemm", build.input("x", [1, 2]), weight, name="y"), [1, 2])
    path = build.save(tmp_path / "m.onnx")
    first, second = cache.load(path), cache.load(path)
    assert calls.take() == (1, 1)
    assert_same(second, first)
    assert first.warnings == second.warnings and "NaN or infinite" in first.warnings[0]


def test_what_cannot_be_loaded_is_not_stored(tmp_path: Path, cache: GraphCache) -> None:
    path = tmp_path / "m.onnx"
    for content, message in ((None, "no such file"), (b"\0\1", "not a readable ONNX file")):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(LoadError, match=message):
            cache.load(path)
    assert not cache.folder.exists()


def test_a_file_that_changes_meanwhile_is_not_stored(
    cache: GraphCache, net: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = cache_module.load_onnx

    def load(*arguments: Any) -> LoadedModel:
        mlp(net, [3, 6, 2], seed=5)
        return original(*arguments)

    monkeypatch.setattr(cache_module, "load_onnx", load)
    cache.load(net)
    assert not cache.folder.exists()


# A folder in a bad state


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: b"", "no stored network"),
        (lambda content: b"PK\3\4 something else altogether", "no stored network"),
        (lambda content: content[: len(content) // 3], "cut off"),
        (lambda content: content[:-1], "cut off"),
        (lambda content: content[:-1] + bytes([content[-1] ^ 1]), "damaged"),
        (lambda content: content[:200] + b"x" + content[201:], "structure is damaged"),
    ],
)
def test_a_damaged_file_is_replaced_with_a_warning(
    cache: GraphCache, net: Path, calls: Calls, heard: pytest.LogCaptureFixture, damage: Any, reason: str
) -> None:
    whole = cache.load(net)
    file = graph_file(cache)
    content = file.read_bytes()
    file.write_bytes(damage(content))
    assert_same(cache.load(net), whole)
    expect_warning(heard, reason)
    assert file.read_bytes() == content
    assert_same(cache.load(net), whole)
    assert calls.take() == (2, 0)


def test_the_file_of_another_network_is_replaced(
    cache: GraphCache, net: Path, heard: pytest.LogCaptureFixture
) -> None:
    cache.load(net)
    file = graph_file(cache)
    other = cache.load(mlp(net.with_name("other.onnx"), [3, 6, 2], seed=1))
    (foreign,) = set(cache.folder.glob("*.graph")) - {file}
    shutil.copy(file, foreign)
    assert_same(cache.load(net.with_name("other.onnx")), other)
    expect_warning(heard, "it holds another network")


def test_a_folder_that_cannot_be_made(tmp_path: Path, net: Path, heard: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    cache = GraphCache(tmp_path / "file" / "cache")
    assert_same(cache.load(net), load_onnx(net))
    assert all(str(cache.folder) in message for message in heard.messages)
    assert "not kept in the graph cache" in heard.messages[-1]
    heard.clear()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(
    cache: GraphCache, net: Path, calls: Calls, heard: pytest.LogCaptureFixture
) -> None:
    cache.folder.mkdir(parents=True)
    cache.folder.chmod(0o500)
    assert_same(cache.load(net), load_onnx(net))
    expect_warning(heard, "Permission denied")
    assert calls.take() == (1, 0)


def test_a_read_only_folder_still_serves(
    cache: GraphCache,
    net: Path,
    calls: Calls,
    heard: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = cache.load(net, None, LOW, HIGH)

    def refuse(path: Path, *arguments: Any, **keywords: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert_same(cache.load(net, None, LOW, HIGH), whole)
    assert_same(cache.load(net, None, LOW, HIGH + 1), whole)
    assert calls.take() == (1, 1)
    expect_warning(heard, "not noted in the graph cache")


def test_what_has_no_form_is_used_but_not_stored(
    cache: GraphCache, net: Path, heard: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*arguments: Any) -> LoadedModel:
        model = load_onnx(*arguments)
        odd = tuple(replace(node, attrs={**node.attrs, "odd": object()}) for node in model.graph)
        return replace(model, graph=replace(model.graph, nodes=odd))

    monkeypatch.setattr(cache_module, "load_onnx", load)
    assert "odd" in cache.load(net).graph["y"].attrs
    expect_warning(heard, "argument of type object")
    assert list(cache.folder.iterdir()) == []


@pytest.mark.parametrize("stop", [KeyboardInterrupt, DeadlineExceeded])
def test_who_is_stopped_while_writing_leaves_nothing(
    cache: GraphCache, net: Path, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    def write(stream: Any, *arguments: Any) -> str:
        stream.write(b"half")
        raise stop

    monkeypatch.setattr(cache_module, "write_model", write)
    with pytest.raises(stop):
        cache.load(net)
    assert list(cache.folder.iterdir()) == []


def _write_and_read(folder: Path, net: Path, rounds: int, results: Any) -> None:
    """As several runs at once do it; every other round finds the files gone."""
    warnings: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    logging.getLogger("abcrown_dist").addHandler(Keep())
    cache, expected = GraphCache(folder), load_onnx(net)
    for number in range(rounds):
        if number % 2:
            for file in folder.glob("*.graph"):
                file.unlink(missing_ok=True)
        assert_same(cache.load(net, None, LOW, HIGH + number % 3), expected)
    results.put(warnings)


def test_several_processes_at_once(cache: GraphCache, net: Path) -> None:
    load_onnx(net)  # the children inherit the imports
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    processes = [
        context.Process(target=_write_and_read, args=(cache.folder, net, 30, results)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert [results.get() for _ in processes] == [[]] * 4
    assert {file.suffix for file in cache.folder.iterdir()} <= {".graph", ".compared"}


# Where it lies


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for named, expected in (("", ".cache"), ("relative", ".cache"), (str(tmp_path / "xdg"), "xdg")):
        monkeypatch.setenv("XDG_CACHE_HOME", named)
        assert default_folder() == tmp_path / expected / "abcrown_dist"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder() == tmp_path / ".cache" / "abcrown_dist"


def test_a_hit_imports_no_converter(cache: GraphCache) -> None:
    """Nor onnxruntime, when the same property has been looked at before and nothing is to be confirmed."""
    words = ["--config", "digits_mlp.yaml", "--cache_dir", str(cache.folder)]
    words += ["--cache_onnx_conversion", "--results_file", str(cache.folder / "out.txt")]
    unwanted = ("onnx", "onnx2pytorch", "torchvision", "onnxruntime")
    code = (
        "import sys; from abcrown_dist.cli import main; "
        f"code = main({words!r}); print(code, [name for name in {unwanted!r} if name in sys.modules])"
    )
    for expected in ("0 ['onnx', 'onnx2pytorch', 'onnxruntime']", "0 []"):
        result = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert result.stdout.splitlines()[-1] == expected, result.stderr
