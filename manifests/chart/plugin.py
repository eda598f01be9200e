"""Archive of the kubectl plugin, and its manifest for krew.

Guarantees:
- The archive has one program for Linux and macOS, and the licence. The program needs only Python.
- The same sources give the same bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import distribution
from pathlib import Path

import yaml

from chart.overlays import MANIFESTS

ROOT = MANIFESTS.parent
CLI = ROOT / "cli"
REPOSITORY = "https://repository.invalid/sharepod"
PROGRAM = "kubectl-sharepod"
_MAIN = """\
import sys

if sys.version_info < (3, 11):
    sys.exit("error: kubectl sharepod needs Python 3.11 or newer as python3 on PATH; this is " + sys.version.split()[0])

from kubectl_sharepod.__main__ import main

main()
"""
_FIRST_DAY = (1980, 1, 1, 0, 0, 0)
"""Time stamp of each file in the program: the earliest that a zip file can have. So builds are equal."""


def write_plugin(into: Path, repository: str) -> tuple[Path, Path]:
    """Write the archive and the manifest. Return both paths. `repository`: URL whose releases contain the archive."""
    version = str(tomllib.loads((CLI / "pyproject.toml").read_text())["project"]["version"])
    archive, manifest = into / f"{PROGRAM}-{version}.tar.gz", into / "sharepod.yaml"
    content = packed([(PROGRAM, _program(), 0o755), ("LICENSE", (ROOT / "LICENSE").read_bytes(), 0o644)])
    archive.write_bytes(content)
    spec = {
        "version": f"v{version}",
        "homepage": repository,
        "shortDescription": "Show who holds which GPU, and why a Pod waits",
        "description": (
            "Shows GPUs that Pods share with SharePod: tenants and their shares, free capacity, reasons of waiting,\n"
            "hours and budgets, and what keeps nodes from working. It has the rights of its user.\n"
        ),
        "caveats": "It needs Python 3.11 or newer as python3 on PATH. Begin with: kubectl sharepod doctor\n",
        "platforms": [
            {
                "selector": {"matchExpressions": [{"key": "os", "operator": "In", "values": ["linux", "darwin"]}]},
                "uri": f"{repository}/releases/download/v{version}/{archive.name}",
                "sha256": hashlib.sha256(content).hexdigest(),
                "files": [{"from": PROGRAM, "to": "."}, {"from": "LICENSE", "to": "."}],
                "bin": PROGRAM,
            }
        ],
    }
    plugin = {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": "sharepod"},
        "spec": spec,
    }
    manifest.write_text(yaml.safe_dump(plugin, sort_keys=False, width=120))
    return archive, manifest


def packed(members: Iterable[tuple[str, bytes, int]]) -> bytes:
    """Return a compressed tar file whose bytes depend only on its members, each (name, content, mode)."""
    plain, compressed = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content, mode in members:
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), mode
            tar.addfile(member, io.BytesIO(content))
    with gzip.GzipFile(filename="", mode="wb", fileobj=compressed, mtime=0) as file:
        file.write(plain.getvalue())
    return compressed.getvalue()


def _program() -> bytes:
    """Return the plugin as a zip file that python3 can run."""
    program = io.BytesIO(b"#!/usr/bin/env python3\n")
    program.seek(0, io.SEEK_END)
    with zipfile.ZipFile(program, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, content in _files():
            member = zipfile.ZipInfo(name, _FIRST_DAY)
            member.external_attr = 0o644 << 16
            zipped.writestr(member, content, zipfile.ZIP_DEFLATED)
    return program.getvalue()


def _files() -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each file of the program: the plugin, and PyYAML without its C part."""
    yield "__main__.py", _MAIN.encode()
    for path in sorted((CLI / "kubectl_sharepod").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield str(path.relative_to(CLI)), path.read_bytes()
    for path in sorted(Path(yaml.__file__).parent.glob("*.py")):
        yield f"yaml/{path.name}", path.read_bytes()
    for file in distribution("PyYAML").files or ():
        if file.name == "LICENSE":
            yield "yaml/LICENSE", Path(str(file.locate())).read_bytes()
