"""Folders that lie: indexes that point elsewhere, links that leave, formats that could run code."""

import json
import os
from pathlib import Path

import pytest

from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.protocol.errors import InvalidCheckpoint, SourceNotFound, UnsupportedFormat
from tests.support.checkpoints import INDEX, SINGLE, TENSORS, safetensors, write_checkpoint, write_index

SHARD = "model-00001-of-00002.safetensors"
OTHER = "model-00002-of-00002.safetensors"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "m", shards=2)


def weight_map(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return found


def refused(folder: Path, cause: str) -> InvalidCheckpoint:
    with pytest.raises(InvalidCheckpoint) as caught:
        build_manifest(folder)
    assert cause in caught.value.message
    assert caught.value.advice
    return caught.value


def test_index_naming_a_missing_shard(sharded: Path) -> None:
    (sharded / OTHER).unlink()
    assert OTHER in refused(sharded, "is not there").message


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "", "a\\b.safetensors"]
)
def test_index_naming_a_file_outside_the_folder(name: str, sharded: Path) -> None:
    (sharded.parent / "x.safetensors").write_bytes(safetensors(TENSORS))
    write_index(sharded, weight_map(sharded) | {"a.weight": name})
    refused(sharded, "not a plain file name")


@pytest.mark.parametrize("name", ["evil.bin", "config.json", "model.safetensors.index.json"])
def test_index_naming_another_kind_of_file(name: str, sharded: Path) -> None:
    write_index(sharded, weight_map(sharded) | {"a.weight": name})
    assert refused(sharded, "not a .safetensors file").details["tensor"] == "a.weight"


@pytest.mark.parametrize("listed", [{}, [], None, {"a.weight": 1}, {"a.weight": None}])
def test_malformed_index(listed: object, sharded: Path) -> None:
    write_index(sharded, listed)
    refused(sharded, INDEX)


def test_index_with_duplicate_keys(sharded: Path) -> None:
    (sharded / INDEX).write_text(f'{{"weight_map": {{"a.weight": "{SHARD}", "a.weight": "{OTHER}"}}}}')
    refused(sharded, "duplicate key 'a.weight'")


def test_tensor_listed_in_the_wrong_shard(sharded: Path) -> None:
    write_index(sharded, weight_map(sharded) | {"a.weight": OTHER})
    assert refused(sharded, f"the index says {OTHER}, but {SHARD} holds it").details["tensor"] == "a.weight"


def test_tensor_that_no_shard_holds(sharded: Path) -> None:
    write_index(sharded, weight_map(sharded) | {"ghost": SHARD})
    assert refused(sharded, "does not hold it").details["tensor"] == "ghost"


def test_tensor_that_the_index_does_not_list(sharded: Path) -> None:
    write_index(sharded, {name: file for name, file in weight_map(sharded).items() if name != "c.bias"})
    assert refused(sharded, "does not list it").details["tensor"] == "c.bias"


def test_tensor_in_two_shards(sharded: Path) -> None:
    (sharded / OTHER).write_bytes(safetensors({name: TENSORS[name] for name in ("a.weight", "b.weight")}))
    assert refused(sharded, f"in {SHARD} and in {OTHER}").details["tensor"] == "a.weight"


def test_single_file_beside_an_index_is_ambiguous(sharded: Path) -> None:
    (sharded / SINGLE).write_bytes(safetensors(TENSORS))
    refused(sharded, "could be the checkpoint")


@pytest.mark.parametrize("file", [SINGLE, "config.json"])
def test_link_that_leaves_the_folder(file: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    (folder / file).rename(tmp_path / file)
    (folder / file).symlink_to(tmp_path / file)
    refused(folder, "link that leaves")


def test_shard_link_that_leaves_the_folder(sharded: Path) -> None:
    (sharded / OTHER).rename(sharded.parent / "elsewhere")
    (sharded / OTHER).symlink_to("../elsewhere")
    refused(sharded, "link that leaves")


def test_link_to_itself(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    (folder / SINGLE).unlink()
    (folder / SINGLE).symlink_to(SINGLE)
    refused(folder, "leads to itself")


def test_links_inside_the_roots_are_followed(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "snapshots")
    digest = build_manifest(folder).digest
    (tmp_path / "blobs").mkdir()
    (folder / SINGLE).rename(tmp_path / "blobs" / "0123")
    (folder / SINGLE).symlink_to("../blobs/0123")
    assert build_manifest(folder, roots=[tmp_path]).digest == digest


def test_pipe_does_not_hang(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    (folder / SINGLE).unlink()
    os.mkfifo(folder / SINGLE)
    refused(folder, "not a regular file")


def test_folder_under_the_name_of_a_file(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    refused(folder, "not a regular file")


@pytest.mark.parametrize(
    ("file", "cause"),
    [
        ("pytorch_model.bin", "pickle"),
        ("consolidated.00.pth", "pickle"),
        ("model.pt", "pickle"),
        ("model-q4.gguf", "GGUF"),
        ("weights.safetensors", "neither model.safetensors"),
        ("README.md", "no safetensors"),
    ],
)
def test_other_formats_get_advice(file: str, cause: str, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(b"\x80\x04cos\nsystem\n(S'touch pwned'\ntR.")
    with pytest.raises(UnsupportedFormat, match=cause) as caught:
        build_manifest(tmp_path)
    assert caught.value.advice


def test_file_instead_of_a_folder(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    with pytest.raises(UnsupportedFormat, match="a file, not a checkpoint folder"):
        build_manifest(folder / SINGLE)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound):
        build_manifest(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b'{"a": 1, "a": 2}', "duplicate key 'a'"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_malformed_config(content: bytes, cause: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", side_files={"config.json": content})
    assert refused(folder, cause).message.startswith("config.json")


def test_code_beside_the_weights_is_neither_read_nor_counted(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    before = build_manifest(folder)
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    (folder / "optimizer.pt").write_bytes(b"\x80\x04.")
    (folder / "README.md").symlink_to("/etc/hostname")
    assert build_manifest(folder) == before
