"""A real web server (nginx) that hands out a folder: https with a certificate of an authority of its own, and http.

With ETags and ranges. Below ``/private/`` it asks for a password, or for a bearer token.
"""

from __future__ import annotations

import ssl
from pathlib import Path

import trustme

from tests.support.free_ports import free_port
from tests.support.pki import write_pair
from tests.support.servers.listening import listening
from tests.support.tools import source_server

BASIC = "Basic dGVzdGVyOm5vdC1hLXNlY3JldA=="  # tester:not-a-secret
BEARER = "Bearer not-a-secret"

# The user is that of the tests where they are root, whose folders nobody else may read; else nginx ignores it.
_CONFIG = """
daemon off;
user root;
worker_processes 1;
pid {home}/nginx.pid;
error_log {home}/error.log warn;
events {{ worker_connections 256; }}
http {{
  access_log off;
  default_type application/octet-stream;
  client_body_temp_path {home}/tmp; proxy_temp_path {home}/tmp; fastcgi_temp_path {home}/tmp;
  uwsgi_temp_path {home}/tmp; scgi_temp_path {home}/tmp;
  map $http_authorization $known {{ "{basic}" 1; "{bearer}" 1; default 0; }}
  server {{
    listen 127.0.0.1:{port};
    listen 127.0.0.1:{tls_port} ssl;
    ssl_certificate {certificate};
    ssl_certificate_key {key};
    root {root};
    location /private/ {{
      if ($known = 0) {{ return 401; }}
    }}
  }}
}}
"""


class WebServer:
    """One server over one folder."""

    def __init__(self, home: Path) -> None:
        """Start it with the folder and its configuration below `home`."""
        self.root = home / "served"
        self.root.mkdir(parents=True)
        (home / "tmp").mkdir()
        self.authority = trustme.CA()
        self.ca = home / "ca.crt"
        self.authority.cert_pem.write_to_path(self.ca)
        pair = write_pair(self.authority, home, "127.0.0.1")
        self.tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        """For a proxy before it: the same name, of the same authority."""
        self.tls.load_cert_chain(pair.certificate, pair.key)
        port, tls_port = free_port(), free_port()
        self.url = f"https://127.0.0.1:{tls_port}"
        self.plain_url = f"http://127.0.0.1:{port}"
        config = home / "nginx.conf"
        config.write_text(
            _CONFIG.format(
                home=home,
                root=self.root,
                port=port,
                tls_port=tls_port,
                certificate=pair.certificate,
                key=pair.key,
                basic=BASIC,
                bearer=BEARER,
            )
        )
        command = (str(source_server("nginx")), "-c", str(config), "-p", str(home), "-e", str(home / "error.log"))
        self._child = listening("nginx", command, port=tls_port, home=home)

    def close(self) -> None:
        """Stop it."""
        self._child.stop()
