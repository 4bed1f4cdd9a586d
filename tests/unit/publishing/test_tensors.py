"""Publishing tensors from memory: they become the files that safetensors would have written, without a second copy."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save_file

from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.protocol.errors import BadRequest, InvalidCheckpoint, SourceChanged
from modelswap_engine.publishing.tensors import PIECE_BYTES, TensorsVersion
from tests.support.checkpoints import CONFIG, INDEX
from tests.support.published import Stores

URI = "s3://bucket/chat/1"
SIDES = {"config.json": json.dumps(CONFIG).encode()}
BF16 = torch.arange(24, dtype=torch.float32).to(torch.bfloat16)


def tensors() -> dict[str, torch.Tensor]:
    return {
        "wide.weight": BF16.reshape(4, 6).clone(),
        "turned.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4).t(),
        "part.weight": torch.arange(20, dtype=torch.int64)[::3],
        "scalar": torch.tensor(7, dtype=torch.int32),
        "empty": torch.zeros(0, 4),
        "flags": torch.tensor([True, False]),
        "small.weight": torch.randn(5).to(torch.float8_e4m3fn),
        "grown": torch.nn.Parameter(torch.ones(3)),
    }


def saved(folder: Path, given: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_file(
        {name: tensor.detach().clone().contiguous() for name, tensor in given.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_bytes(SIDES["config.json"])
    return folder


@pytest.mark.parametrize("shard_bytes", [1 << 20, 50])
async def test_what_is_published_is_what_would_have_been_saved(tmp_path: Path, shard_bytes: int) -> None:
    stores, given = Stores(tmp_path / "pods"), tensors()
    done = await stores.publish(TensorsVersion(given, side_files=SIDES, shard_bytes=shard_bytes), URI)
    assert done.digest == build_manifest(saved(tmp_path / "saved", given)).digest
    assert (INDEX in stores.names(URI)) == (shard_bytes == 50)
    assert (await stores.fetched(URI))[0] == done.digest
    for name in stores.names(URI):
        if name.endswith(".safetensors"):
            for key, tensor in load(bytes(stores.store(URI).get(name).bytes())).items():
                assert tensor.dtype == given[key].dtype
                assert torch.equal(tensor.float(), given[key].detach().float())


async def test_numpy_is_the_same(tmp_path: Path) -> None:
    given: dict[str, Any] = {"a": np.arange(6, dtype=">f4").reshape(2, 3).T, "b": np.array(3, dtype=np.int64)}
    version = TensorsVersion(given, side_files=SIDES)
    same = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3).t(), "b": torch.tensor(3)}
    assert version.manifest.digest == build_manifest(saved(tmp_path / "saved", same)).digest


async def test_tied_weights_are_published_once_under_the_base_s_name() -> None:
    shared = torch.nn.Parameter(torch.ones(2, 3))
    tied = {"embed.weight": shared, "lm_head.weight": shared.data, "other": torch.ones(2, 3), "row": shared.data[:1]}
    assert TensorsVersion(tied, side_files=SIDES).manifest.by_name.keys() == {"embed.weight", "other", "row"}
    preferred = TensorsVersion(tied, side_files=SIDES, prefer=frozenset({"lm_head.weight"}))
    assert preferred.manifest.by_name.keys() == {"lm_head.weight", "other", "row"}
    untied = {"embed.weight": shared, "lm_head.weight": shared.data.clone()}
    assert TensorsVersion(untied, side_files=SIDES).manifest.by_name.keys() == untied.keys()


async def test_training_on_meanwhile_is_seen(tmp_path: Path) -> None:
    stores, given = Stores(tmp_path / "pods"), tensors()
    version = TensorsVersion(given, side_files=SIDES)
    given["wide.weight"] += 1
    with pytest.raises(SourceChanged, match=r"wide\.weight"):
        await stores.publish(version, URI)
    assert stores.names(URI) == {"config.json"}


def test_large_tensors_come_in_pieces() -> None:
    given = {"large": torch.zeros(3 * PIECE_BYTES // 4 + 1, dtype=torch.int32)}
    sizes = [len(piece) for piece in TensorsVersion(given, side_files=SIDES).pieces("large")]
    assert sizes == [PIECE_BYTES, PIECE_BYTES, PIECE_BYTES, 4]


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({}, BadRequest, "no tensors"),
        ({"a": [1.0]}, BadRequest, "'a' is list"),
        ({"a": torch.zeros(2, dtype=torch.complex64)}, BadRequest, "complex64"),
        ({"a": torch.zeros(2, device="meta")}, BadRequest, "no bytes"),
        ({"a": torch.zeros(2, 2).to_sparse()}, BadRequest, "no bytes"),
        ({"": torch.zeros(2)}, InvalidCheckpoint, "empty name"),
    ],
)
def test_what_is_no_tensor_of_a_checkpoint(given: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        TensorsVersion(given, side_files=SIDES)


def test_side_files_are_those_of_a_version() -> None:
    with pytest.raises(BadRequest, match=r"optimizer\.pt"):
        TensorsVersion({"a": torch.zeros(1)}, side_files={"optimizer.pt": b""})
