"""Container images made of a few files, without a registry or a builder.

Guarantees:
- An image contains exactly the given files, owned by root, with fixed times: the same files give the same image.
- A dynamic program comes with its loader, its libraries and the C library, so that it starts and honours
  /etc/ld.so.preload.

The result is a docker-archive, which `ctr images import` accepts.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import re
import shutil
import subprocess
import tarfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.errors import HarnessError

_PROGRAMS = Path(__file__).parent / "programs"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
# Libraries that a preloaded library may open at run time although no program of the image is linked to them.
_C_LIBRARY = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1")


@dataclass(frozen=True)
class Link:
    """A symbolic link in an image."""

    target: str


# Content of a file: a Path is read and keeps its executable bit; bytes become an executable file
Content = bytes | Path | Link


def make_image(
    name: str,
    files: Mapping[str, Content],
    *,
    directory: Path,
    entrypoint: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Path:
    """Write the image to a tar file in `directory` and return its path.

    `name` is a whole reference (docker.io/library/busybox:1.37). `files`: absolute path in the image to content.
    """
    layer = _layer(files)
    layer_digest = hashlib.sha256(layer).hexdigest()
    config = {
        "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "created": "1970-01-01T00:00:00Z",
        "config": {
            "Entrypoint": list(entrypoint) or None,
            "Env": [f"{key}={value}" for key, value in {"PATH": "/usr/bin:/bin", **(env or {})}.items()],
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
    }
    encoded = json.dumps(config, sort_keys=True).encode()
    digest = hashlib.sha256(encoded).hexdigest()
    manifest = [{"Config": f"{digest}.json", "RepoTags": [name], "Layers": [f"{layer_digest}/layer.tar"]}]
    path = directory / f"{re.sub(r'[^A-Za-z0-9.]+', '-', name)}.tar"
    with tarfile.open(path, "w") as archive:
        _add(archive, f"{digest}.json", encoded, 0o644)
        _add(archive, f"{layer_digest}/layer.tar", layer, 0o644)
        _add(archive, "manifest.json", json.dumps(manifest).encode(), 0o644)
    return path


def image_with_program(
    name: str,
    program: Path,
    *,
    directory: Path,
    libraries: Iterable[Path] = (),
    injected: Collection[str] = (),
    files: Mapping[str, Content] | None = None,
    env: Mapping[str, str] | None = None,
) -> Path:
    """Make an image whose entry point is `program` (at /usr/bin/NAME), with the libraries that it needs.

    `libraries`: shared objects that the program opens at run time; they are put into the loader's path with their own
    dependencies. `injected`: names of dependencies that the container runtime adds, such as libcuda.so.1.
    """
    target = f"/usr/bin/{program.name}"
    content: dict[str, Content] = {target: program, **libraries_of(program, injected)}
    for library in libraries:
        content |= {f"/usr/lib/{library.name}": library, **libraries_of(library, injected)}
    return make_image(name, content | dict(files or {}), directory=directory, entrypoint=[target], env=env)


def base_files() -> dict[str, Content]:
    """Return the files of a usual image: a shell and the usual small programs (a static busybox), users, and the C
    library for programs that need it."""
    busybox = shutil.which("busybox")
    if busybox is None:
        raise HarnessError("busybox is not installed: apt-get install busybox-static")
    listed = subprocess.run([busybox, "--list"], capture_output=True, text=True, timeout=10, check=True)
    files: dict[str, Content] = {f"/bin/{applet}": Link("busybox") for applet in listed.stdout.split()}
    files |= {
        "/bin/busybox": Path(busybox),
        "/etc/passwd": b"root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n",
        "/etc/group": b"root:x:0:\nnogroup:x:65534:\n",
    }
    return files | libraries_of(Path("/bin/sh"))


def libraries_of(program: Path, injected: Collection[str] = ()) -> dict[str, Content]:
    """Return the loader and the shared libraries of a dynamic program, except `injected`, each at the host's path.

    Empty for a static program.
    """
    found = subprocess.run(["ldd", str(program)], capture_output=True, text=True, timeout=30)
    if found.returncode != 0:
        return {}
    if missing := set(re.findall(r"(\S+) => not found", found.stdout)) - set(injected):
        raise HarnessError(f"{program} needs {', '.join(sorted(missing))}, which this machine does not have")
    paths = [Path(path) for path in re.findall(r"(/\S+) \(0x", found.stdout)]
    libc = next((path for path in paths if path.name == "libc.so.6"), None)
    if libc is not None:
        paths += [sibling for name in _C_LIBRARY if (sibling := libc.parent / name).exists()]
    return {str(path): path.resolve() for path in paths}


def compile_static(name: str, directory: Path) -> Path:
    """Compile programs/NAME.c to a static program in `directory`."""
    target = directory / name
    command = ["cc", "-std=gnu11", "-Os", "-Wall", "-Wextra", "-Werror", "-static", "-o", str(target)]
    try:
        done = subprocess.run(
            [*command, str(_PROGRAMS / f"{name}.c")], capture_output=True, text=True, timeout=60, check=False
        )
    except FileNotFoundError:
        raise HarnessError("there is no C compiler (cc): apt-get install gcc libc6-dev") from None
    if done.returncode != 0:
        raise HarnessError(f"programs/{name}.c does not compile (is libc6-dev installed?):\n{done.stderr}")
    return target


def _layer(files: Mapping[str, Content]) -> bytes:
    buffer = io.BytesIO()
    made: set[str] = set()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, content in sorted(files.items()):
            relative = path.lstrip("/")
            for parent in reversed([str(parent) for parent in Path(relative).parents][:-1]):
                if parent not in made:
                    made.add(parent)
                    _add(archive, parent, None, 0o755)
            match content:
                case Link(target):
                    link = tarfile.TarInfo(relative)
                    link.type, link.linkname = tarfile.SYMTYPE, target
                    archive.addfile(link)
                case Path():
                    _add(archive, relative, content.read_bytes(), 0o755 if content.stat().st_mode & 0o100 else 0o644)
                case _:
                    _add(archive, relative, content, 0o755)
        made_tmp = tarfile.TarInfo("tmp")
        made_tmp.type, made_tmp.mode = tarfile.DIRTYPE, 0o1777
        archive.addfile(made_tmp)
    return buffer.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes | None, mode: int) -> None:
    entry = tarfile.TarInfo(name)  # by default its times are 0 and its owner is root
    entry.mode = mode
    if content is None:
        entry.type = tarfile.DIRTYPE
        archive.addfile(entry)
    else:
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
