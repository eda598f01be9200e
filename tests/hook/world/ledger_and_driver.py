"""Memory of a tenant's processes by the agent's ledger and by the simulated driver: both must be equal.

This module does not depend on internals of the ledger or the hook. The agent reports on the tenant's socket the bytes
that count against the limit. Each process reports by cuMemGetInfo the free bytes, which include its own idle credits.
The difference is the processes' use by the ledger.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from doubles.gpus import memory_at
from hook.world.caller import Caller, Out
from sharepod.protocol import FRAME_MAX, Hello, MemInfo, Memory, Welcome, encode, parse_agent

PATIENCE_S = 10.0


class Observer:
    """Connection to a tenant's socket that only queries memory sizes. Ends with `close`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seq = 0
        self._socket = self._connect()

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(PATIENCE_S)
        connection.connect(str(self._path))
        connection.send(encode(Hello(1, 1, observes=True)))
        assert isinstance(parse_agent(connection.recv(FRAME_MAX)), Welcome)
        return connection

    def ask(self, gpu: int = 0) -> Memory:
        """Return the tenant's limit on a GPU and the bytes credited to its processes."""
        self._seq += 1
        self._socket.send(encode(MemInfo(self._seq, gpu, 0)))
        answer = parse_agent(self._socket.recv(FRAME_MAX))
        while not isinstance(answer, Memory):
            answer = parse_agent(self._socket.recv(FRAME_MAX))
        return answer

    def again(self) -> None:
        """Connect to the agent that has replaced the last one."""
        self._socket.close()
        self._socket = self._connect()

    def close(self) -> None:
        self._socket.close()


class Driver:
    """Memory of single processes on the simulated devices, read without decoding the state file. Ends with `close`."""

    def __init__(self, state: Path) -> None:
        self._state = state
        descriptor = os.open(state, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self._places: dict[tuple[int, int], int] = {}

    def memory(self, pid: int, device: int = 0) -> int:
        """Return the bytes of a device that the process has; 0 if it has not used the driver."""
        if (pid, device) not in self._places:
            try:
                self._places[pid, device] = memory_at(self._state, pid, device)
            except KeyError:
                return 0
        return int(struct.unpack_from("=Q", self._map, self._places[pid, device])[0])

    def forget(self, pid: int) -> None:
        """Drop an ended process, because its pid may appear again at another place in the file."""
        for key in [key for key in self._places if key[0] == pid]:
            del self._places[key]

    def close(self) -> None:
        self._map.close()


def ledger_use(observer: Observer, callers: Sequence[Caller], gpu: int = 0) -> int:
    """Return the bytes of a GPU that the processes use by the ledger.

    The processes' current contexts must be on this GPU, and no other process of the tenant may use it.
    """
    for caller in callers:
        caller.post("cuMemGetInfo_v2", Out(8), Out(8))
    free = []
    for caller in callers:
        code, (left, _) = caller.answer()
        assert code == 0, f"cuMemGetInfo returned {code}"
        free.append(int.from_bytes(left, "little"))
    seen = observer.ask(gpu)
    idle = sum(seen.used - (seen.limit - left) for left in free)
    return seen.used - idle
