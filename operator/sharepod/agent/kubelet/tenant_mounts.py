"""Tenants by mount: which tenants' directories a process sees in its mount namespace.

A container of a tenant has the tenant's directory as a mount, whether a volume or a CDI device brought it. The kernel
lists it as a mount of that directory of that filesystem.

Guarantees:
- A mount of anything else than a tenant's directory, or of a file of it, names no tenant, whatever its path.
- A program that sees the kubelet's folders, and in them other pods' volumes, is no tenant's: only the places count that
  a tenant's container has them at.
- Reading the mounts of one process is bounded: 10 ms of the kernel for `_BYTES_MAX`, and 0.2 ms here. No path of a
  tenant's choice is decoded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from sharepod.api.objects import PRELOAD_FILE, PRELOAD_PATH, VOLUME_MOUNT_PATH

from . import mounts

_POINTS = frozenset((Path(VOLUME_MOUNT_PATH), Path(PRELOAD_PATH)))
_BYTES_MAX = 1 << 20
"""Bytes of a mountinfo that are read. A container's own mounts come first; what a tenant adds comes behind them."""

_FIELDS_MAX = 1024
"""Bytes of the root below the tenant's id, and of a point, of a mount that can be the tenant's."""


class TenantMounts:
    """Tenants' directories under one folder, as they show in the mounts of processes."""

    def __init__(self, root: PurePosixPath | None, device: str) -> None:
        """Args:
        root: the folder of the tenants' directories, each named by the tenant's id, within its filesystem.
        device: its filesystem, as `major:minor`.
        """
        self._root = root
        self._below = f" {device} {mounts.escaped(str(root)).rstrip('/')}/".encode(errors="surrogateescape")
        """Text of a mountinfo before the tenant's id. No path has a space there, so that no other field reads so."""

    @classmethod
    def of(cls, tenants_dir: Path) -> TenantMounts:
        """Return the directories under a folder that exists. Raise `OSError`."""
        on = mounts.mount_of(tenants_dir)
        if on is None:
            return cls(None, "")
        return cls(PurePosixPath(on.root) / tenants_dir.resolve().relative_to(on.point), on.device)

    def is_preload(self, tenant_id: str, mountinfo: bytes, mount_id: str) -> bool:
        """Return whether a mountinfo's mount is that of the tenant's file for /etc/ld.so.preload, be it replaced
        since."""
        if self._root is None:
            return False
        file = re.escape(self._below + f"{tenant_id}/{PRELOAD_FILE}".encode())
        return re.search(rb"(?m)^%s \d+%s(?://deleted)? " % (mount_id.encode(), file), mountinfo) is not None

    def named(self, mountinfo: bytes, points: Collection[Path] = _POINTS) -> frozenset[str]:
        """Return the ids of the tenants whose directories a mountinfo lists at these places."""
        found: set[str] = set()
        if self._root is None:
            return frozenset()
        places = {mounts.escaped(str(point)).encode() for point in points}
        at = mountinfo.find(self._below)
        while at >= 0:
            at += len(self._below)
            fields = mountinfo[at : at + _FIELDS_MAX].split(b" ", 2)
            if len(fields) == 3 and fields[1] in places:
                found.add(fields[0].partition(b"/")[0].decode(errors="surrogateescape"))
            at = mountinfo.find(self._below, at)
        return frozenset(found)

    def of_process(self, pid: int, proc: Path) -> frozenset[str]:
        """Return the ids of the tenants whose directories a process sees; none if it has ended."""
        return self.named(read_mountinfo(pid, proc))


def read_mountinfo(pid: int, proc: Path) -> bytes:
    """Return the beginning of a process's mountinfo; empty if the process has ended."""
    try:
        descriptor = os.open(f"{proc}/{pid}/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    parts, size = [], 0
    try:
        while size < _BYTES_MAX and (part := os.read(descriptor, 65536)):
            parts.append(part)
            size += len(part)
    except OSError:  # the process ended meanwhile
        pass
    finally:
        os.close(descriptor)
    return b"".join(parts)
