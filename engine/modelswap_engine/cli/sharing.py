"""What a serving process shares with the other pods of its slot, made of its options: whom it asks, what it gives."""

import os
from collections.abc import Callable
from functools import partial

from modelswap_engine.cli.host_options import Auth
from modelswap_engine.cli.hosting import HostSettings
from modelswap_engine.http.app import Shared
from modelswap_engine.http.auth import Authenticator, InsecureAuthenticator, TokenFileAuthenticator
from modelswap_engine.http.blobs import Bandwidth, BlobRoutes
from modelswap_engine.http.cluster import peer_authenticator
from modelswap_engine.protocol.errors import BadRequest
from modelswap_engine.sources.peers.choice import Peer
from modelswap_engine.sources.peers.client import Access, connected
from modelswap_engine.sources.peers.finding import find
from modelswap_engine.sources.peers.sharing import Peers
from modelswap_engine.sources.remote.records import Records
from modelswap_engine.sources.remote.sharing import NOBODY, Sharing
from modelswap_engine.store.content import ContentStore
from modelswap_engine.swap.clock import SystemClock


def peers_of(settings: HostSettings) -> Sharing:
    """Return the pods that are asked before a source is."""
    if not settings.peers:
        return NOBODY
    access = Access(
        token_file=settings.peer_token_file,
        tls=settings.control_tls_cert is not None,
        ca_file=settings.peer_ca_file,
        server_name=settings.peer_server_name,
    )
    names = [Peer(host, port) for host, port in settings.peers]
    return Peers(find=partial(find, names, own_port=settings.control_port), connect=partial(connected, access))


async def shared_of(
    settings: HostSettings, *, store: ContentStore, records: Records, given: Callable[[int], None]
) -> Shared | None:
    """Return what other pods may read; None where nothing is shared.

    Raises:
        BadRequest: their tokens cannot be checked.
    """
    if not settings.peers:
        return None
    blobs = BlobRoutes(
        store=store,
        manifest=records.given,
        bandwidth=Bandwidth(settings.peer_bytes_per_second, clock=SystemClock()),
        given=given,
    )
    return Shared(blobs=blobs, peers=await _authenticator(settings))


async def _authenticator(settings: HostSettings) -> Authenticator:
    if settings.insecure:
        return InsecureAuthenticator()
    if settings.peer_token_file is None:
        raise BadRequest(
            "--peers needs --peer-token-file", advice="pass the token that pods of the slot show each other"
        )
    if settings.auth is Auth.KUBERNETES:
        return await peer_authenticator(token_file=settings.peer_token_file, environment=os.environ)
    tokens = TokenFileAuthenticator(settings.peer_token_file)
    await tokens.load()
    return tokens
