"""All openers of places elsewhere, made of options; needs what each protocol's client needs."""

import os
from collections.abc import Sequence
from pathlib import Path

from modelswap_engine.sources.credentials import Credentials
from modelswap_engine.sources.https import WebFolders
from modelswap_engine.sources.hub import Hubs
from modelswap_engine.sources.objects import SCHEMES, ObjectStores
from modelswap_engine.sources.oci.registries import Registries
from modelswap_engine.sources.remote.schemes import ByScheme
from modelswap_engine.sources.web.proxies import Proxies
from modelswap_engine.sources.web.ranges import WebSettings
from modelswap_engine.sources.web.reach import Reach


def openers(*, credentials_dir: Path | None, allow: Sequence[str], private_redirects: bool = False) -> ByScheme:
    """Return what opens a folder by the scheme of its URI.

    Args:
        credentials_dir: folder of mounted credentials.
        allow: prefixes of what may be read; servers may send us to their hosts.
        private_redirects: servers may send us to any address.
    """
    credentials = Credentials(credentials_dir)
    web = WebSettings(reach=Reach.of(allow, anywhere=private_redirects), proxies=Proxies(os.environ))
    return ByScheme(
        {
            **dict.fromkeys(SCHEMES, ObjectStores(credentials)),
            "https": WebFolders(credentials, web),
            "hf": Hubs(credentials, environment=os.environ, settings=web),
            "oci": Registries(credentials, web),
        }
    )
