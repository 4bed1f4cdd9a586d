"""JSON encoding of the messages, and turning what a peer sent wrongly into a typed error."""

from typing import Any, TypeVar

import msgspec

from modelswap_engine.protocol.errors import BadRequest, ErrorEnvelope, ModelswapError, from_body

T = TypeVar("T")
_encoder = msgspec.json.Encoder()
_decoders: dict[object, "msgspec.json.Decoder[Any]"] = {}  # making one takes longer than reading a short message


def encode(message: object) -> bytes:
    """Return the JSON of a message."""
    return _encoder.encode(message)


def decode(data: bytes | str | msgspec.Raw, kind: type[T]) -> T:
    """Read a message.

    Raises:
        BadRequest: not JSON, or not of the required form; the message names the field.
    """
    try:
        found: T = (_decoders.get(kind) or _decoder(kind)).decode(data)
        return found
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"not a valid {kind.__name__}: {error}") from None


def _decoder(kind: object) -> "msgspec.json.Decoder[Any]":
    return _decoders.setdefault(kind, msgspec.json.Decoder(kind))


def decode_error(data: bytes) -> ModelswapError:
    """Read the error that a peer answered.

    Raises:
        BadRequest: the answer is not one of this protocol's errors.
    """
    return from_body(decode(data, ErrorEnvelope).error)
