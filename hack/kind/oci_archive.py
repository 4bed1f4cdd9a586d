"""Write an OCI image archive of one layer, for `ctr images import`, from a folder: no registry and no daemon needed.

Used for the component images that a node starts with. Knows nothing of Kubernetes.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import tarfile
from pathlib import Path

_MEDIA = "application/vnd.oci.image"
_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _layer(root: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for entry in sorted(root.iterdir()):
            archive.add(entry, arcname=entry.name)
    return buffer.getvalue()


def _descriptor(media_type: str, blob: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "digest": f"sha256:{hashlib.sha256(blob).hexdigest()}", "size": len(blob)}


def write_archive(*, name: str, entrypoint: str, root: Path, output: Path) -> None:
    """Write the image `name`, whose file system is `root`, to `output`."""
    layer = _layer(root)
    layer_of = _descriptor(f"{_MEDIA}.layer.v1.tar", layer)
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": [entrypoint], "Env": [_PATH]},
            "rootfs": {"type": "layers", "diff_ids": [layer_of["digest"]]},
        }
    ).encode()
    config_of = _descriptor(f"{_MEDIA}.config.v1+json", config)
    manifest_type = f"{_MEDIA}.manifest.v1+json"
    manifest = json.dumps(
        {"schemaVersion": 2, "mediaType": manifest_type, "config": config_of, "layers": [layer_of]}
    ).encode()
    manifest_of = _descriptor(manifest_type, manifest)
    names = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name.rsplit(":", 1)[-1]}
    index = json.dumps({"schemaVersion": 2, "manifests": [{**manifest_of, "annotations": names}]}).encode()

    with tarfile.open(output, "w") as archive:
        members = {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}', "index.json": index}
        for described, blob in ((manifest_of, manifest), (config_of, config), (layer_of, layer)):
            members[f"blobs/sha256/{str(described['digest']).removeprefix('sha256:')}"] = blob
        for path, blob in members.items():
            info = tarfile.TarInfo(path)
            info.size = len(blob)
            archive.addfile(info, io.BytesIO(blob))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="image name with tag, as containerd shall know it")
    parser.add_argument("entrypoint")
    parser.add_argument("root", type=Path, help="folder that becomes the image's only layer")
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    write_archive(name=options.name, entrypoint=options.entrypoint, root=options.root, output=options.output)


if __name__ == "__main__":
    main()
