"""Child's end of the socket to its supervisor: receives links (sockets to the other child), and reports a link that has
ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

from .link import Line


class ControlEnd:
    """Child's end of the socket to the supervisor, on the running loop.

    Args:
        control: Socket to the supervisor.
        line: Receives each new link to the other child.
        ended: Called once the supervisor has exited.
    """

    def __init__(self, control: socket.socket, line: Line, ended: Callable[[], None]) -> None:
        self._control = control
        self._line = line
        self._ended = ended
        self._number = 0
        control.setblocking(False)
        asyncio.get_running_loop().add_reader(control.fileno(), self._take)

    def say_lost(self) -> None:
        """Report to the supervisor that the last link has ended. If the worker still runs, the supervisor kills it and
        starts another."""
        with contextlib.suppress(OSError):  # the supervisor has exited
            self._control.send(lost(self._number))

    def _take(self) -> None:
        try:
            packet, descriptors, _flags, _address = socket.recv_fds(self._control, 32, 1)
        except BlockingIOError:
            return
        except OSError:
            packet, descriptors = b"", []
        if not packet:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._ended()
            return
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
            self._line.connect(socket.socket(fileno=descriptor))
        self._number = int(packet)


def brought(number: int) -> bytes:
    """Return the supervisor's message that carries link `number`."""
    return str(number).encode()


def lost(number: int) -> bytes:
    """Return a child's message that link `number` has ended."""
    return f"lost {number}".encode()
