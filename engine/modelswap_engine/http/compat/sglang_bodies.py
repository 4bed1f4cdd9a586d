"""The bodies of SGLang's weight routes, as far as they mean something here; other fields are ignored.

What SGLang can be told and this engine does in any case (flush the cache, keep graphs) is not read at all.
"""

from typing import Annotated, Any

import msgspec

MOST_TENSORS = 500_000
Shape = Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]], msgspec.Meta(max_length=32)]


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """Base: snake_case, defaults as SGLang's."""


class Selected(Body, frozen=True, kw_only=True):
    """A call that may name the draft model, which this engine does not have."""

    selector: str = "all"


class Versioned(Selected, frozen=True, kw_only=True):
    """A call that brings weights."""

    weight_version: str | None = None
    abort_all_requests: bool = False
    load_format: str | None = None


class Pause(Body, frozen=True, kw_only=True):
    """``pause_generation``."""

    mode: str = "abort"


class FromDisk(Versioned, frozen=True, kw_only=True):
    """``update_weights_from_disk``; ``weight_name_filter`` (globs) is this engine's own."""

    model_path: str
    weight_name_filter: list[str] = []


class FromTensor(Versioned, frozen=True, kw_only=True):
    """``update_weights_from_tensor``."""

    serialized_named_tensors: list[str] = []


class FromDistributed(Versioned, frozen=True, kw_only=True):
    """``update_weights_from_distributed``."""

    names: Annotated[list[str], msgspec.Meta(max_length=MOST_TENSORS)]
    dtypes: list[str]
    shapes: list[Shape]
    group_name: str = "weight_update_group"


class FromIpc(Versioned, frozen=True, kw_only=True):
    """``update_weights_from_ipc``; ``segment`` and ``tensors`` are this engine's own, instead of handles."""

    zmq_handles: dict[str, str] | None = None
    segment: str = ""
    tensors: list[Any] = []


class InitGroup(Body, frozen=True, kw_only=True):
    """``init_weights_update_group``; trainers send the port as a number or as text."""

    master_address: str
    master_port: int | str
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class DestroyGroup(Body, frozen=True, kw_only=True):
    """``destroy_weights_update_group``."""

    group_name: str = "weight_update_group"


class InitSendGroup(Body, frozen=True, kw_only=True):
    """``init_weights_send_group_for_remote_instance``; ``ports`` has one port for each rank, with commas."""

    master_address: str
    ports: str
    group_rank: int
    world_size: int
    group_name: str = "weight_send_group"
    backend: str = "nccl"


class Send(Body, frozen=True, kw_only=True):
    """``send_weights_to_remote_instance``."""

    master_address: str
    ports: str
    group_name: str = "weight_send_group"


class Rename(Body, frozen=True, kw_only=True):
    """``update_weight_version``; requests are only aborted when the body says so, unlike there."""

    new_version: str
    abort_all_requests: bool = False


class Checker(Selected, frozen=True, kw_only=True):
    """``weights_checker``."""

    action: str = "checksum"


class ByName(Body, frozen=True, kw_only=True):
    """``get_weights_by_name``."""

    name: str
    truncate_size: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 100


class SaveSharded(Body, frozen=True, kw_only=True):
    """``save_sharded_model``; ``max_size`` bounds one file in bytes."""

    path: str
    max_size: Annotated[int, msgspec.Meta(ge=1)] | None = None


class SaveRemote(Body, frozen=True, kw_only=True):
    """``save_remote_model``."""

    url: str


class LoadAdapter(Body, frozen=True, kw_only=True):
    """``load_lora_adapter``."""

    lora_name: str
    lora_path: str
    pinned: bool = False


class UnloadAdapter(Body, frozen=True, kw_only=True):
    """``unload_lora_adapter``."""

    lora_name: str
