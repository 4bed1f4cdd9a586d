"""Puts stand-ins for NVIDIA's libraries into an environment whose torch links against them, on a machine without a GPU.

Ordinary indexes carry torch as a CUDA build. The loader wants cuBLAS, cuDNN, NCCL and others (2.7 GB) before torch can
be imported, and without a GPU nothing in them is ever called. So one small library defines the functions that torch
asks for, each failing with an error code, and stands under the name of every library that is missing. The CUDA runtime
itself is NVIDIA's own: it is what says that there is no device. Run by the environment's Python; needs cc and readelf.
"""

import os
import re
import subprocess
import sysconfig
import tempfile
from collections import defaultdict
from pathlib import Path

SITE = Path(sysconfig.get_paths()["purelib"])
FAMILIES = re.compile(
    "(lib)?(cublas|cudnn|cufft|curand|cusolver|cusparse|cufile|cupti|p?nccl|nvrtc|nvjitlink|nvshmem)", re.IGNORECASE
)
ERROR = 999


def readelf(kind: str, library: Path) -> list[str]:
    command = ["readelf", "--wide", kind, str(library)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def of_nvidia(name: str) -> bool:
    return FAMILIES.match(name) is not None


def missing_libraries(library: Path) -> set[str]:
    """Return the NVIDIA libraries that one of torch's needs, by file name."""
    named = (re.search(r"\(NEEDED\).*\[(.+)]", line) for line in readelf("--dynamic", library))
    return {match[1] for match in named if match and of_nvidia(match[1])}


def undefined_functions(library: Path) -> set[tuple[str, str]]:
    """Return (name, symbol version) of the NVIDIA functions that one of torch's libraries leaves open."""
    fields = (line.split() for line in readelf("--dyn-syms", library))
    open_ends = {field[7] for field in fields if len(field) > 7 and field[6] == "UND" and of_nvidia(field[7])}
    return {(name, version) for name, _, version in (symbol.partition("@") for symbol in open_ends)}


def build(functions: set[tuple[str, str]], target: Path) -> None:
    """Compile a library in which every function fails, or returns a text if it is to return one."""
    source = ['static const char text[] = "a stand-in for a CUDA library";']
    versions: dict[str, list[str]] = defaultdict(list)
    for name, version in sorted(functions):
        kind, value = ("const char *", "text") if "String" in name else ("int ", str(ERROR))
        source.append(f"{kind}{name}(void) {{ return {value}; }}")
        if version:
            versions[version].append(name)
    script = "\n".join(f"{version} {{ {'; '.join(names)}; }};" for version, names in sorted(versions.items()))
    with tempfile.TemporaryDirectory() as folder:
        code, exports = Path(folder, "functions.c"), Path(folder, "exports.map")
        code.write_text("\n".join(source) + "\n")
        exports.write_text(script + "\n")
        link = [f"-Wl,--version-script={exports}"] if versions else []
        command = ["cc", "-w", "-O1", "-fPIC", "-shared", "-nostdlib", *link, "-o", str(target), str(code)]
        subprocess.run(command, check=True)


def main() -> None:
    """Build the library and give it every missing name."""
    folder = SITE / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True, exist_ok=True)
    torch = sorted((SITE / "torch" / "lib").glob("*.so"))
    real = {path.name for path in (SITE / "nvidia").glob("*/lib/*") if not path.is_symlink()}
    names = set().union(*(missing_libraries(library) for library in torch)) - real
    build(set().union(*(undefined_functions(library) for library in torch)), folder / "libstandin.so")
    for name in sorted(names):
        (folder / name).unlink(missing_ok=True)
        os.symlink("libstandin.so", folder / name)
    print(f"{len(names)} libraries")


if __name__ == "__main__":
    main()
