"""CDI devices of the node's GPUs: found by UUID or index among the specifications that NVIDIA's toolkit has written.

A GPU's device has the kind `nvidia.com/gpu`, or the kind of NVIDIA's device plugin. Its name is the GPU's UUID, or else
its index. Precedence is as in container runtimes: a later directory overrides an earlier directory, and a device that
two files of one directory define is ignored.

Guarantees:
- A specification that is broken, too large or not a regular file affects only its own devices.
- An unchanged file is not read again.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import yaml

from sharepod.api.gpunode import Gpu

log = structlog.get_logger(__name__)

_VENDOR = "nvidia.com"
_CLASS = "gpu"
_NAME = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9_.:-]{0,253}[A-Za-z0-9])?$")
_FILE_BYTES_MAX = 8 << 20
"""Largest specification in bytes that is read: some ten times the size for sixteen GPUs with seven MIG instances
each."""
_FILES_MAX = 256
"""Most files that are read in one directory."""
_DEPTH_MAX = 64
"""Deepest nesting of a specification that is parsed. Ten levels are usual; tens of thousands crash libyaml's loader."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _BrokenError(Exception):
    """Error for a specification that cannot be used. The message has the cause."""


@dataclass(frozen=True, slots=True)
class _Specification:
    """The used part of one file: the kind of its devices, and their names."""

    kind: str
    names: frozenset[str]


_Stamp = tuple[int, int, int]


class GpuDevices:
    """CDI devices of GPUs. `find` does I/O: call it from a thread, one call at a time."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Args:
        folders: the CDI directories of the node's container runtime, in ascending precedence.
        """
        self._folders = tuple(folders)
        self._read: dict[Path, tuple[_Stamp, _Specification | None]] = {}

    def find(self, gpus: Sequence[Gpu]) -> dict[str, str]:
        """Return the CDI device of each GPU that has one, by UUID."""
        names = self._names()
        # The kind nvidia.com/gpu has precedence over the kind of NVIDIA's device plugin.
        kinds = sorted(names, key=lambda kind: (kind != f"{_VENDOR}/{_CLASS}", kind))
        found: dict[str, str] = {}
        for gpu in gpus:
            for kind in kinds:
                name = next((name for name in _names_of(gpu) if name in names[kind]), None)
                if name is not None:
                    found[gpu.uuid] = f"{kind}={name}"
                    break
        return found

    def _names(self) -> Mapping[str, frozenset[str]]:
        """Return the names of the devices that a container runtime could resolve, by kind."""
        resolved: dict[str, set[str]] = {}
        seen: set[Path] = set()
        for folder in self._folders:
            here: dict[tuple[str, str], int] = {}
            for path, specification in self._specifications(folder):
                seen.add(path)
                for name in specification.names if specification is not None else ():
                    assert specification is not None
                    here[specification.kind, name] = here.get((specification.kind, name), 0) + 1
            for (kind, name), files in here.items():
                if files == 1:
                    resolved.setdefault(kind, set()).add(name)
                else:
                    resolved.get(kind, set()).discard(name)
        self._read = {path: kept for path, kept in self._read.items() if path in seen}
        return {kind: frozenset(names) for kind, names in resolved.items()}

    def _specifications(self, folder: Path) -> Iterator[tuple[Path, _Specification | None]]:
        try:
            paths = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".yaml"))
        except OSError:
            return
        for path in paths[:_FILES_MAX]:
            try:
                stamp = _stamp(path)
            except OSError:
                continue
            known = self._read.get(path)
            if known is None or known[0] != stamp:
                known = (stamp, _load(path))
                self._read[path] = known
            yield path, known[1]


def _names_of(gpu: Gpu) -> tuple[str, ...]:
    """Return the names that NVIDIA's toolkit may give a GPU's device, in order of preference. Its configuration chooses
    among them."""
    return (gpu.uuid, str(gpu.index), f"gpu{gpu.index}")


def _stamp(path: Path) -> _Stamp:
    facts = path.stat()
    return (facts.st_mtime_ns, facts.st_size, facts.st_ino)


def _load(path: Path) -> _Specification | None:
    try:
        text = _content(path)
        return _parse(json.loads(text) if path.suffix == ".json" else _load_yaml(text))
    except Exception as error:  # the file is not SharePod's, so the parser may raise any error
        log.warning("cannot use a CDI specification", file=str(path), error=str(error)[:200])
        return None


def _load_yaml(text: bytes) -> Any:
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _DEPTH_MAX:
            raise _BrokenError(f"it nests mappings and lists more than {_DEPTH_MAX} deep")
    return yaml.load(text, Loader=_LOADER)  # noqa: S506  it is a safe one


def _content(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _BrokenError("it is no regular file")
        text = file.read(_FILE_BYTES_MAX + 1)
    if len(text) > _FILE_BYTES_MAX:
        raise _BrokenError(f"it is larger than {_FILE_BYTES_MAX >> 20} MiB")
    return text


def _parse(document: Any) -> _Specification | None:
    """Return the used part of a specification. None if its devices are not GPUs of NVIDIA's kinds."""
    if not isinstance(document, Mapping):
        raise _BrokenError("it is no mapping")
    kind, devices = document.get("kind"), document.get("devices")
    if not isinstance(kind, str) or not isinstance(devices, list):
        raise _BrokenError("it has no kind or no devices")
    vendor, _, kind_class = kind.partition("/")
    if kind_class != _CLASS or not (vendor == _VENDOR or vendor.endswith(f".{_VENDOR}")):
        return None
    names = [device.get("name") if isinstance(device, Mapping) else None for device in devices]
    valid = [name for name in names if isinstance(name, str) and _NAME.match(name)]
    if len(valid) != len(names):
        raise _BrokenError("it has a device without a valid name")
    return _Specification(kind, frozenset(valid))
