"""Processes behind a tenant's connections, from connect to exit.

Guarantee: a pid here always names the process that connected. Each process is watched through a pidfd that was taken at
its connection, so a reused pid is noticed.
"""

from __future__ import annotations

import array
import asyncio
import errno
import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sharepod.agent.state.handover import Survivor, start_time

_SO_PEERPIDFD = 77  # from asm-generic/socket.h, since Linux 6.5; Python's socket module lacks it
_UCRED = struct.Struct("iII")
"""struct ucred of SO_PEERCRED: pid, uid, gid."""

_AT_ONCE = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
"""Flags of each send, computed once: combining two of Python's flags takes longer than building the frame."""

EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ENOSPC, errno.ETOOMANYREFS))
"""Errors of a call for which the peer is not to blame: this process or the node has no descriptors or memory left."""


def send_packet(sock: socket.socket, packet: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send a packet to a tenant's process, at once or not at all. Raise `OSError`.

    Receivers with SO_PASSCRED get the effective user, not the real one, which tenants must not know
    (`apart.confinement`).
    """
    sender = _UCRED.pack(os.getpid(), os.geteuid(), os.getegid())
    ancillary = [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, sender)]
    if descriptors:
        ancillary.append((socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors).tobytes()))
    sock.sendmsg([packet], ancillary, _AT_ONCE)


def peer_of(sock: socket.socket) -> tuple[int, int | None]:
    """Return the pid of the process that connected and a pidfd of that process, which the caller closes.

    The pidfd is None if the process has exited or is not in the agent's PID namespace. In the latter case the pid is 0.
    The pid comes from Linux (SO_PEERCRED), not from the process. Raises `OSError` if no descriptor is left: a process
    that cannot be watched is not served.
    """
    pid = peer_pid(sock)
    try:
        return pid, sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno in EXHAUSTED:
            raise
        if error.errno != errno.ENOPROTOOPT:  # the process has exited, and another process may have its pid
            return pid, None
    if pid <= 0:
        return pid, None
    try:
        return pid, os.pidfd_open(pid)
    except OSError as error:
        if error.errno in EXHAUSTED:
            raise
        return pid, None


def peer_pid(sock: socket.socket) -> int:
    """Return the pid of the process that connected, by SO_PEERCRED."""
    pid: int = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[0]
    return pid


@dataclass(frozen=True)
class Peer:
    """Process behind a connection. See `peer_of`."""

    pid: int
    pidfd: int | None
    """Descriptor of the process; the receiver of the peer closes it."""


Identified = Callable[[socket.socket, Peer | None], None]
"""Callback for the result of an identification: takes the connection and its process. None: the process is unknown, and
the callee must close the connection."""


class Peers(Protocol):
    """Source of the identities of processes behind connections."""

    def pid(self, sock: socket.socket) -> int | None:
        """Return the pid of the process that connected. None if only `identify` can find it."""

    def identify(self, tenant_id: str, sock: socket.socket, later: Identified) -> Peer | None:
        """Return the process that connected to a tenant's socket, or None: `later` will then be called with it.

        Raises `OSError` if no descriptor is left.
        """

    def watch(self, survivor: Survivor) -> int | None:
        """Return a pidfd of a process of an earlier agent; None if it has exited. Raises `OSError` if no descriptor is
        left."""


class NodePeers:
    """Identities as this process sees them, which shares the node's PID namespace."""

    def pid(self, sock: socket.socket) -> int | None:
        """Return the pid of the process that connected."""
        return peer_pid(sock)

    def identify(self, tenant_id: str, sock: socket.socket, later: Identified) -> Peer | None:
        """Return the process that connected."""
        return Peer(*peer_of(sock))

    def watch(self, survivor: Survivor) -> int | None:
        """Return a pidfd of a process of an earlier agent."""
        try:
            pidfd = os.pidfd_open(survivor.pid)
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise
            return None
        if start_time(survivor.pid) == survivor.start:
            return pidfd
        os.close(pidfd)
        return None


class PeerProcesses:
    """Processes of one tenant that have connected and not exited.

    Args:
        exited: Called with the pid of each process that exits.
    """

    def __init__(self, exited: Callable[[int], None]) -> None:
        self._exited = exited
        self._pidfds: dict[int, int] = {}

    @property
    def pids(self) -> frozenset[int]:
        """Pids of the processes that have not exited."""
        return frozenset(self._pidfds)

    def __contains__(self, pid: int) -> bool:
        return pid in self._pidfds

    def __len__(self) -> int:
        return len(self._pidfds)

    def add(self, pid: int, pidfd: int) -> None:
        """Watch a process until it exits. Owns `pidfd`. Raise `OSError`."""
        if pid in self._pidfds:
            os.close(pidfd)
            return
        try:
            asyncio.get_running_loop().add_reader(pidfd, self._ended, pid)
        except OSError:
            os.close(pidfd)
            raise
        self._pidfds[pid] = pidfd

    def close(self) -> None:
        """Stop watching."""
        for pid in list(self._pidfds):
            self._forget(pid)

    def _ended(self, pid: int) -> None:
        self._forget(pid)
        self._exited(pid)

    def _forget(self, pid: int) -> None:
        pidfd = self._pidfds.pop(pid)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
