"""The index of a sharded checkpoint, ``model.safetensors.index.json``, as hostile input. Pure.

 I1 a JSON object with unique keys whose ``weight_map`` is a non-empty object of strings
 I2 every value is the plain name of a ``.safetensors`` file: no folder, no ``..``, no absolute path
 I3 it lists exactly the tensors of its shards, each in the shard that holds it
 I4 no tensor is in two shards

``metadata`` (``total_size``) is not used: writers disagree about tied tensors.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from modelswap_engine.checkpoint import strict_json
from modelswap_engine.checkpoint.manifest import TensorEntry
from modelswap_engine.checkpoint.rules import check_file_name, check_tensor_name, refuse, shown

INDEX_FILE: Final = "model.safetensors.index.json"
MAX_INDEX_BYTES: Final = 100_000_000


def parse_index(data: bytes, *, file: str = INDEX_FILE) -> dict[str, str]:
    """Return tensor name → shard file name (rules I1 and I2).

    Raises:
        InvalidCheckpoint: a rule is broken.
    """
    document = strict_json.loads(data, file=file)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        refuse("there is no weight_map with entries", file=file)
    for tensor, shard in weight_map.items():
        check_tensor_name(tensor, file=file)
        if not isinstance(shard, str):
            refuse("its shard is not a file name", file=file, tensor=tensor)
        check_file_name(shard, file=file)
        if not shard.endswith(".safetensors"):
            refuse(f"its shard {shown(shard)!r} is not a .safetensors file", file=file, tensor=tensor)
    return weight_map


def join_shards(
    shards: Iterable[tuple[str, Iterable[TensorEntry]]], weight_map: Mapping[str, str], *, file: str = INDEX_FILE
) -> dict[str, TensorEntry]:
    """Return all tensors of the shards by name, agreeing with the index (rules I3 and I4).

    Raises:
        InvalidCheckpoint: a rule is broken.
    """
    found: dict[str, TensorEntry] = {}
    for shard, entries in shards:
        for entry in entries:
            if entry.name in found:
                refuse(f"it is in {found[entry.name].file} and in {shard}", file=file, tensor=entry.name)
            if entry.name not in weight_map:
                refuse(f"{shard} holds it, but the index does not list it", file=file, tensor=entry.name)
            if weight_map[entry.name] != shard:
                refuse(f"the index says {weight_map[entry.name]}, but {shard} holds it", file=file, tensor=entry.name)
            found[entry.name] = entry
    for name, shard in weight_map.items():
        if name not in found:
            refuse(f"the index says {shard}, which does not hold it", file=file, tensor=name)
    return found
