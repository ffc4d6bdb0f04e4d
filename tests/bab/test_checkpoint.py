"""Checkpoints come back bit for bit, and whatever fails in a save leaves the old one or the new one whole."""

from __future__ import annotations

import ast
import builtins
import logging
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from torch import Tensor

from abcrown_dist.bab import checkpoint as container
from abcrown_dist.bab import checkpoint_files
from abcrown_dist.bab.checkpoint import Checkpoint, read
from abcrown_dist.parallel.group import ALONE, Group
from abcrown_dist.util.errors import ConfigError
from tests.bab.checkpoints import (
    NOTES,
    assert_same,
    bits,
    collection,
    save,
    save_collection,
    saved_file,
    state,
    value,
)
from tests.parallel.pool import Pool

Pools = Callable[[int], Pool]


# What is saved is what is read.


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_saved_comes_back_bit_for_bit(pools: Pools, tmp_path: Path, size: int) -> None:
    assert pools(size).run(save_collection, str(tmp_path / "a")) == [True] * size
    saved = read(tmp_path / "a")
    assert saved.size == size
    assert saved.notes == NOTES | {"rank": 0}
    for rank in range(size):
        assert_same(saved.part(rank), collection(rank))
    assert sorted(os.listdir(tmp_path)) == ["a", *(f"a.0.{rank}of{size}.part" for rank in range(size))]


def test_tensors_larger_than_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_files, "_BLOCK", 64)
    tensors = collection() | {"wide": bits(torch.float64, 40, 9).T, "long": bits(torch.int16, 1001)}
    assert Checkpoint(tmp_path / "a", ALONE).save(tensors, {})
    assert_same(read(tmp_path / "a").part(0), tensors)


def test_only_a_block_is_ever_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def noted(tensor: Tensor) -> memoryview:
        sizes.append(tensor.untyped_storage().nbytes())
        return memory(tensor)

    memory = checkpoint_files._memory
    monkeypatch.setattr(checkpoint_files, "_BLOCK", 1 << 12)
    monkeypatch.setattr(checkpoint_files, "_memory", noted)
    assert Checkpoint(tmp_path / "a", ALONE).save({"x": torch.rand(64, 1 << 10).T}, {})
    assert max(sizes) <= 1 << 12


def test_no_pickle() -> None:
    for module in (container, checkpoint_files):
        assert module.__file__ is not None
        tree = ast.parse(Path(module.__file__).read_text())
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        plain = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
        imports = {alias.name for node in plain for alias in node.names}
        assert not names & {"load", "dump", "save_file"}  # torch.load, pickle.dump, numpy.load
        assert imports <= {"errno", "hashlib", "json", "logging", "math", "os", "re", "sys", "torch"}


def test_what_has_no_form_is_not_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = saved_file(tmp_path)
    assert not Checkpoint(path, ALONE).save({"z": torch.zeros(2, dtype=torch.complex64)}, {})
    assert not Checkpoint(path, ALONE).save({"s": torch.eye(2).to_sparse()}, {})
    assert not Checkpoint(path, ALONE).save({}, {"notes": object()})
    assert ["complex64" in caplog.messages[0], "sparse" in caplog.messages[1]] == [True, True]
    assert value(path) == 1.0
    assert len(os.listdir(tmp_path)) == 2


def test_a_later_save_replaces_an_earlier_one(tmp_path: Path) -> None:
    again = Checkpoint(tmp_path / "a", ALONE)
    for number in (1.0, 2.0, 3.0):
        assert again.save(state(number), {"value": number})
        assert value(tmp_path / "a") == number
    assert sorted(os.listdir(tmp_path)) == ["a", "a.2.0of1.part"]


def test_keys_of_notes_become_text(tmp_path: Path) -> None:
    assert Checkpoint(tmp_path / "a", ALONE).save({}, {"by number": {3: 1, "3": 2}})
    assert read(tmp_path / "a").notes == {"by number": {"3": 2}}


def test_a_link_keeps_pointing_to_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "a")
    assert save(tmp_path / "link", 1.0) and save(tmp_path / "link", 2.0)
    assert value(tmp_path / "link") == value(tmp_path / "there" / "a") == 2.0
    assert (tmp_path / "link").is_symlink()


# Whatever fails, a whole checkpoint stands.


class Died(BaseException):
    """The process ended: nothing of it reaches the disk any more."""


class Steps:
    """Notes what is done to the file system, and stops it: one step alone, or that and all that follow."""

    def __init__(self, fails: int, error: BaseException, dead: bool) -> None:
        self.fails, self.error, self.dead = fails, error, dead
        self.taken: list[str] = []

    def take(self, *what: object) -> None:
        self.taken.append(" ".join(str(word) for word in what))
        if len(self.taken) == self.fails or (self.dead and len(self.taken) > self.fails):
            raise self.error

    def before(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def stepping(*arguments: Any) -> Any:
            named = [Path(os.readlink(f"/proc/self/fd/{a}") if type(a) is int else a) for a in arguments]
            self.take(name, *(path.name for path in named))
            return function(*arguments)

        return stepping

    def open(self, path: Path, mode: str = "r") -> Any:
        if mode == "rb":
            return builtins.open(path, mode)
        self.take("open", path.name)
        return Stream(builtins.open(path, mode, buffering=0), self)


class Stream:
    """A file that is open for writing. Half of what fails to be written is on the disk."""

    def __init__(self, raw: IO[Any], steps: Steps) -> None:
        self.raw, self.steps = raw, steps
        self.fileno, self.flush = raw.fileno, raw.flush

    def write(self, data: bytes) -> None:
        try:
            self.steps.take("write", Path(self.raw.name).name)
        except BaseException:
            self.raw.write(memoryview(data)[: len(data) // 2])
            raise
        self.raw.write(data)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.raw.close()


@contextmanager
def failing(steps: Steps) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_files, "open", steps.open, raising=False)
        for name in ("replace", "fsync", "unlink"):
            patch.setattr(os, name, steps.before(name, getattr(os, name)))
        yield


def steps_of_a_save(folder: Path) -> list[str]:
    """Of one that replaces another, in a new folder."""
    folder.mkdir()
    path = saved_file(folder)
    steps = Steps(0, OSError(), dead=False)
    with failing(steps):
        assert save(path, 2.0)
    return steps.taken


def test_what_counts_is_on_the_disk_before_something_relies_on_it(tmp_path: Path) -> None:
    steps = steps_of_a_save(tmp_path / "folder")
    part, manifest = "a.1.0of1.part", "a.1.manifest.tmp"
    assert list(dict.fromkeys(steps[:-2])) == [
        *(f"open {part}.tmp", f"write {part}.tmp", f"fsync {part}.tmp", f"replace {part}.tmp {part}"),
        "fsync folder",
        *(f"open {manifest}", f"write {manifest}", f"fsync {manifest}", f"replace {manifest} a"),
    ]
    assert steps[-2:] == ["fsync folder", "unlink a.0.0of1.part"]


def test_every_step_may_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    total, answers = len(steps_of_a_save(tmp_path / "counted")), []
    for step in range(1, total + 1):
        folder = tmp_path / str(step)
        folder.mkdir()
        path = saved_file(folder)
        caplog.clear()
        with failing(Steps(step, OSError(28, "No space left on device"), dead=False)):
            worked = save(path, 2.0)
        answers.append(worked)
        assert value(path) == (2.0 if worked else 1.0)
        assert len(caplog.messages) == (not worked)
        if not worked:
            assert "rank 0: " in caplog.text or "No space left" in caplog.text
            assert "the previous one stands" in caplog.text
            assert len(os.listdir(folder)) == 2
        assert save(path, 3.0)
        assert value(path) == 3.0
        assert len(os.listdir(folder)) == 2
    assert {True, False} == set(answers)


@pytest.mark.parametrize("start", ["beside an old one", "from nothing"])
def test_the_process_may_die_before_every_step(tmp_path: Path, start: str) -> None:
    total, found = len(steps_of_a_save(tmp_path / "counted")), []
    for step in range(1, total + 1):
        folder = tmp_path / str(step)
        folder.mkdir()
        path = folder / "a"
        if start == "beside an old one":
            saved_file(folder)
        with failing(Steps(step, Died(), dead=True)), suppress(Died):  # no old part, one step less
            save(path, 2.0)
        if path.exists():
            found.append(value(path))
        else:
            assert start == "from nothing"
        before = set(os.listdir(folder)) - {"a"}
        assert save(path, 3.0)
        assert value(path) == 3.0
        left = set(os.listdir(folder)) - {"a"}
        assert len(left) == 1 and not left & before  # no generation is used twice
    assert set(found) == ({1.0, 2.0} if start == "beside an old one" else {2.0})


def test_a_step_that_is_reported_as_failed_but_was_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved_file(tmp_path)
    replace = os.replace

    def unsure(source: Path, target: Path) -> None:
        replace(source, target)
        if target == path:
            raise OSError("lost the server's answer")

    monkeypatch.setattr(os, "replace", unsure)
    assert save(path, 2.0)
    assert value(path) == 2.0


def save_with_little_room(group: Group, path: str, short: list[int], room: int) -> tuple[bool, list[str]]:
    """Save, on some ranks with a limit to the size of files; the warnings, too."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(container.__name__).addHandler(handler)
    try:
        if group.rank in short:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        worked = Checkpoint(Path(path), group).save({"x": torch.full((1000,), 2.0)}, {"value": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        logging.getLogger(container.__name__).removeHandler(handler)
    return worked, warnings


@pytest.mark.parametrize(("short", "room"), [([1], 2000), ([0], 2000), ([0, 1], 0)])
def test_a_rank_whose_disk_is_full(pools: Pools, tmp_path: Path, short: list[int], room: int) -> None:
    path = tmp_path / "a"
    assert pools(2).run(save_collection, str(path)) == [True, True]
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    (first, warnings), (second, silent) = pools(2).run(save_with_little_room, str(path), short, room)
    assert (first, second, silent) == (False, False, [])
    (warning,) = warnings
    assert f"(rank {short[0]}: File too large); the previous one stands" in warning
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before


def save_in_own_folder(group: Group, folder: str) -> bool:
    own = Path(folder) / str(group.rank)
    own.mkdir()
    return Checkpoint(own / "a", group).save(collection(group.rank), {})


def test_ranks_that_share_no_folder_make_no_checkpoint(pools: Pools, tmp_path: Path) -> None:
    assert pools(2).run(save_in_own_folder, str(tmp_path)) == [False, False]
    assert os.listdir(tmp_path / "0") == os.listdir(tmp_path / "1") == []


def test_no_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not save(tmp_path / "missing" / "a", 1.0)
    (message,) = caplog.messages
    assert message.endswith("(rank 0: No such file or directory); there is none yet")


# Nothing else in the folder is touched.

NEIGHBOURS = (
    *("a.b", "a.b.0.0of1.part", "a.0", "a.0.0.0of1.part", "a.0.0of1.part.bak", "a.0.0of1", "a.part"),
    *("xa.0.0of1.part", "b.0.0of1.part", "a.00.0of1.part", "a.0.manifest", "a.tmp", "a.x.0of1.part"),
    *("A.0.0of1.part", "a-0.0of1.part", "a.١.0of1.part", "a.0.0of1.part\n"),
)  # fmt: skip


def test_neighbours_are_left_alone(tmp_path: Path) -> None:
    for name in NEIGHBOURS:
        (tmp_path / name).write_text("mine")
    for name in ("a.7.0of1.part", "a.7.0of1.part.tmp", "a.6.3of4.part", "a.5.manifest.tmp"):
        (tmp_path / name).write_text("left by a crash")
    checkpoint = Checkpoint(tmp_path / "a", ALONE)
    assert checkpoint.save(state(1.0), {"value": 1.0})
    assert set(os.listdir(tmp_path)) == {*NEIGHBOURS, "a", "a.8.0of1.part"}
    checkpoint.remove()
    checkpoint.remove()
    assert set(os.listdir(tmp_path)) == set(NEIGHBOURS)
    assert {(tmp_path / name).read_text() for name in NEIGHBOURS} == {"mine"}


@pytest.mark.parametrize("other", ["a.b", "a.1", "a.1.0of1", "ab", "a.part", "*", "a?"])
def test_two_checkpoints_in_a_folder(tmp_path: Path, other: str) -> None:
    both = [Checkpoint(tmp_path / name, ALONE) for name in ("a", other)]
    for number in (1.0, 2.0, 3.0):
        for sign, checkpoint in zip((1, -1), both, strict=True):
            assert checkpoint.save(state(sign * number), {"value": sign * number})
    assert (value(tmp_path / "a"), value(tmp_path / other)) == (3.0, -3.0)
    both[1].remove()
    assert value(tmp_path / "a") == 3.0
    both[0].remove()
    assert os.listdir(tmp_path) == []


def test_remove_leaves_a_whole_checkpoint_if_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved_file(tmp_path)
    with failing(Steps(1, PermissionError(13, "no"), dead=False)):
        Checkpoint(path, ALONE).remove()
    assert value(path) == 1.0
    assert "cannot be removed" in caplog.text


@pytest.mark.parametrize("name", ["a.0.0of1.part", "a.12.3of4.part.tmp", "a.3.manifest.tmp"])
def test_a_name_that_parts_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="choose another name"):
        Checkpoint(tmp_path / name, ALONE)


def test_other_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(b"weights")
    for path in (tmp_path / "net.onnx", tmp_path):
        with pytest.raises(ConfigError, match=r"is no checkpoint|not a regular file"):
            Checkpoint(path, ALONE)
    with pytest.raises(ConfigError, match="Not a directory"):
        Checkpoint(tmp_path / "net.onnx" / "a", ALONE)
    with pytest.raises(ConfigError, match="null"):
        Checkpoint(tmp_path / "nul\0", ALONE)
    (tmp_path / "empty").touch()
    assert save(tmp_path / "empty", 1.0)
