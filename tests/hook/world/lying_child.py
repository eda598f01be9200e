"""Program without the hook that sends the agent a hook's frames with false content: `lying_child.py SOCKET WAY`.

`drained`: launches 40 ms of kernels under each grant, and reports at once that they have ended. `grown`: reports again
and again that the driver has taken 1 GiB for it without a call that could be refused. After as many bytes as the GPU
has, it waits for some seconds and continues. Connects again when the agent closes the connection.
"""

from __future__ import annotations

import ctypes
import socket
import sys
import time

from sharepod import protocol

KERNELS, KERNEL = 8, b"spin_us_5000"
CLAIM, PATIENT_AT, PATIENT_S = 1 << 30, 16, 6.0


class Device:
    """The simulated device, used without the gate."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._function, context, module = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self._call("cuCtxSetCurrent", context)
        self._call("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(1 << 20))
        self._call("cuModuleLoadData", ctypes.byref(module), b"")
        self._call("cuModuleGetFunction", ctypes.byref(self._function), module, KERNEL)

    def launch(self) -> None:
        self._call("cuLaunchKernel", self._function, 1, 1, 1, 1, 1, 1, 0, None, None, None)

    def finish(self) -> None:
        self._call("cuCtxSynchronize")

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise OSError(f"{name} returned {code}")


def connected(path: str) -> socket.socket:
    """Return a connection on which the agent has sent WELCOME."""
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.connect(path)
            sock.send(protocol.encode(protocol.Hello(1, 1)))
            if isinstance(protocol.parse_agent(sock.recv(protocol.FRAME_MAX)), protocol.Welcome):
                return sock
        except OSError:
            time.sleep(0.05)
        sock.close()


def say_drained(sock: socket.socket, device: Device) -> None:
    """Launch under each grant, report DRAINED while the work runs, and request the next grant after the work has
    ended.
    """
    sock.send(protocol.encode(protocol.Want(1)))
    while packet := sock.recv(protocol.FRAME_MAX):
        frame = protocol.parse_agent(packet)
        if not isinstance(frame, protocol.Grant) or frame.renews:
            continue
        for _ in range(KERNELS):
            device.launch()
        sock.send(protocol.encode(protocol.Drained(frame.grant_id, KERNELS)))
        device.finish()
        sock.send(protocol.encode(protocol.Want(1)))


def say_grown(sock: socket.socket) -> None:
    for seq in range(1, 1 << 20):
        sock.send(protocol.encode(protocol.Reserve(seq, 0, CLAIM, grown=True)))
        if not sock.recv(protocol.FRAME_MAX):
            return
        if seq == PATIENT_AT:
            time.sleep(PATIENT_S)


def main() -> None:
    path, way = sys.argv[1:]
    device = Device()
    while True:
        with connected(path) as sock:
            try:
                if way == "drained":
                    say_drained(sock, device)
                else:
                    say_grown(sock)
            except OSError:
                pass  # the agent has closed the connection


if __name__ == "__main__":
    main()
