"""What the agent's ledger has for a tenant's processes, and what the fake driver has: they have to be the same.

Guarantees: nothing here knows of the ledger's or the hook's insides. The agent says what counts against the limit, by
the tenant's socket; each process says what it sees as free, by cuMemGetInfo, in which the hook leaves out what it was
credited and does not use. What is left is what the processes use, as the ledger has it.
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
from sharepod.protocol import FRAME_MAX, Hello, MemInfo, Memory, Welcome, encode, parse_daemon

PATIENCE_S = 10.0


class Observer:
    """A connection to a tenant's socket that only looks. Ends with `close`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seq = 0
        self._socket = self._connect()

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(PATIENCE_S)
        connection.connect(str(self._path))
        connection.send(encode(Hello(1, 1, observes=True)))
        assert isinstance(parse_daemon(connection.recv(FRAME_MAX)), Welcome)
        return connection

    def ask(self, gpu: int = 0) -> Memory:
        """What the tenant may have of a GPU, and what of that is credited."""
        self._seq += 1
        self._socket.send(encode(MemInfo(self._seq, gpu, 0)))
        answer = parse_daemon(self._socket.recv(FRAME_MAX))
        while not isinstance(answer, Memory):
            answer = parse_daemon(self._socket.recv(FRAME_MAX))
        return answer

    def again(self) -> None:
        """Connects anew, to an agent that has come in the place of the last."""
        self._socket.close()
        self._socket = self._connect()

    def close(self) -> None:
        self._socket.close()


class Driver:
    """What the simulated devices say of single processes, without a look at all of them. Ends with `close`."""

    def __init__(self, state: Path) -> None:
        self._state = state
        descriptor = os.open(state, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self._places: dict[tuple[int, int], int] = {}

    def memory(self, pid: int, device: int = 0) -> int:
        """Bytes of a device that the process has; 0 if it has not used the driver."""
        if (pid, device) not in self._places:
            try:
                self._places[pid, device] = memory_at(self._state, pid, device)
            except KeyError:
                return 0
        return int(struct.unpack_from("=Q", self._map, self._places[pid, device])[0])

    def forget(self, pid: int) -> None:
        """The process has ended; another may come by its pid and another place in the file."""
        for key in [key for key in self._places if key[0] == pid]:
            del self._places[key]

    def close(self) -> None:
        self._map.close()


def ledger_use(observer: Observer, callers: Sequence[Caller], gpu: int = 0) -> int:
    """Bytes of one of the tenant's GPUs that the processes use, as the ledger has it. The processes' current contexts
    are all on it, and nobody else of the tenant uses it."""
    for caller in callers:
        caller.post("cuMemGetInfo_v2", Out(8), Out(8))
    free = []
    for caller in callers:
        code, (left, _) = caller.answer()
        assert code == 0, f"cuMemGetInfo returned {code}"
        free.append(int.from_bytes(left, "little"))
    told = observer.ask(gpu)
    idle = sum(told.used - (told.limit - left) for left in free)
    return told.used - idle
