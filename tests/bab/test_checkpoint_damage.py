"""A checkpoint that is not whole, or is none at all, is an error on one line, whatever is wrong with it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from abcrown_dist.bab import checkpoint as container
from abcrown_dist.bab import checkpoint_files
from abcrown_dist.bab.checkpoint import Saved, hash_file, read
from abcrown_dist.util.errors import LoadError
from tests.bab.checkpoints import (
    part_of,
    save,
    save_collection,
    saved_file,
    value,
)
from tests.parallel.pool import Pool

Pools = Callable[[int], Pool]


def refusal(path: Path) -> str:
    with pytest.raises(LoadError) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_part(pools: Pools, tmp_path: Path) -> None:
    path = tmp_path / "a"
    pools(2).run(save_collection, str(path))
    (tmp_path / "a.0.1of2.part").unlink()
    assert refusal(path).endswith("lacks the part of rank 1 (a.0.1of2.part): it is not resumed from")


def test_a_part_that_is_cut_off_or_goes_on(tmp_path: Path) -> None:
    path = saved_file(tmp_path)
    part = part_of(path)
    whole = part.read_bytes()
    for length in (0, 5, 20, len(whole) - 1):
        part.write_bytes(whole[:length])
        assert f"is cut off ({length} of {len(whole)} bytes)" in refusal(path)
    part.write_bytes(whole + b"x")
    assert "is damaged" in refusal(path)
    part.unlink()
    part.mkdir()
    assert "not a regular file" in refusal(path)


def test_a_flipped_bit_anywhere(tmp_path: Path) -> None:
    path = saved_file(tmp_path)
    saved, part = read(path), part_of(path)
    for file in (path, part):
        whole = file.read_bytes()
        for place in range(0, len(whole)):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            refusal(path)
            if file == part:
                with pytest.raises(LoadError, match="part of rank 0"):
                    saved.part(0)
        file.write_bytes(whole)
    assert value(path) == 1.0


def test_a_part_that_changed_after_it_was_read(tmp_path: Path) -> None:
    path = saved_file(tmp_path)
    saved, part = read(path), part_of(path)
    whole = part.read_bytes()
    for content in (whole[:-1], whole + b"x", b"", whole[:-1] + bytes([whole[-1] ^ 128])):
        part.write_bytes(content)
        with pytest.raises(LoadError, match="part of rank 0"):
            saved.part(0)
    part.unlink()
    with pytest.raises(LoadError, match="cannot be read: No such file"):
        saved.part(0)


def test_no_such_checkpoint(tmp_path: Path) -> None:
    assert refusal(tmp_path / "a").endswith("a': No such file or directory")
    assert "not a regular file" in refusal(tmp_path)
    assert "cannot read" in refusal(tmp_path / "nul\0")


@pytest.mark.parametrize(
    "text", [b"", b"\x80\x02}q", b"[1]", b"null", b"{}", b'{"sha256": ""}', bytes(range(256))]
)
def test_another_file(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "a").write_bytes(text)
    assert refusal(tmp_path / "a").endswith("is no checkpoint")


def forge(path: Path, version: Any = 1, **changes: Any) -> None:
    """Write a manifest as one with the format's knowledge could: its digest is right."""
    body = {key: entry for key, entry in json.loads(path.read_bytes()).items() if key in BODY} | changes
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    path.write_text(json.dumps({"abcrown_dist checkpoint": version, "sha256": digest, **body}))


BODY = ("program", "generation", "parts", "notes")
DIGEST = hashlib.sha256(b"secret").hexdigest()


def entry(**changes: Any) -> dict[str, Any]:
    return {"name": "a.0.0of1.part", "bytes": 6, "sha256": DIGEST} | changes


@pytest.mark.parametrize(
    "changes",
    [
        {"parts": [entry(name="../secret.0.0of1.part")]},
        {"parts": [entry(name="/etc/secret.0.0of1.part")]},
        {"parts": [entry(name="sub/secret.0.0of1.part")]},
        {"parts": [entry(name="a\0.0.0of1.part")]},
        {"parts": [entry(name="..")]},
        {"parts": [entry(name="")]},
        {"parts": [entry(name=7)]},
        {"parts": [entry(name=["a.0.0of1.part"])]},
        {"parts": [entry(name="a.0.1of1.part")]},
        {"parts": [entry(name="a.1.0of1.part")]},
        {"parts": [entry(name="a.0.0of1.part\n")]},
        {"parts": [entry(name="a.0.0of2.part")]},  # the other rank's is not listed
        {"parts": [entry(), entry()]},
        {"parts": [entry(bytes="6")]},
        {"parts": [entry(bytes=6.0)]},
        {"parts": [entry(sha256=None)]},
        {"parts": [entry(more=1)]},
        {"parts": [{}]},
        {"parts": [None]},
        {"parts": []},
        {"parts": None},
        {"parts": "a.0.0of1.part"},
        {"parts": {"a.0.0of1.part": 1}},
        {"generation": "0"},
        {"generation": True},
        {"generation": None},
        {"program": 1},
        {"notes": [1]},
        {"notes": None},
    ],
)
def test_a_forged_manifest(tmp_path: Path, changes: dict[str, Any]) -> None:
    (tmp_path / "secret.0.0of1.part").write_bytes(b"secret")
    (tmp_path / "folder" / "sub").mkdir(parents=True)
    (tmp_path / "folder" / "sub" / "secret.0.0of1.part").write_bytes(b"secret")
    path = saved_file(tmp_path / "folder")
    forge(path)
    assert value(path) == 1.0
    forge(path, **changes)
    assert refusal(path).endswith("is damaged")


def test_names_and_sizes_that_no_file_has(tmp_path: Path) -> None:
    path = saved_file(tmp_path)
    forge(path, parts=[entry(name="\ud800.0.0of1.part")])
    assert "cannot be read" in refusal(path)
    forge(path, parts=[entry(name="a" * 5000 + ".0.0of1.part")])
    assert "cannot be read" in refusal(path)
    forge(path, parts=[entry(bytes=10**30)])
    assert "is cut off" in refusal(path)


@pytest.mark.parametrize("text", ["1" * 10_000, "[" * 200_000, "1}x", "1}", '1, "sha256": 1}', "1e999"])
def test_a_manifest_that_is_no_json_or_lacks_all(tmp_path: Path, text: str) -> None:
    (tmp_path / "a").write_text('{"abcrown_dist checkpoint": ' + text)
    assert refusal(tmp_path / "a").endswith("is damaged")


def test_another_version_of_the_format(tmp_path: Path) -> None:
    path = saved_file(tmp_path)
    forge(path, version=container.FORMAT + 1)
    assert refusal(path).endswith("has format 2, and this program reads format 1")
    assert save(path, 2.0)
    assert value(path) == 2.0


@pytest.mark.parametrize(
    "header",
    [
        {"tensors": [["x", "float32", [1 << 40]]]},
        {"tensors": [["x", "float32", [1 << 70, 0]]]},
        {"tensors": [["x", "float32", [-1, -1]]]},
        {"tensors": [["x", "float32", [1.0]]]},
        {"tensors": [["x", "float32", ["1"]]]},
        {"tensors": [["x", "float32", 1]]},
        {"tensors": [["x", "Tensor", [1]]]},
        {"tensors": [["x", ["float32"], [1]]]},
        {"tensors": [[None, "float32", [1]]]},
        {"tensors": [["x", "int8", [2]], ["x", "int8", [2]]]},
        {"tensors": [["x", "float32"]]},
        {"tensors": 3},
        {"byteorder": "middle"},
        {"tensors": [["x", "float32", [1]]] * 2},
    ],
)
def test_a_forged_part(tmp_path: Path, header: dict[str, Any]) -> None:
    path = saved_file(tmp_path)

    def write(header: dict[str, Any], magic: bytes = checkpoint_files.MAGIC) -> Saved:
        text = json.dumps({"byteorder": "little", "tensors": [["x", "float32", [1]]]} | header).encode()
        data = magic + len(text).to_bytes(8, "little") + text + bytes(4)
        (tmp_path / "a.0.0of1.part").write_bytes(data)
        forge(path, parts=[entry(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())])
        return read(path)

    assert torch.equal(write({}).part(0)["x"], torch.zeros(1))
    with pytest.raises(LoadError, match="part of rank 0"):
        write(header).part(0)
    with pytest.raises(LoadError, match="is no part of a checkpoint"):
        write({}, b"x" * len(checkpoint_files.MAGIC)).part(0)


def test_hash_file(tmp_path: Path) -> None:
    content = os.urandom(3_000_000)
    (tmp_path / "x").write_bytes(content)
    assert hash_file(tmp_path / "x") == hashlib.sha256(content).hexdigest()
    for path in (tmp_path, tmp_path / "y", "nul\0"):
        with pytest.raises(LoadError, match="cannot read"):
            hash_file(path)
