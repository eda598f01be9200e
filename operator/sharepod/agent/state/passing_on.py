"""Passing on: a terminating agent sends its listening sockets to the standby agent, so that no attempt of a client to
connect fails.

Connections wait in the sockets' backlogs until the standby serves.

The serving agent listens at `<state directory>/successor.sock`, which only the agent's user may open. A standby agent
stays connected to it, and knows by the end of the connection that the serving agent has ended. Each message has a name,
a descriptor and the mark of the descriptor, which identifies a tenant's socket (see `kept_descriptors`).

Guarantees:
- Passing on is optional. An agent of an earlier version or a killed agent sends no sockets; neither does an agent whose
  state directory supports no Unix sockets. The next agent then creates its own.
- The event loop keeps running. Standby agents that read nothing delay the end of the serving agent by at most `_SEND_S`
  in total.
- A received socket is used only if its mark shows that it is still the tenant's socket (see `StateDir.inherit`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Collection, Mapping
from pathlib import Path

import structlog

from . import files
from .kept_descriptors import KeptDescriptor, KeptDescriptors, send_kept, take_in

log = structlog.get_logger(__name__)

_SOCKET = "successor.sock"
_SEND_S = 1.0
"""Seconds within which a standby agent must read all messages. Its loop has no other work, so only a standby that is
stopped or waits for a disk takes as long."""
_AGAIN_S = 0.005
"""Seconds between two attempts to send to a standby whose socket buffer is full."""
_RETRY_S = 0.25
"""Seconds between two attempts of a standby to connect to the serving agent."""
_WAITING_MAX = 8
"""Most standby agents at one time: two while one is replaced."""
_PASSED_MAX = 4096
"""Most descriptors that a standby accepts: more than a node has tenants."""


class PassingOn:
    """Serving agent's end: accepts standby agents, and sends them descriptors when this agent terminates. Call `close`
    once no tenant is served."""

    def __init__(self, state_dir: Path) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: list[socket.socket] = []
        self._listener: socket.socket | None = None
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            with files.short_path(state_dir) as directory, files.replacing(directory / _SOCKET) as fresh:
                listener.bind(str(fresh))
                fresh.chmod(0o600)
                listener.listen(_WAITING_MAX)
        except OSError as error:
            listener.close()
            log.warning("sockets will not be passed on to the next agent", error=str(error))
            return
        self._listener = listener
        self._loop.add_reader(listener, self._accept)

    async def pass_on(self, heirlooms: Mapping[str, KeptDescriptor]) -> None:
        """Send copies of these descriptors to all standby agents, concurrently. No error is raised."""
        await asyncio.gather(*(_send_all(waiting, heirlooms) for waiting in self._waiting))

    def close(self) -> None:
        """Close the connections, by which the standby agents know that this agent no longer serves."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for waiting in list(self._waiting):
            self._forget(waiting)

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            waiting, _address = self._listener.accept()
            waiting.setblocking(False)
            if len(self._waiting) >= _WAITING_MAX:
                self._forget(self._waiting[0])
            self._waiting.append(waiting)
            # A standby sends nothing: a readable socket shows its exit.
            self._loop.add_reader(waiting, self._forget, waiting)

    def _forget(self, waiting: socket.socket) -> None:
        self._loop.remove_reader(waiting)
        self._waiting.remove(waiting)
        waiting.close()


class Awaiting:
    """Standby agent's end: stays connected to the serving agent, and receives its descriptors.

    Args:
        kept: Takes the received descriptors.
    """

    def __init__(self, state_dir: Path, kept: KeptDescriptors) -> None:
        self._state_dir = state_dir
        self._kept = kept
        self._loop = asyncio.get_running_loop()
        self._way: socket.socket | None = None
        self._ended = asyncio.Event()
        self._next_attempt = 0.0
        self._passed: dict[str, KeptDescriptor] = {}

    async def look(self, seconds: float) -> None:
        """Wait this many seconds, or until the serving agent ends. Connect if necessary."""
        now = self._loop.time()
        if self._way is None and now >= self._next_attempt:
            self._next_attempt = now + _RETRY_S
            self._connect()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        self._ended.clear()

    def close(self, *, serves: bool) -> None:
        """Stop. `serves`: this agent now serves and adopts the received descriptors; otherwise close them."""
        if self._way is not None:
            self._take_in()
        self._disconnect()
        passed, self._passed = self._passed, {}
        for name, found in passed.items():
            if serves:
                self._kept.adopt(name, found)
            else:
                os.close(found.fd)
        if passed:
            log.info("sockets were passed on by the former agent", sockets=len(passed))

    def _connect(self) -> None:
        way = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            with files.short_path(self._state_dir) as directory:
                way.connect(str(directory / _SOCKET))
        except OSError:  # the serving agent has an earlier version, or is about to exit
            way.close()
            return
        self._way = way
        self._loop.add_reader(way, self._take_in)
        log.info("the agent that serves will pass its sockets on", state_dir=str(self._state_dir))

    def _take_in(self) -> None:
        assert self._way is not None
        try:
            more = take_in(self._way, self._follow)
        except (OSError, ValueError):
            log.exception("descriptors from the former agent cannot be used")
            more = False
        if not more:
            self._disconnect()
            self._ended.set()

    def _disconnect(self) -> None:
        if self._way is not None:
            self._loop.remove_reader(self._way)
            self._way.close()
            self._way = None

    def _follow(self, message: Mapping[str, str], descriptors: Collection[int]) -> None:
        for fd in descriptors:
            os.set_inheritable(fd, False)
            name = message.get("keep", "")
            before = self._passed.pop(name, None)
            if before is not None:
                os.close(before.fd)
            if not name or len(self._passed) >= _PASSED_MAX:
                os.close(fd)
            else:
                self._passed[name] = KeptDescriptor(fd, message.get("mark", ""))


async def _send_all(waiting: socket.socket, heirlooms: Mapping[str, KeptDescriptor]) -> None:
    try:
        async with asyncio.timeout(_SEND_S):
            for name, heirloom in heirlooms.items():
                while not _sent(waiting, name, heirloom):  # noqa: ASYNC110 - a queue does not report its last bytes
                    await asyncio.sleep(_AGAIN_S)
    except OSError as error:
        log.warning("the standby agent does not read the passed-on descriptors", error=str(error) or "too slow")


def _sent(waiting: socket.socket, name: str, heirloom: KeptDescriptor) -> bool:
    try:
        send_kept(waiting, name, heirloom)
    except BlockingIOError:
        return False
    return True
