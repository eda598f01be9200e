"""Tenants by mount: the tenants' directories that a process has in its mount namespace.

A container of a tenant has the tenant's directory as a mount, from a volume or a CDI device. /proc/<pid>/mountinfo
lists the mount with the path of the directory within its filesystem.

Guarantees:
- Only a mount of a tenant's directory, or of a file in it, is evidence of a tenant. The path of the mount point alone
  is no evidence.
- Only the mount points of tenants' containers count. A program that has the kubelet's folders mounted, with other pods'
  volumes in them, belongs to no tenant.
- Reading the mounts of one process takes bounded time: for `_BYTES_MAX`, 10 ms in Linux and 0.2 ms here. No path that a
  tenant can choose is decoded.
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
"""Most bytes of a mountinfo that are read. A container's own mounts come first, so mounts that a tenant adds cannot
push them out."""

_FIELDS_MAX = 1024
"""Most bytes of a mountinfo line that are parsed, from the tenant's id to the mount point."""


class TenantMounts:
    """The tenants' directories, recognized in mountinfo files of processes."""

    def __init__(self, root: PurePosixPath | None, device: str) -> None:
        """Args:
        root: path, within its filesystem, of the folder of the tenants' directories, each named by the tenant's id.
        device: device number of that filesystem, as `major:minor`."""
        self._root = root
        self._below = f" {device} {mounts.escaped(str(root)).rstrip('/')}/".encode(errors="surrogateescape")
        """Text of a mountinfo line directly before a tenant's id. Mountinfo escapes spaces in paths, so no path
        contains this text."""

    @classmethod
    def of(cls, tenants_dir: Path) -> TenantMounts:
        """Return the directories' mounts under an existing `tenants_dir`. Raise `OSError`."""
        on = mounts.mount_of(tenants_dir)
        if on is None:
            return cls(None, "")
        return cls(PurePosixPath(on.root) / tenants_dir.resolve().relative_to(on.point), on.device)

    def is_preload(self, tenant_id: str, mountinfo: bytes, mount_id: str) -> bool:
        """Return whether the mount with this id in a mountinfo is the tenant's preload file. This also holds after the
        file was replaced."""
        if self._root is None:
            return False
        file = re.escape(self._below + f"{tenant_id}/{PRELOAD_FILE}".encode())
        return re.search(rb"(?m)^%s \d+%s(?://deleted)? " % (mount_id.encode(), file), mountinfo) is not None

    def named(self, mountinfo: bytes, points: Collection[Path] = _POINTS) -> frozenset[str]:
        """Return the ids of the tenants whose directories a mountinfo lists at one of `points`."""
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
        """Return the ids of the tenants whose directories a process has mounted. Empty if the process has exited."""
        return self.named(read_mountinfo(pid, proc))


def read_mountinfo(pid: int, proc: Path) -> bytes:
    """Return the first `_BYTES_MAX` bytes of a process's mountinfo. Empty if the process has exited."""
    try:
        descriptor = os.open(f"{proc}/{pid}/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    parts, size = [], 0
    try:
        while size < _BYTES_MAX and (part := os.read(descriptor, 65536)):
            parts.append(part)
            size += len(part)
    except OSError:  # the process has exited
        pass
    finally:
        os.close(descriptor)
    return b"".join(parts)
