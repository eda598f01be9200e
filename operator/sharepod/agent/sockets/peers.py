"""The processes that have connected as clients of a tenant, until they exit.

A pid here is never another process's: each is watched through a pidfd taken when it connected.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from collections.abc import Callable

_SO_PEERPIDFD = 77  # asm-generic/socket.h, since Linux 6.5
_UCRED = struct.Struct("iII")

EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
"""Errors that say nothing of the one who asks: this process, or the node, has no more to give."""


def peer_of(sock: socket.socket) -> tuple[int, int | None]:
    """The pid of the process that connected, and a pidfd of it (the caller's to close); None if it is gone or not in
    our namespace.

    The kernel says it, not the process. A pid of 0 is one of a PID namespace that we cannot see. Raises `OSError` where
    there are no more descriptors: a process that cannot be watched is not served.
    """
    pid = peer_pid(sock)
    try:
        return pid, sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno in EXHAUSTED:
            raise
    if pid <= 0:
        return pid, None
    try:
        return pid, os.pidfd_open(pid)
    except OSError as error:
        if error.errno in EXHAUSTED:
            raise
        return pid, None


def peer_pid(sock: socket.socket) -> int:
    """The pid of the process that connected, as the kernel says."""
    pid: int = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[0]
    return pid


class PeerProcesses:
    """Of one tenant. `exited` is called with the pid of each that ends."""

    def __init__(self, exited: Callable[[int], None]) -> None:
        self._exited = exited
        self._pidfds: dict[int, int] = {}
        self.any_ever = False

    @property
    def pids(self) -> frozenset[int]:
        """Those that have not exited."""
        return frozenset(self._pidfds)

    def __contains__(self, pid: int) -> bool:
        return pid in self._pidfds

    def __len__(self) -> int:
        return len(self._pidfds)

    def add(self, pid: int, pidfd: int) -> None:
        """Takes over `pidfd`."""
        self.any_ever = True
        if pid in self._pidfds:
            os.close(pidfd)
            return
        self._pidfds[pid] = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._ended, pid)

    def close(self) -> None:
        """Watches no more."""
        for pid in list(self._pidfds):
            self._forget(pid)

    def _ended(self, pid: int) -> None:
        self._forget(pid)
        self._exited(pid)

    def _forget(self, pid: int) -> None:
        pidfd = self._pidfds.pop(pid)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
