"""Small inference server on a simulated GPU: `inference_server.py MICROSECONDS`, on a port of its choice.

Each GET runs one kernel of MICROSECONDS. Once the kernel has ended, the answer is the server's pid. The server prints
its address once it listens. At SIGTERM it accepts no further connection, answers pending requests, and ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Gpu:
    """Function on the simulated device whose kernel takes a fixed time."""

    def __init__(self, name: str) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._context, module, self._function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), 0)
        self._call("cuCtxSetCurrent", self._context)
        self._call("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(1 << 30))
        self._call("cuModuleLoadData", ctypes.byref(module), b"")
        self._call("cuModuleGetFunction", ctypes.byref(self._function), module, name.encode())
        self.run()

    def run(self) -> None:
        """Launch the function once and wait for its end. Any thread may call this."""
        stream = ctypes.c_void_p()
        self._call("cuCtxSetCurrent", self._context)
        self._call("cuStreamCreate", ctypes.byref(stream), 1)
        self._call("cuLaunchKernel", self._function, 1, 1, 1, 1, 1, 1, 0, stream, None, None)
        self._call("cuStreamSynchronize", stream)
        self._call("cuStreamDestroy_v2", stream)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise OSError(f"{name} returned {code}")


def main() -> None:
    gpu = Gpu(f"spin_us_{int(sys.argv[1])}")

    class Handler(BaseHTTPRequestHandler):
        """One request."""

        def do_GET(self) -> None:
            gpu.run()
            answer = str(os.getpid()).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    class Server(ThreadingHTTPServer):
        """HTTP server that waits for its threads when it ends."""

        daemon_threads = False
        request_queue_size = 128

    server = Server(("127.0.0.1", 0), Handler)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    print(f"127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever(poll_interval=0.005)
    server.server_close()


if __name__ == "__main__":
    main()
