"""Tensors as other engines' calls describe and carry them: names of dtypes, base64, and what is never read."""

import base64
import binascii
from collections.abc import Sequence
from typing import Final

from modelswap_engine.checkpoint.dtypes import safetensors_dtype
from modelswap_engine.protocol.errors import BadRequest, UnsupportedFormat
from modelswap_engine.protocol.updates import Announced

_PICKLE: Final = b"\x80"
SEND_SAFETENSORS: Final = (
    "send safetensors: the bytes of safetensors.torch.save(tensors) in base64 as the one entry of "
    "serialized_named_tensors, or as the body itself with Content-Type: application/octet-stream"
)


def announced(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[Announced]:
    """Return the tensors that three lists of one length describe.

    Raises:
        BadRequest: the lists differ in length, or a dtype is unknown.
    """
    if not len(names) == len(dtypes) == len(shapes):
        raise BadRequest(
            f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes", advice="send one of each per tensor"
        )
    return [
        Announced(name=name, dtype=safetensors_dtype(dtype), shape=list(shape))
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    ]


def unpacked(entries: Sequence[str]) -> bytes:
    """Return the safetensors file that entries of ``serialized_named_tensors`` carry in base64.

    Other engines expect one pickle per rank there. A pickle is code of whoever sends it, so none is ever opened. One
    entry is enough: every rank gets the whole.

    Raises:
        UnsupportedFormat: pickled tensors.
        BadRequest: no entry, different ones, or not base64.
    """
    if not entries or any(entry != entries[0] for entry in entries):
        raise BadRequest("serialized_named_tensors must hold one entry, or several equal ones", advice=SEND_SAFETENSORS)
    try:
        data = base64.b64decode(entries[0], validate=True)
    except (binascii.Error, ValueError):
        raise BadRequest("serialized_named_tensors is not base64", advice=SEND_SAFETENSORS) from None
    if data.startswith(_PICKLE):
        raise UnsupportedFormat("serialized_named_tensors holds pickles, which can run code", advice=SEND_SAFETENSORS)
    return data
