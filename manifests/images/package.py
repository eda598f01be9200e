"""Layers with SharePod: its locked dependencies, and the package itself, compiled from a source tree.

Guarantees:

- Only wheels with a locked hash are installed. The machine's pip fetches them, because builds run without network.
- A layer is cached under the hash of its inputs (locks, sources, root).
- No image is made if the hook is missing or the token scheduler is not compiled.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from images.layers import Layer, layer_of_folder
from images.roots import CompilingRoot, cached
from images.steps import ImageError, NotHadError, run

LOCKS = Path(__file__).parent / "locks"
PREFIX = "opt/sharepod"
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "shim", "operator")
_FROM_CFFI = ("_wire.c", "_scores.c", "_frame_reader.c", "_timed_wait.c")
BUILT = ("*.so", "*.o", "*.pyc", "__pycache__", "*.egg-info", *_FROM_CFFI)
_OLDEST_LIBC = 17
"""Oldest glibc, by its minor version, for which a wheel may be built (manylinux2014)."""
_BY = "1"
_TIMEOUT = 900.0


def imports_layer(root: CompilingRoot, part: str) -> Layer:
    """Return the layer with a virtual environment and the packages of the lock of `part` (operator, agent)."""
    lock = LOCKS / f"{part}.lock"

    def make(folder: Path) -> None:
        with root.folder() as work:
            _fetch(root, lock, work / "wheels")
            shutil.copy(lock, work / "lock")
            _environment(root)
            _pip(root, f"packages of the {part}", "install", f"--find-links={root.inside(work)}/wheels",
                 "--require-hashes", f"--requirement={root.inside(work)}/lock")  # fmt: skip
            _finish(root, folder)

    return Layer.read(cached(f"imports-{part}-{_key(root, lock.read_bytes())}", make))


def package_layer(root: CompilingRoot, source: Path) -> Layer:
    """Return the layer with the package `sharepod`, compiled from a source tree, and the hook."""
    lock = LOCKS / "build.lock"
    contents = [
        part for path in _files(source) for part in (path.relative_to(source).as_posix().encode(), path.read_bytes())
    ]

    def make(folder: Path) -> None:
        with root.folder() as work:
            _fetch(root, lock, work / "wheels")
            shutil.copy(lock, work / "lock")
            inside = root.inside(work)
            _venv(root, "/opt/build", "--copies")
            _pip(root, "compiler's packages", "install", f"--find-links={inside}/wheels", "--require-hashes",
                 f"--requirement={inside}/lock", prefix="/opt/build")  # fmt: skip
            _copy_sources(source, root.path / "src")
            _pip(root, "sharepod: compiling", "wheel", "--no-build-isolation", "--no-deps",
                 f"--wheel-dir={inside}/made", "/src", prefix="/opt/build", usual_s=40)  # fmt: skip
            _environment(root)
            _pip(root, "sharepod: installing", "install", "--no-deps", f"--find-links={inside}/made", "sharepod")
            _check(root.path / PREFIX)
            for left in (*(root.path / PREFIX / "bin").glob("python*"), root.path / PREFIX / "pyvenv.cfg"):
                left.unlink()  # these are in the layer below
            _finish(root, folder)

    return Layer.read(cached(f"package-{_key(root, lock.read_bytes(), *contents)}", make))


def check_libraries(layers: Sequence[Layer]) -> None:
    """Check that these layers contain all libraries that each library of SharePod's folder needs. Raise ImageError if
    one is missing. The same layers are checked only once."""

    def make(folder: Path) -> None:
        root = folder / "root"
        for layer in layers:
            with tarfile.open(layer.path) as archive:
                archive.extractall(root, filter="fully_trusted")  # noqa: S202  made here
        script = f"find /{PREFIX} -name '*.so*' -type f -exec ldd {{}} + 2>&1 | grep 'not found' | sort -u"
        argv = ["chroot", str(root), "/bin/sh", "-c", script]
        missing = subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT, check=False).stdout.strip()
        shutil.rmtree(root)
        if missing:
            raise ImageError(f"the base lacks libraries that packages need: {missing}")

    cached(f"checked-{hashlib.sha256(''.join(layer.digest for layer in layers).encode()).hexdigest()[:16]}", make)


def _key(root: CompilingRoot, *contents: bytes) -> str:
    digest = hashlib.sha256(f"{_BY} {root.path.parent.name}".encode())
    for content in contents:
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()[:16]


def _files(source: Path) -> Iterator[Path]:
    for name in SOURCES:
        top = source / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file() and not any(part.match(built) for built in BUILT for part in (path, *path.parents)):
                yield path


def _copy_sources(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    for path in _files(source):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def _fetch(root: CompilingRoot, lock: Path, folder: Path) -> None:
    """Let the machine's pip fetch the wheels in a lock, for the Python version of the root. pip checks the hash of each
    wheel."""
    machine = platform.machine()
    libcs = [f"manylinux_2_{minor}" for minor in range(root.libc[1], _OLDEST_LIBC - 1, -1)]
    platforms = [f"{libc}_{machine}" for libc in (*libcs, "manylinux2014", "manylinux2010", "manylinux1", "linux")]
    version = "".join(map(str, root.python))
    argv = [
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"),
        *("--require-hashes", f"--requirement={lock}", f"--dest={folder}", "--only-binary=:all:"),
        *("--implementation=cp", f"--python-version={version}", f"--abi=cp{version}", "--abi=abi3", "--abi=none"),
        *(f"--platform={name}" for name in platforms),
    ]
    run(f"wheels of {lock.name}: fetching", argv, timeout=_TIMEOUT, failure=NotHadError)


def _environment(root: CompilingRoot) -> None:
    shutil.rmtree(root.path / PREFIX, ignore_errors=True)
    _venv(root, f"/{PREFIX}", "--without-pip")


def _venv(root: CompilingRoot, prefix: str, *options: str) -> None:
    shutil.rmtree(root.path / prefix.removeprefix("/"), ignore_errors=True)
    root.run("virtual environment", ["/usr/bin/python3", "-m", "venv", *options, prefix])


def _pip(
    root: CompilingRoot, label: str, command: str, *arguments: str, prefix: str = f"/{PREFIX}", usual_s: float = 0.0
) -> None:
    # pip from a Debian virtual environment, because the virtual environments of images have none
    pip = ["/opt/pip/bin/python", "-m", "pip", f"--python={prefix}/bin/python"]
    if not (root.path / "opt/pip").is_dir():
        _venv(root, "/opt/pip")
    quiet = ["--disable-pip-version-check", "--no-input", command, "--quiet", "--no-index"]
    compiled = ["--no-compile"] if command == "install" else []
    root.run(label, [*pip, *quiet, *compiled, *arguments], usual_s=usual_s)


def _check(prefix: Path) -> None:
    package = next(prefix.glob("lib/python3.*/site-packages/sharepod"))
    hook = package / "agent/hook/libsharepod.so"
    if not hook.is_file() or hook.stat().st_size == 0:
        raise ImageError("sharepod: the package has no hook; an agent without it would let tenants run unmetered")
    if not list(package.glob("timeshare/scheduler.*.so")):
        raise ImageError("sharepod: the token scheduler is not compiled")


def _finish(root: CompilingRoot, folder: Path) -> None:
    """Compile Python files to byte code, and write the layer. Otherwise a container, whose root is read-only, would
    compile them at each start."""
    site = f"/{PREFIX}/lib"
    compiles = ["/usr/bin/python3", "-m", "compileall", "-q", "-j", "1", "--invalidation-mode", "unchecked-hash", site]
    root.run("byte code", compiles)
    layer_of_folder(root.path, folder, top=PREFIX)
    shutil.rmtree(root.path / PREFIX)
