"""Folders that appear whole or not at all."""

import os
import shutil
import tempfile
from pathlib import Path


def copy_folder(source: Path, destination: Path) -> None:
    """Copy a folder of plain files; one that is there already, under the name of its content, is left alone."""
    if destination.is_dir():
        return
    destination.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    try:
        for file in sorted(source.iterdir()):
            shutil.copyfile(file, draft / file.name)
            os.chmod(draft / file.name, 0o444)
        draft.chmod(0o755)
        draft.rename(destination)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        raise
