"""Options of every serving command, each declared once; nothing of what they start."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import typer

from modelswap_engine.cli.groups import flattened
from modelswap_engine.protocol.errors import BadRequest


class Auth(StrEnum):
    """How callers of the control port prove who they are."""

    KUBERNETES = "kubernetes"
    TOKEN_FILE = "token-file"  # noqa: S105 - the name of a method, not a secret


class Logs(StrEnum):
    """Form of the log: lines for people on a terminal, JSON elsewhere."""

    AUTO = "auto"
    JSON = "json"
    CONSOLE = "console"


ANY_ADDRESS: Final = "0.0.0.0"  # noqa: S104 - pods are reached by their address

_LISTS: Final = frozenset(
    {
        "allow_root",
        "allow_source",
        "source_credentials",
        "claim",
        "peers",
        "allowed_subject",
        "weight_loader",
        "weight_peer",
        "export_root",
    }
)

PEER_BYTES_PER_SECOND: Final = 256 << 20

CredentialsDir: TypeAlias = Annotated[
    Path | None, typer.Option(help="Folder with one sub-folder of mounted credentials for each name.")
]
MaxQueue: TypeAlias = Annotated[int, typer.Option(min=0, help="Requests that may wait at the closed gate.")]
DebugChecks: TypeAlias = Annotated[
    bool, typer.Option("--debug-checks", help="Allow snapshots of live tensors and comparing with them.")
]
LogForm: TypeAlias = Annotated[Logs, typer.Option(help="Form of the log.")]


@dataclass(frozen=True, kw_only=True)
class Door:
    """What a serving process is to others: its name and ports, where versions may come from, who is obeyed."""

    served_model_name: Annotated[str, typer.Option(help="Model name in the API; default: the folder's name.")] = ""
    version: Annotated[str, typer.Option(help="Label of the version in --model.")] = ""
    host: Annotated[str, typer.Option(help="Address both ports listen on.")] = ANY_ADDRESS
    port: Annotated[int, typer.Option(help="Data port (OpenAI API).")] = 8000
    control_port: Annotated[int, typer.Option(help="Control port.")] = 8001
    control_tls_cert: Annotated[
        Path | None,
        typer.Option(help="Certificate chain (PEM) of the control port; read again on change. Default: HTTP."),
    ] = None
    control_tls_key: Annotated[Path | None, typer.Option(help="Key of the control port's certificate (PEM).")] = None
    state_dir: Annotated[
        Path | None, typer.Option(help="Journal and side files, kept across restarts. Default: by control port.")
    ] = None
    allow_root: Annotated[
        list[Path] | None,
        # By a parser of our own: the framework's looks at what it is given, and the server of a mount may be gone.
        typer.Option(help="Folder versions may come from, besides --model.", parser=Path, metavar="PATH"),
    ] = None
    allow_source: Annotated[
        list[str] | None,
        typer.Option(help="Prefix that versions may be fetched from, such as s3://bucket/models (repeatable)."),
    ] = None
    allow_private_redirects: Annotated[
        bool, typer.Option("--allow-private-redirects", help="Follow what a source sends to private addresses as well.")
    ] = False
    credentials_dir: CredentialsDir = None
    source_credentials: Annotated[
        list[str] | None,
        typer.Option(help="Credentials of URIs below a prefix that name none, as NAME=PREFIX (repeatable)."),
    ] = None
    claim: Annotated[
        list[str] | None, typer.Option(help="Mounted claim for pvc:// URIs, as NAME=PATH (repeatable).")
    ] = None
    store_dir: Annotated[
        Path | None, typer.Option(help="Content store of fetched tensors. Default: store in the state folder.")
    ] = None
    store_size: Annotated[
        str, typer.Option(help="What the content store may take, such as 20Gi, less 5 %. Default: what the disk gives.")
    ] = ""
    store_shared: Annotated[
        bool,
        typer.Option(
            "--store-shared", help="Other pods use the folder of --store-dir as well: nothing in it is taken unproved."
        ),
    ] = False
    require_signature: Annotated[
        bool,
        typer.Option("--require-signature", help="Take signed versions only, also as --model. Needs --trusted-keys."),
    ] = False
    trusted_keys: Annotated[
        Path | None,
        typer.Option(help="Folder of public keys and authorities' certificates (PEM); read again each time."),
    ] = None
    peers: Annotated[
        list[str] | None,
        typer.Option(
            "--peers", help="Control ports of other pods of the slot, HOST:PORT: asked for blobs before a source is."
        ),
    ] = None
    peer_token_file: Annotated[
        Path | None, typer.Option(help="Token that pods of the slot show each other; good for blobs alone.")
    ] = None
    peer_ca_file: Annotated[
        Path | None, typer.Option(help="Authorities (PEM) of peers' certificates, where control ports speak TLS.")
    ] = None
    peer_server_name: Annotated[str, typer.Option(help="Name that peers' certificates prove. Default: the host.")] = ""
    peer_bytes_per_second: Annotated[
        int, typer.Option(min=0, help="Upper bound of what is given to all peers together; 0: none.")
    ] = PEER_BYTES_PER_SECOND
    assignment_dir: Annotated[Path | None, typer.Option(help="Where the slot's assignment is mounted.")] = None
    auth: Annotated[Auth | None, typer.Option(help="How callers of the control port prove who they are.")] = None
    token_file: Annotated[Path | None, typer.Option(help="Accepted tokens, one a line; read again on change.")] = None
    allowed_subject: Annotated[list[str] | None, typer.Option(help="Accepted service account (repeatable).")] = None
    insecure: Annotated[bool, typer.Option("--insecure", help="Ask nobody who they are. Never in a cluster.")] = False
    pod_uid: Annotated[str, typer.Option(envvar="MODELSWAP_POD_UID", help="UID of the pod.")] = ""


@dataclass(frozen=True, kw_only=True)
class Upkeep:
    """How it ends, and what it does between swaps."""

    drain_seconds: Annotated[float, typer.Option(min=0, help="SIGTERM: wait so long for requests in flight.")] = 60.0
    propagation_seconds: Annotated[
        float, typer.Option(min=0, help="In a pod: from not ready until no endpoint routes here any more.")
    ] = 2.0
    previous_seconds: Annotated[
        float, typer.Option(min=0, help="How long a previous version is retained; 0: as long as there is room.")
    ] = 0.0
    previous_bytes: Annotated[
        int, typer.Option(min=-1, help="A previous version of more bytes is not retained; -1: any size is.")
    ] = -1
    audit_seconds: Annotated[
        float, typer.Option(min=0, help="How often all live tensors are hashed again; 0: only after swaps.")
    ] = 3600.0
    audit_bytes_per_second: Annotated[int, typer.Option(min=0, help="Upper bound of that; 0: none.")] = 256 << 20
    repair_attempts: Annotated[
        int, typer.Option(min=0, help="How often damaged live tensors are loaded again before giving up; 0: never.")
    ] = 5
    restart_after_swaps: Annotated[
        int, typer.Option(min=0, help="Advise a cold restart after so many swaps; 0: only when memory grows.")
    ] = 0


def settled(door: Door, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options, ``door`` among them, as settings take them: lists as tuples, the state folder filled in.

    Raises:
        BadRequest: they contradict each other.
    """
    _check_auth(door)
    if (door.control_tls_cert is None) != (door.control_tls_key is None):
        raise BadRequest(
            "--control-tls-cert and --control-tls-key belong together", advice="pass both, or none of them"
        )
    if door.require_signature and door.trusted_keys is None:
        raise BadRequest(
            "--require-signature needs --trusted-keys: nobody could have signed anything",
            advice="pass --trusted-keys with a folder of public keys",
        )
    if door.store_shared and door.store_dir is None:
        raise BadRequest("--store-shared needs --store-dir", advice="name the folder that the pods share")
    if door.peers and door.control_tls_cert is not None and door.peer_ca_file is None:
        raise BadRequest("--peers with TLS needs --peer-ca-file", advice="pass the authority of the pods' certificates")
    found: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in flattened(options).items()
    }
    for name in _LISTS & found.keys():
        found[name] = found[name] or ()
    found["claim"] = tuple(_claim(item) for item in found["claim"])
    found["source_credentials"] = tuple(_pair(item, "--source-credentials") for item in found["source_credentials"])
    found["peers"] = tuple(_address(item) for item in found["peers"])
    found["store_bytes"] = _quantity(found.pop("store_size"))
    found["state_dir"] = found["state_dir"] or _default_state_dir(found["control_port"])
    return found


def _claim(item: str) -> tuple[str, Path]:
    name, path = _pair(item, "--claim")
    return name, Path(path)


def _pair(item: str, option: str) -> tuple[str, str]:
    name, _, value = item.partition("=")
    if not name or not value:
        raise BadRequest(f"{option} {item}: not of the form NAME=VALUE", advice="see --help")
    return name, value


def _address(item: str) -> tuple[str, int]:
    host, _, port = item.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536):
        raise BadRequest(f"--peers {item}: not of the form HOST:PORT", advice="pass the name of a headless Service")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _quantity(text: str) -> int:
    """Return bytes of a Kubernetes quantity, less what a file system needs of them; 0 for none."""
    match = re.fullmatch(r"(\d+)([kKMGTPE]?i?)", text)
    if text and match is None:
        raise BadRequest(f"--store-size {text}: not a size", advice="write it like 20Gi or 50G")
    if match is None:
        return 0
    unit = "KMGTPE".find(match[2][:1].upper()) + 1 if match[2] else 0
    scale: int = (1024 if match[2].endswith("i") else 1000) ** unit
    return int(match[1]) * scale * 95 // 100


def needs(command: str, error: ModuleNotFoundError, *, extra: str = "engine") -> BadRequest:
    """Return what is said where the packages of a command are not installed."""
    return BadRequest(
        f"`modelswap {command}` needs the package {error.name}", advice=f"pip install 'modelswap[{extra}]'"
    )


def _check_auth(door: Door) -> None:
    auth, token_file = door.auth, door.token_file
    if door.insecure:
        if auth is not None or token_file is not None:
            raise BadRequest("--insecure and --auth/--token-file exclude each other", advice="leave one of them out")
        return
    if auth is None and token_file is None:
        raise BadRequest(
            "no way to authenticate callers of the control port",
            advice="pass --token-file FILE, or --auth kubernetes in a pod (or --insecure on a machine of your own)",
        )
    if auth is Auth.KUBERNETES and not (door.pod_uid and door.allowed_subject):
        raise BadRequest(
            "--auth kubernetes needs --pod-uid (MODELSWAP_POD_UID) and at least one --allowed-subject",
            advice="set the pod UID by the downward API and name the operator's service account",
        )
    if auth is Auth.TOKEN_FILE and token_file is None:
        raise BadRequest("--auth token-file needs --token-file", advice="pass --token-file FILE")


def _default_state_dir(control_port: int) -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "modelswap" / str(control_port)
