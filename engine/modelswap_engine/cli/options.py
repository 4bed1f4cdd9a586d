"""Options that several commands share, each declared once."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from modelswap_engine.protocol.adapters import OnIncompatible
from modelswap_engine.protocol.policy import LoadingMode, OnTimeout, TrafficMode, VerifyMode


class Output(StrEnum):
    """How results are shown."""

    TEXT = "text"
    JSON = "json"


Url: TypeAlias = Annotated[
    str,
    typer.Option(
        envvar="MODELSWAP_URL",
        help="The engine's control port. https: MODELSWAP_CA_FILE and MODELSWAP_SERVER_NAME say whom to believe.",
    ),
]
TokenFile: TypeAlias = Annotated[
    Path | None, typer.Option(envvar="MODELSWAP_TOKEN_FILE", help="File with the control port's token.")
]
Format: TypeAlias = Annotated[Output, typer.Option("-o", "--output", help="text or json.")]
Source: TypeAlias = Annotated[str, typer.Option(help="Where the checkpoint is, e.g. file:///models/m-1.1.")]
Label: TypeAlias = Annotated[str, typer.Option("--version", help="Label of the version, for people.")]
Digest: TypeAlias = Annotated[str, typer.Option(help="Pin: refuse any other content (sha256:…).")]
CredentialsName: TypeAlias = Annotated[
    str,
    typer.Option("--credentials", help="Name of credentials, mounted at the engine, for the source."),
]
Mode: TypeAlias = Annotated[TrafficMode, typer.Option(help="What happens to requests in flight.")]
Timeout: TypeAlias = Annotated[float, typer.Option(help="Seconds a Drain waits for requests in flight.")]
Late: TypeAlias = Annotated[OnTimeout, typer.Option(help="What a Drain does when they take longer.")]
LoadMode: TypeAlias = Annotated[LoadingMode, typer.Option("--loading", help="Which tensors are loaded.")]
Verify: TypeAlias = Annotated[VerifyMode, typer.Option(help="Strict hashes the live tensors before resuming.")]
Adapters: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--adapter", help="NAME=SOURCE of a LoRA adapter to load in the same commit (repeatable)."),
]
Incompatible: TypeAlias = Annotated[
    OnIncompatible, typer.Option(help="What happens to adapters that are bound to another base.")
]
Wait: TypeAlias = Annotated[bool, typer.Option(help="Follow until the operation ends.")]
