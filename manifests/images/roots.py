"""Debian roots: the base that both images share, and the root in which the package is compiled.

mmdebstrap makes both from the package sources of this machine, whose signatures apt checks. Guarantees:

- A root is cached under the hash of its inputs (suite, sources, packages, options). It is stored whole or not at all.
- The package is compiled by the compiler, and for the Python and C library, of the Debian suite, whatever Python this
  machine has.
- The base has no package lists, no documentation except licences, and no device.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.cache import cache_dir, exclusive
from harness.node_packages import install_packages_of

from images.layers import Layer, layer_of_tar
from images.steps import NotHadError, run

_TOOLS = {"mmdebstrap": "mmdebstrap", "chroot": "coreutils", "unshare": "util-linux"}
BASE = ("python3", "ca-certificates", "libstdc++6")
COMPILES = ("python3-dev", "python3-venv", "gcc", "libc6-dev", "binutils")
REPEATABLE = {"CFLAGS": "-g0", "PYTHONHASHSEED": "0", "SOURCE_DATE_EPOCH": "315532800"}
"""Environment of every compilation. With it the same sources give the same bytes."""
_OPTIONS = (
    "--mode=root",
    "--variant=essential",
    "--dpkgopt=path-exclude=/usr/share/doc/*",
    "--dpkgopt=path-include=/usr/share/doc/*/copyright",
    *(
        f"--dpkgopt=path-exclude=/usr/share/{folder}/*"
        for folder in ("man", "locale", "info", "lintian", "bash-completion")
    ),
)
# Byte code is valid by the hash of its source, not by the source's time. Times differ between machines, so a read-only
# root would compile at each start.
_COMPILED = 'chroot "$1" python3 -m compileall -q -f -j 0 --invalidation-mode unchecked-hash /usr/lib/python3*'
_MADE_OF = {"base": [*_OPTIONS, _COMPILED, *BASE], "root": [*_OPTIONS, *COMPILES]}
"""Inputs of each root, in addition to the suite and its sources."""
_TIMEOUT = 1800.0
_EPOCH = "0"
_BY = "1"
"""Version of the procedure that makes roots. A new version makes all roots again."""


@dataclass(frozen=True)
class CompilingRoot:
    """Root with a compiler and Python. `python`: Python's version, such as (3, 11). `libc`: version of the C
    library."""

    path: Path
    python: tuple[int, int]
    libc: tuple[int, int]

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """Context manager: temporary folder below /work, deleted at the end."""
        (self.path / "work").mkdir(exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=self.path / "work"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def inside(self, path: Path) -> str:
        """Return the path that a path below this root has inside the root."""
        return "/" + str(path.relative_to(self.path))

    def run(self, label: str, argv: Sequence[str], *, usual_s: float = 0.0) -> None:
        """Run a program in the root, without network and without this machine's environment variables."""
        env = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "LC_ALL": "C.UTF-8",
            **REPEATABLE,
        }
        enter = ["unshare", "--net", "--", "chroot", str(self.path)]
        run(
            label,
            [*enter, *argv],
            timeout=_TIMEOUT,
            env=env,
            usual_s=usual_s,
        )


def why_no_images() -> str | None:
    """Return why no image can be made on this machine, in one line. None if images can be made, even if packages still
    have to be fetched."""
    if os.geteuid() != 0:
        return "images are made as root"
    if shutil.which("apt-get") is None:
        return "images are made of Debian packages, and there is no apt-get here"
    try:
        known = _sources()
    except (subprocess.SubprocessError, OSError) as error:
        return f"images need Debian packages, and apt has no package source: {error}"
    if not known:
        return "images are made of Debian packages, and apt knows no source of them here (apt-get update)"
    return None


def roots_to_make() -> bool:
    """Return True if the cache lacks a Debian root. The next image then takes minutes, because the root is made
    first."""
    return not all((cache_dir() / "images" / _entry(kind, parts)).is_dir() for kind, parts in _MADE_OF.items())


def base_layer() -> Layer:
    """Return the layer with the C library, a shell, and Python."""
    folder = _cached("base", _make_base)
    return Layer.read(folder)


def compiling_root() -> CompilingRoot:
    """Return the root in which the package is compiled."""
    folder = _cached("root", _make_root)
    python, libc = json.loads((folder / "versions.json").read_text())
    return CompilingRoot(folder / "root", (python[0], python[1]), (libc[0], libc[1]))


def _make_base(folder: Path) -> None:
    archive = folder / "base.tar"
    _debootstrap("Debian base with Python", [*_OPTIONS, f"--customize-hook={_COMPILED}"], BASE, archive, usual_s=60)
    layer_of_tar(archive, folder, left_out=("dev", "run", "var/log", "var/cache"))
    archive.unlink()


def _make_root(folder: Path) -> None:
    root = folder / "root"
    _debootstrap("Debian root with compiler", list(_OPTIONS), COMPILES, root, usual_s=60)
    libc = "[int(part) for part in platform.libc_ver()[1].split('.')]"
    script = f"import json, platform, sys; print(json.dumps([sys.version_info[:2], {libc}]))"
    asked = subprocess.run(
        ["chroot", str(root), "python3", "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    (folder / "versions.json").write_text(asked.stdout)


def _sources() -> str:
    """Return the package sources of this machine's distribution, in the format of a sources.list."""
    form = ("--format", "$(ORIGIN)|deb $(REPO_URI) $(RELEASE) $(COMPONENT)", "Created-By: Packages")
    asked = subprocess.run(["apt-get", "indextargets", *form], capture_output=True, text=True, check=True, timeout=60)
    own = _release().get("ID", "").lower()
    lines = {
        line for origin, _, line in (line.partition("|") for line in asked.stdout.splitlines()) if origin.lower() == own
    }
    return "".join(f"{line}\n" for line in sorted(lines))


def _suite() -> str:
    return _release().get("VERSION_CODENAME", "stable")


def _release() -> dict[str, str]:
    return platform.freedesktop_os_release()


def _debootstrap(label: str, options: Sequence[str], packages: Sequence[str], target: Path, *, usual_s: float) -> None:
    install_packages_of(_TOOLS)
    with tempfile.NamedTemporaryFile("w", suffix=".list") as sources:
        sources.write(_sources())
        sources.flush()
        argv: list[str | Path] = ["mmdebstrap", *options, f"--include={','.join(packages)}"]
        argv += [_suite(), target, sources.name]
        env = dict(os.environ) | {"SOURCE_DATE_EPOCH": _EPOCH}
        run(label, argv, timeout=_TIMEOUT, env=env, usual_s=usual_s, failure=NotHadError)


def _entry(kind: str, made_of: Sequence[str]) -> str:
    """Return the name under which a root of this kind, made of these inputs, is cached."""
    parts = [_BY, _suite(), _sources(), *made_of]
    return f"{kind}-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]}"


def _cached(kind: str, make: object) -> Path:
    """Return the root of a kind from the cache. If it is missing, `make(folder)` makes it."""
    return cached(_entry(kind, _MADE_OF[kind]), make)


def cached(name: str, make: object) -> Path:
    """Return the folder `name` of the images' cache. If it is missing, `make(folder)` makes it."""
    assert callable(make)
    images = cache_dir() / "images"
    images.mkdir(exist_ok=True)
    final = images / name
    if final.is_dir():
        return final
    with exclusive(images / f"{name.partition('-')[0]}.lock", what="making images", timeout=2 * _TIMEOUT):
        if not final.is_dir():
            draft = Path(tempfile.mkdtemp(prefix="making-", dir=images))
            try:
                make(draft)
                draft.chmod(0o755)
                draft.rename(final)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    return final
