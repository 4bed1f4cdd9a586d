"""JSON encoding of the messages, and turning what a peer sent wrongly into a typed error."""

from typing import TypeVar

import msgspec

from modelswap_engine.protocol.errors import BadRequest, ErrorEnvelope, ModelswapError, from_body

T = TypeVar("T")
_encoder = msgspec.json.Encoder()


def encode(message: object) -> bytes:
    """Return the JSON of a message."""
    return _encoder.encode(message)


def decode(data: bytes | str, kind: type[T]) -> T:
    """Read a message.

    Raises:
        BadRequest: not JSON, or not of the required form; the message names the field.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"not a valid {kind.__name__}: {error}") from None


def decode_error(data: bytes) -> ModelswapError:
    """Read the error that a peer answered.

    Raises:
        BadRequest: the answer is not one of this protocol's errors.
    """
    return from_body(decode(data, ErrorEnvelope).error)
