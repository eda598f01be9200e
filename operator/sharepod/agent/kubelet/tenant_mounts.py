"""Tenants by mount: which tenants' directories a process sees in its mount namespace.

A container of a tenant has the tenant's directory as a mount, whether a volume or a CDI device brought it. The kernel
lists it as a mount of that directory of that filesystem.

Guarantees:
- A mount of anything else than a tenant's directory, or of a file of it, names no tenant, whatever its path.
- A program that sees the kubelet's folders, and in them other pods' volumes, is no tenant's: only the places count that
  a tenant's container has them at.
- Reading the mounts of one process is bounded.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from sharepod.api.objects import PRELOAD_FILE, PRELOAD_PATH, VOLUME_MOUNT_PATH

from . import mounts

_POINTS = frozenset((Path(VOLUME_MOUNT_PATH), Path(PRELOAD_PATH)))
_BYTES_MAX = 1 << 20
"""Bytes of a mountinfo that are read. A container's own mounts come first; what a tenant adds comes behind them."""


class TenantMounts:
    """Tenants' directories under one folder, as they show in the mounts of processes."""

    def __init__(self, root: PurePosixPath | None, device: str) -> None:
        """Args:
        root: the folder of the tenants' directories, each named by the tenant's id, within its filesystem.
        device: its filesystem, as `major:minor`.
        """
        self._root = root
        self._device = device

    @classmethod
    def of(cls, tenants_dir: Path) -> TenantMounts:
        """Return the directories under a folder that exists. Raise `OSError`."""
        on = mounts.mount_of(tenants_dir)
        if on is None:
            return cls(None, "")
        return cls(PurePosixPath(on.root) / tenants_dir.resolve().relative_to(on.point), on.device)

    def is_preload(self, tenant_id: str, mount: mounts.Mount) -> bool:
        """Return whether a mount is that of the tenant's file for /etc/ld.so.preload, be it replaced since."""
        if self._root is None or mount.device != self._device:
            return False
        return PurePosixPath(mount.root.removesuffix("//deleted")) == self._root / tenant_id / PRELOAD_FILE

    def named(self, mountinfo: str, points: Collection[Path] = _POINTS) -> frozenset[str]:
        """Return the ids of the tenants whose directories a mountinfo lists at these places."""
        if self._root is None or self._root.name not in mountinfo:
            return frozenset()
        found = set()
        for mount in mounts.parse_mountinfo(mountinfo.splitlines()):
            root = PurePosixPath(mount.root.removesuffix("//deleted"))
            if mount.point in points and mount.device == self._device and self._root in root.parents:
                found.add(root.relative_to(self._root).parts[0])
        return frozenset(found)

    def of_process(self, pid: int, proc: Path) -> frozenset[str]:
        """Return the ids of the tenants whose directories a process sees; none if it has ended."""
        return self.named(read_mountinfo(pid, proc))


def read_mountinfo(pid: int, proc: Path) -> str:
    """Return the beginning of a process's mountinfo; empty if the process has ended."""
    try:
        descriptor = os.open(f"{proc}/{pid}/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    parts, size = [], 0
    try:
        while size < _BYTES_MAX and (part := os.read(descriptor, 65536)):
            parts.append(part)
            size += len(part)
    except OSError:  # the process ended meanwhile
        pass
    finally:
        os.close(descriptor)
    return b"".join(parts).decode(errors="surrogateescape")
