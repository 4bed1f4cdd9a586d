"""A request as the engine gets it, and an answer as the client gets it: other names, nothing else. Pure.

The values of a request are never decoded but for the few that are looked at, so numbers and texts reach the engine as
the client wrote them. An answer is renamed as it streams by; at most the beginning of a name is held back.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from modelswap_engine.http.openai.errors import InvalidValue, UnsupportedParameter
from modelswap_engine.http.proxy.dialects import Dialect, Naming, Route
from modelswap_engine.protocol.codec import decode, encode

MODEL: Final = "model"
ADAPTER: Final = "lora_path"
_LONGEST_NAME: Final = 512
_LONGEST_SALT: Final = 1024

Fields = Mapping[str, msgspec.Raw]
"""A JSON object whose values are as they came."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a request says of itself.

    Attributes:
        fields: all of it.
        model: the name it uses, "" for the base without a name.
        stream: it wants a stream of events.
    """

    fields: Fields
    model: str
    stream: bool


def read(body: bytes, route: Route, dialect: Dialect) -> Asked:
    """Read a request as far as it concerns us.

    Raises:
        BadRequest: not a JSON object.
        InvalidValue, UnsupportedParameter: a field cannot be let through.
    """
    fields = decode(body, dict[str, msgspec.Raw])
    for refused in sorted(dialect.refused.keys() & fields.keys()):
        if _value(fields, refused) not in (None, False):
            raise UnsupportedParameter.of(refused, f"is not let through: {dialect.refused[refused]}")
    if route.naming is Naming.MODEL and dialect.prefixed and _value(fields, ADAPTER) is not None:
        raise UnsupportedParameter.of(ADAPTER, "is not let through: name the adapter as the model")
    field = MODEL if route.naming is Naming.MODEL else ADAPTER
    name = _value(fields, field)
    if name is None and route.optional:
        name = ""
    if not isinstance(name, str) or len(name) > _LONGEST_NAME:
        raise InvalidValue.of(field, f"must be one name of at most {_LONGEST_NAME} characters")
    stream = _value(fields, "stream")
    if stream not in (None, True, False):
        raise InvalidValue.of("stream", "must be true or false")
    return Asked(fields=fields, model=name, stream=bool(stream))


def our_name(model: str, *, served: str, dialect: Dialect) -> str:
    """Return the name of ours that a request's model name stands for; whether it leads anywhere is another question."""
    if not model:
        return served
    return model.removeprefix(f"{served}:") if dialect.prefixed else model


def write(asked: Asked, route: Route, dialect: Dialect, *, base: str, adapter: str, salt: str) -> bytes:
    """Return the request as the engine gets it.

    Args:
        asked: as the client sent it.
        route: where it goes.
        dialect: of the engine.
        base: the engine's own name of the base.
        adapter: the engine's own name of the adapter, "" for none.
        salt: what keeps cached prefixes of other versions apart.

    Raises:
        InvalidValue: the client's own salt is none.
    """
    fields = dict(asked.fields)
    if route.naming is Naming.MODEL:
        fields[MODEL] = _raw(engine_name(base, adapter, dialect))
    else:
        fields.pop(ADAPTER, None)
        if adapter:
            fields[ADAPTER] = _raw(adapter)
    if route.salted:
        fields[dialect.salt] = _raw(_salted(_value(fields, dialect.salt), salt, field=dialect.salt))
    return encode(fields)


def engine_name(base: str, adapter: str, dialect: Dialect) -> str:
    """Return how the engine calls the base or an adapter on it, in the field ``model``."""
    if not adapter:
        return base
    return f"{base}:{adapter}" if dialect.prefixed else adapter


def _salted(own: Any, salt: str, *, field: str) -> str | list[str]:
    """Join a client's own salt to ours; a batch may bring one for each prompt."""
    if own is None or own == "":
        return salt
    if isinstance(own, list) and all(item is None or isinstance(item, str) for item in own):
        return [str(_salted(item, salt, field=field)) for item in own]
    if not isinstance(own, str) or len(own) > _LONGEST_SALT:
        raise InvalidValue.of(field, f"must be text of at most {_LONGEST_SALT} characters")
    return f"{salt}.{own}"


def _value(fields: Fields, name: str) -> Any:
    raw = fields.get(name)
    return None if raw is None else decode(raw, object)


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(encode(value))


class Renamer:
    """Gives an answer's ``model`` the name that the client used, whatever pieces it comes in.

    A quote within a JSON string is escaped, so the key with its value cannot be part of a generated text.

    Args:
        engine: the engine's own name; without any, nothing is renamed.
        client: the name in its place.
    """

    def __init__(self, *, engine: str, client: str) -> None:
        name = encode(engine)
        self._needles = (b'"model":' + name, b'"model": ' + name) if engine and engine != client else ()
        self._pattern = re.compile(b"|".join(map(re.escape, self._needles)))
        self._wanted = b'"model":' + encode(client)
        self._held = b""

    def feed(self, piece: bytes) -> bytes:
        """Take the next piece and return what can be passed on."""
        if not self._needles:
            return piece
        data = self._held + piece
        if data.endswith(b"\n"):  # as whole events do; no name has one, so none has begun
            self._held = b""
            return self._pattern.sub(self._replaced, data)
        out, end = [], 0
        for found in self._pattern.finditer(data):
            out += [data[end : found.start()], self._wanted]
            end = found.end()
        keep = self._begun(data, since=end)
        self._held = data[len(data) - keep :]
        out.append(data[end : len(data) - keep])
        return b"".join(out)

    def finish(self) -> bytes:
        """Return what was held back: it was not a name after all."""
        held, self._held = self._held, b""
        return held

    def _replaced(self, _: "re.Match[bytes]") -> bytes:
        return self._wanted

    def _begun(self, data: bytes, *, since: int) -> int:
        """Return how many bytes at the end may be the beginning of a name."""
        place = max(since, len(data) - max(map(len, self._needles)) + 1)
        while (place := data.find(b'"', place)) >= 0:  # with which a name begins
            if any(needle.startswith(data[place:]) for needle in self._needles):
                return len(data) - place
            place += 1
        return 0
