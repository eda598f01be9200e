"""Program behind `Probe`: makes the CUDA calls that a test requests by name, one JSON object per line.

The answer to `{"id": 1, "thread": "main", "op": "alloc", "args": [4096]}` is `{"id": 1, "code": 0, "value": ...}`;
`code` is the CUresult. Operations of one thread run one after another. A thread that waits in a call does not delay the
other threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import queue
import signal
import struct
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memory_calls import MemoryCalls  # these modules are in the folder of this file
from past_calls import PastCalls
from work_calls import WorkCalls

CU_STREAM_NON_BLOCKING = 1

_answering = threading.Lock()


def _answer(reply: dict[str, Any]) -> None:
    with _answering:
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


class Calls(MemoryCalls, PastCalls, WorkCalls):
    """Operations of the probe, by name. Each returns (CUresult, value)."""

    def __init__(self) -> None:
        super().__init__()
        self.library: ctypes.CDLL | None = None
        self.context = ctypes.c_void_p()
        self.module = ctypes.c_void_p()
        self.handles: dict[str, ctypes.c_void_p] = {"own": ctypes.c_void_p(2)}  # CU_STREAM_PER_THREAD

    def cuda(self, name: str, *arguments: Any) -> int:
        if self.library is None:
            self.library = ctypes.CDLL("libcuda.so.1")
        return int(getattr(self.library, name)(*arguments))

    def init(self) -> tuple[int, Any]:
        return self.cuda("cuInit", 0), None

    def context_create(self, device: int = 0) -> tuple[int, Any]:
        code = self.cuda("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)
        code = code or self.cuda("cuCtxSetCurrent", self.context)
        code = code or self.cuda("cuModuleLoadData", ctypes.byref(self.module), b"")
        return code, None

    def own_context(self, name: str, device: int = 0) -> tuple[int, Any]:
        self.handles[name] = handle = ctypes.c_void_p()
        return self.cuda("cuCtxCreate_v2", ctypes.byref(handle), 0, device), None

    def context_use(self, name: str = "") -> tuple[int, Any]:
        return self.cuda("cuCtxSetCurrent", self.handles[name] if name else self.context), None

    def context_pop(self) -> tuple[int, Any]:
        return self.cuda("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p())), None

    def context_destroy(self, name: str) -> tuple[int, Any]:
        return self.cuda("cuCtxDestroy_v2", self.handles.pop(name)), None

    def context_release(self, device: int = 0) -> tuple[int, Any]:
        return self.cuda("cuDevicePrimaryCtxRelease_v2", device), None

    def context_reset(self, device: int = 0) -> tuple[int, Any]:
        return self.cuda("cuDevicePrimaryCtxReset_v2", device), None

    def context_active(self, device: int = 0) -> tuple[int, Any]:
        flags, active = ctypes.c_uint(), ctypes.c_int()
        return self.cuda("cuDevicePrimaryCtxGetState", device, ctypes.byref(flags), ctypes.byref(active)), active.value

    def context_attach(self) -> tuple[int, Any]:
        return self.cuda("cuCtxAttach", ctypes.byref(ctypes.c_void_p()), 0), None

    def context_detach(self, name: str) -> tuple[int, Any]:
        return self.cuda("cuCtxDetach", self.handles[name]), None

    def context_sync(self) -> tuple[int, Any]:
        return self.cuda("cuCtxSynchronize"), None

    def alloc(self, size: int) -> tuple[int, Any]:
        address = ctypes.c_uint64()
        return self.cuda("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size)), address.value

    def alloc_managed(self, size: int) -> tuple[int, Any]:
        address = ctypes.c_uint64()
        return self.cuda("cuMemAllocManaged", ctypes.byref(address), ctypes.c_size_t(size), 1), address.value

    def alloc_pitch(self, width: int, height: int) -> tuple[int, Any]:
        address, pitch = ctypes.c_uint64(), ctypes.c_size_t()
        sizes = ctypes.c_size_t(width), ctypes.c_size_t(height), 4
        return self.cuda("cuMemAllocPitch_v2", ctypes.byref(address), ctypes.byref(pitch), *sizes), address.value

    def free(self, address: int) -> tuple[int, Any]:
        return self.cuda("cuMemFree_v2", ctypes.c_uint64(address)), None

    def copy_unsaid(self, to: int, source: int) -> tuple[int, Any]:
        """Copy 64 bytes between addresses of any kind; the call does not show their kinds."""
        addresses = ctypes.c_uint64(to), ctypes.c_uint64(source)
        return self.cuda("cuMemcpyAsync", *addresses, ctypes.c_size_t(64), None), None

    def memory_info(self) -> tuple[int, Any]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        return self.cuda("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total)), [free.value, total.value]

    def total_memory(self, device: int = 0) -> tuple[int, Any]:
        total = ctypes.c_size_t()
        return self.cuda("cuDeviceTotalMem_v2", ctypes.byref(total), device), total.value

    def device_uuid(self, device: int) -> tuple[int, Any]:
        raw = (ctypes.c_ubyte * 16)()
        code = self.cuda("cuDeviceGetUuid_v2", raw, device)
        return code, f"GPU-{uuid.UUID(bytes=bytes(raw))}"

    def stream(self, name: str, flags: int = CU_STREAM_NON_BLOCKING) -> tuple[int, Any]:
        self.handles[name] = handle = ctypes.c_void_p()
        return self.cuda("cuStreamCreate", ctypes.byref(handle), flags), None

    def handle(self, name: str) -> tuple[int, Any]:
        return 0, self.handles[name].value

    def stream_destroy(self, name: str) -> tuple[int, Any]:
        return self.cuda("cuStreamDestroy_v2", self.handles.pop(name)), None

    def streams(self, name: str, count: int) -> tuple[int, Any]:
        """Make streams `name`0, `name`1 ..."""
        return max(self.stream(f"{name}{index}")[0] for index in range(count)), None

    def streams_destroy(self, name: str, count: int, each: int = 1) -> tuple[int, Any]:
        """Destroy every `each`-th of these streams."""
        return max(self.stream_destroy(f"{name}{index}")[0] for index in range(0, count, each)), None

    def launch_each(self, kernel: str, name: str, count: int) -> tuple[int, Any]:
        """Launch once into each of these streams."""
        return max(self.launch(kernel, f"{name}{index}")[0] for index in range(count)), None

    def stream_sync(self, name: str = "") -> tuple[int, Any]:
        return self.cuda("cuStreamSynchronize", self.handles.get(name)), None

    def launch(self, kernel: str, stream: str = "", count: int = 1, symbol: str = "cuLaunchKernel") -> tuple[int, Any]:
        function = self._function(kernel)
        for done in range(count):
            code = self.cuda(symbol, function, 1, 1, 1, 1, 1, 1, 0, self.handles.get(stream), None, None)
            if code:
                return code, done
        return 0, count

    def in_turn(self, *calls: list[Any]) -> tuple[int, Any]:
        """Make several calls without a pause. Return the first code that is not CUDA_SUCCESS, and the number of calls
        before it.
        """
        for done, (op, *arguments) in enumerate(calls):
            code, _ = getattr(self, op)(*arguments)
            if code:
                return code, done
        return 0, len(calls)

    def launch_graph(self, name: str, stream: str = "") -> tuple[int, Any]:
        return self.cuda("cuGraphLaunch", self.handles[name], self.handles.get(stream)), None

    def _function(self, kernel: str) -> ctypes.c_void_p:
        function = self.handles.get(f"kernel {kernel}")
        if function is None:
            function = ctypes.c_void_p()
            assert self.cuda("cuModuleGetFunction", ctypes.byref(function), self.module, kernel.encode()) == 0, kernel
            self.handles[f"kernel {kernel}"] = function
        return function

    def event(self, name: str) -> tuple[int, Any]:
        self.handles[name] = handle = ctypes.c_void_p()
        return self.cuda("cuEventCreate", ctypes.byref(handle), 0), None

    def event_record(self, name: str, stream: str = "", count: int = 1) -> tuple[int, Any]:
        codes = (self.cuda("cuEventRecord", self.handles[name], self.handles.get(stream)) for _ in range(count))
        return next((code for code in codes if code), 0), None

    def event_query(self, name: str) -> tuple[int, Any]:
        return self.cuda("cuEventQuery", self.handles[name]), None

    def capture_begin(self, stream: str, mode: int = 0) -> tuple[int, Any]:
        return self.cuda("cuStreamBeginCapture_v2", self.handles[stream], mode), None

    def stream_wait(self, stream: str, event: str) -> tuple[int, Any]:
        return self.cuda("cuStreamWaitEvent", self.handles[stream], self.handles[event], 0), None

    def capture_end(self, stream: str, graph: str = "", plain: str = "") -> tuple[int, Any]:
        """End a capture. `graph`: name for the executable graph; `plain`: name for the graph itself."""
        captured, executable = ctypes.c_void_p(), ctypes.c_void_p()
        code = self.cuda("cuStreamEndCapture", self.handles[stream], ctypes.byref(captured))
        self.handles[plain] = captured
        if code == 0 and graph:
            code = self.cuda("cuGraphInstantiateWithFlags", ctypes.byref(executable), captured, ctypes.c_uint64(0))
            self.handles[graph] = executable
        return code, None

    def recapture(self, stream: str, plain: str, kernel: str, other: str) -> tuple[int, Any]:
        """Record a kernel into a graph of another kernel. The callback for the mismatch launches into `other`."""
        answers = []

        @ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4, ctypes.c_int)  # type: ignore[untyped-decorator]
        def mismatch(*_: Any) -> int:
            answers.append(self.launch("noop", other)[0])
            return 0

        graph = self.handles[plain]
        code = self.cuda("cuStreamBeginRecaptureToGraph", self.handles[stream], 0, graph, mismatch, None)
        code = code or self.launch(kernel, stream)[0]
        return code or self.cuda("cuStreamEndCapture", self.handles[stream], ctypes.byref(graph)), answers

    def graph_destroy(self, name: str) -> tuple[int, Any]:
        return self.cuda("cuGraphExecDestroy", self.handles.pop(name)), None

    def graph_update(self, name: str, plain: str) -> tuple[int, Any]:
        outcome = (ctypes.c_uint64 * 3)()
        return self.cuda("cuGraphExecUpdate_v2", self.handles[name], self.handles[plain], outcome), None

    def proc_address(self, name: str, version: int = 13000, flags: int = 0) -> tuple[int, Any]:
        """Call cuGetProcAddress. Return the file that contains the function, and the status."""
        found, status = ctypes.c_void_p(), ctypes.c_int(-1)
        code = self.cuda(
            "cuGetProcAddress_v2",
            name.encode(),
            ctypes.byref(found),
            version,
            ctypes.c_uint64(flags),
            ctypes.byref(status),
        )
        return code, [_file_of(found.value or 0), status.value]

    def proc_address_v1(self, name: str, version: int) -> tuple[int, Any]:
        """Call the form of cuGetProcAddress that CUDA 11 has. Return the file that contains the function."""
        found = ctypes.c_void_p()
        code = self.cuda("cuGetProcAddress", name.encode(), ctypes.byref(found), version, ctypes.c_uint64(0))
        return code, _file_of(found.value or 0)

    # Not CUDA.

    def thread_ends(self) -> tuple[int, Any]:
        """End the thread. The next call for its name starts another thread."""
        return 0, None

    def live_events(self) -> tuple[int, Any]:
        """Return the number of events that the double has created and not destroyed."""
        assert self.library is not None
        return 0, self.library.fake_live_events()

    def driver_calls(self) -> tuple[int, Any]:
        """Return the number of calls that have reached the double so far."""
        assert self.library is not None
        self.library.fake_driver_calls.restype = ctypes.c_uint64
        return 0, self.library.fake_driver_calls()

    def symbol_of(self, path: str, name: str) -> tuple[int, Any]:
        """Return the file of the function that dlsym finds in the library at `path`."""
        function = getattr(ctypes.CDLL(path), name, None)
        return 0, _file_of(ctypes.cast(function, ctypes.c_void_p).value or 0) if function else ""

    def forbid_membarrier(self) -> tuple[int, Any]:
        """Forbid membarrier to all threads from now on, like a sandbox that a program enters after its start."""
        number, seccomp = (324, 317) if platform.machine() == "x86_64" else (283, 277)
        rules = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
        content = b"".join(struct.pack("=HBBI", *rule) for rule in rules)
        buffer = ctypes.create_string_buffer(content, len(content))
        program = struct.pack("@HP", len(rules), ctypes.addressof(buffer))
        libc = ctypes.CDLL(None)
        if libc.prctl(38, 1, 0, 0, 0) != 0:
            return 1, None
        return libc.syscall(seccomp, 1, 1, ctypes.create_string_buffer(program, len(program))), None

    def load(self) -> tuple[int, Any]:
        self.library = ctypes.CDLL("libcuda.so.1")
        return 0, None

    def symbol_file(self, name: str) -> tuple[int, Any]:
        """Return the file of the function that dlsym finds in libcuda."""
        assert self.library is not None
        return 0, _file_of(ctypes.cast(getattr(self.library, name), ctypes.c_void_p).value or 0)

    def facts(self) -> tuple[int, Any]:
        tasks = Path("/proc/self/task")
        names = sorted((task / "comm").read_text().strip() for task in tasks.iterdir())
        files = []
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # another thread has closed the descriptor
                files.append(str(path.readlink()))
        maps = Path("/proc/self/maps").read_text()
        return 0, {"threads": names, "files": files, "libcuda": "libcuda" in maps}

    def pin(self, processor: int) -> tuple[int, Any]:
        os.sched_setaffinity(0, {processor})
        return 0, None

    def sink(self, nice: int) -> tuple[int, Any]:
        """Let this thread run only when no other thread does (SCHED_IDLE), and give it this nice value."""
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
        return 0, None

    def become_nobody(self) -> tuple[int, Any]:
        """Give up root in all threads. Afterwards the process makes no core dumps."""
        os.setresuid(65534, 65534, 65534)
        return ctypes.CDLL(None).prctl(4, 0, 0, 0, 0), None  # PR_SET_DUMPABLE

    def thread_id(self) -> tuple[int, Any]:
        return 0, threading.get_native_id()

    def welcomed(self) -> tuple[int, Any]:
        """Wait until the agent's hints page is mapped, which shows that the agent has answered HELLO."""
        deadline = time.monotonic() + 10
        while "sharepod-hints" not in Path("/proc/self/maps").read_text():
            if time.monotonic() > deadline:
                return 1, None
            time.sleep(0.002)
        return 0, None

    def signals_of_agent(self) -> tuple[int, Any]:
        for task in Path("/proc/self/task").iterdir():
            if (task / "comm").read_text().strip() == "sharepod":
                lines = dict(
                    line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line
                )
                return 0, lines["SigBlk"].strip()
        return 1, None

    def fork(self, *steps: list[Any]) -> tuple[int, Any]:
        """Run the steps [op, args...] in a child of fork. Return the result of each."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                results = [getattr(self, step[0])(*step[1:]) for step in steps]
                os.write(writing, json.dumps(results).encode())
                status = 0
            finally:
                os._exit(status)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            content = pipe.read()
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status), json.loads(content) if content else None

    def fork_while_loading(self, name: str = "cuMemAlloc_v2") -> tuple[int, Any]:
        """Fork inside dl_iterate_phdr, which holds a lock of the loader. Return the result of the child's call:
        cuMemAlloc_v2 or cuInit. The child has ten seconds.
        """
        assert self.library is not None
        call, address, children = getattr(self.library, name), ctypes.c_uint64(), []
        arguments = (0,) if name == "cuInit" else (ctypes.byref(address), ctypes.c_size_t(1))

        @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)  # type: ignore[untyped-decorator]
        def visit(*_: Any) -> int:
            pid = os.fork()
            if pid == 0:
                signal.alarm(10)
                os._exit(call(*arguments))
            children.append(pid)
            return 1

        ctypes.CDLL(None).dl_iterate_phdr(visit, None)
        _, status = os.waitpid(children[0], 0)
        return os.waitstatus_to_exitcode(status), None


def _file_of(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        ends, _, rest = line.partition(" ")
        low, high = (int(end, 16) for end in ends.split("-"))
        if low <= address < high:
            return rest.split()[-1]
    return ""


def _work(calls: Calls, commands: queue.SimpleQueue[dict[str, Any]]) -> None:
    while True:
        command = commands.get()
        operation: Callable[..., tuple[int, Any]] = getattr(calls, command["op"])
        try:
            code, value = operation(*command["args"])
            _answer({"id": command["id"], "code": code, "value": value})
        except BaseException as error:
            _answer({"id": command["id"], "error": repr(error)})
        if command["op"] == "thread_ends":
            return


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    calls = Calls()
    threads: dict[str, queue.SimpleQueue[dict[str, Any]]] = {}
    for line in sys.stdin:
        command = json.loads(line)
        name = command["thread"]
        if name not in threads:
            threads[name] = queue.SimpleQueue()
            threading.Thread(target=_work, args=(calls, threads[name]), name=name, daemon=True).start()
        threads[name].put(command)
        if command["op"] == "thread_ends":
            del threads[name]
    os._exit(0)


if __name__ == "__main__":
    main()
