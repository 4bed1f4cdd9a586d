"""Whom to believe: public keys and certificates of authorities, in PEM files that an operator of the engine mounts."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from modelswap_engine.checkpoint.rules import shown
from modelswap_engine.protocol.errors import TrustedKeysUnusable

MAX_FILE_BYTES: Final = 1 << 20
_BLOCK: Final = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----.*?-----END \1-----", re.DOTALL)
_PUBLIC_KEY: Final = b"PUBLIC KEY"
_CERTIFICATE: Final = b"CERTIFICATE"


@dataclass(frozen=True, kw_only=True)
class Trusted:
    """What one file says: public keys, and certificates of authorities, each in PEM.

    ``name`` is the file's name, by which policies name it.
    """

    name: str
    keys: tuple[bytes, ...] = ()
    certificates: tuple[bytes, ...] = ()


def read_trusted(paths: Sequence[Path]) -> tuple[Trusted, ...]:
    """Read files and folders of files; names that begin with a dot are skipped, as Kubernetes' mounts have them.

    Raises:
        TrustedKeysUnusable: nothing is there, or a file is not what it should be.
    """
    found = tuple(_read(file) for path in paths for file in _files(path))
    if not found:
        raise TrustedKeysUnusable(
            f"no trusted key is in {', '.join(map(str, paths)) or 'any folder: none was named'}",
            advice="mount a Secret or ConfigMap with public keys or certificates (PEM)",
        )
    return found


def named(trusted: Sequence[Trusted], names: Sequence[str]) -> tuple[Trusted, ...]:
    """Return those with these names; all of them where no names are given.

    Raises:
        TrustedKeysUnusable: one is not there. It may have been named to shut others out, so nothing takes its place.
    """
    by_name = {item.name: item for item in trusted}
    missing = [name for name in names if name not in by_name]
    if missing:
        raise TrustedKeysUnusable(
            f"the trusted key {shown(missing[0])!r} is not mounted in this engine",
            advice=f"mounted are: {', '.join(sorted(by_name)) or 'none'}",
            details={"key": shown(missing[0])},
        )
    return tuple(by_name[name] for name in names) or tuple(trusted)


def _files(path: Path) -> Iterator[Path]:
    try:
        if not path.is_dir():
            yield path
            return
        yield from sorted(entry for entry in path.iterdir() if not entry.name.startswith(".") and entry.is_file())
    except OSError as error:
        raise TrustedKeysUnusable(f"{path}: {error.strerror}", advice="check the mount of the trusted keys") from None


def _read(file: Path) -> Trusted:
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise TrustedKeysUnusable(f"{file}: {error.strerror}", advice="check the mount of the trusted keys") from None
    blocks = [(match[1], match[0] + b"\n") for match in _BLOCK.finditer(data)]
    kinds = {kind for kind, _ in blocks}
    if len(data) > MAX_FILE_BYTES or not kinds or kinds - {_PUBLIC_KEY, _CERTIFICATE}:
        other = sorted(kind.decode() for kind in kinds - {_PUBLIC_KEY, _CERTIFICATE})
        raise TrustedKeysUnusable(
            f"{file}: not a PEM file of public keys and certificates{f', but holds {other[0]}' if other else ''}",
            advice="openssl pkey -in key.pem -pubout -out key.pub makes the public key; keep the private one elsewhere",
        )
    return Trusted(
        name=file.name,
        keys=tuple(block for kind, block in blocks if kind == _PUBLIC_KEY),
        certificates=tuple(block for kind, block in blocks if kind == _CERTIFICATE),
    )
