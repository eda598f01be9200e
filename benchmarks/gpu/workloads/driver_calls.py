"""CUDA's driver API by ctypes, reduced to the kit's own workloads. Standard library only.

The kernels are written in PTX and compiled by the driver: `noop`; `spin_us_N`, which runs for N microseconds of the
GPU's own clock; `meet`, a collective. So a workload whose kernels have a known length needs no compiler and no
framework.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

SUCCESS = 0
NOT_READY = 600
NON_BLOCKING = 1
DISABLE_TIMING = 2
CAPTURE_MODES = {"global": 0, "thread local": 1, "relaxed": 2}

_HEAD = ".version 6.3\n.target sm_75\n.address_size 64\n"
_NOOP = ".visible .entry noop()\n{\n  ret;\n}\n"
_SPIN = """.visible .entry spin_us_{us}()
{{
  .reg .pred %p;
  .reg .b64 %begin, %now, %passed;
  mov.u64 %begin, %globaltimer;
again:
  mov.u64 %now, %globaltimer;
  sub.u64 %passed, %now, %begin;
  setp.lt.u64 %p, %passed, {ns};
  @%p bra again;
  ret;
}}
"""
_MEET = """.visible .entry meet(.param .u64 counter, .param .u64 all)
{
  .reg .pred %p;
  .reg .b64 %counter, %all, %come;
  ld.param.u64 %counter, [counter];
  ld.param.u64 %all, [all];
  atom.sys.add.u64 %come, [%counter], 1;
again:
  ld.volatile.u64 %come, [%counter];
  setp.lt.u64 %p, %come, %all;
  @%p bra again;
  ret;
}
"""
"""Kernel that adds 1 to a number in the host's memory, and then spins until the number has reached `all`."""


class DriverError(Exception):
    """Failure of a driver call. `code` is its CUresult."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name} ({code})")
        self.code = code


class Driver:
    """The driver, with the primary context of its first device current in this thread."""

    MEETS = -1
    """Key of the collective among the functions."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        self.library = ctypes.CDLL(library)
        self.call("cuInit", 0)
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.device = device.value
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device)
        self.context = context
        self.call("cuCtxSetCurrent", self.context)

    def call(self, name: str, *arguments: Any) -> None:
        """Make a driver call. Raises `DriverError` if it fails."""
        code = self.attempt(name, *arguments)
        if code != SUCCESS:
            text = ctypes.c_char_p()
            self.library.cuGetErrorName(code, ctypes.byref(text))
            raise DriverError(name, code, (text.value or b"unknown error").decode())

    def attempt(self, name: str, *arguments: Any) -> int:
        """Make a call and return its CUresult, which the caller must check."""
        code: int = getattr(self.library, name)(*arguments)
        return code

    def functions(self, spins_us: Iterable[int], *, meets: bool = False) -> dict[int, ctypes.c_void_p]:
        """Return kernels by their length in microseconds; 0: a kernel that does nothing. `meets`: also return the
        collective, under the key `MEETS`."""
        lengths = sorted(set(spins_us))
        text = _HEAD + _NOOP + "".join(_SPIN.format(us=us, ns=us * 1000) for us in lengths if us)
        text += _MEET if meets else ""
        image = ctypes.create_string_buffer(text.encode())
        module = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), image)
        found = {}
        names = {us: f"spin_us_{us}" if us else "noop" for us in lengths} | ({self.MEETS: "meet"} if meets else {})
        for key, name in names.items():
            function = ctypes.c_void_p()
            self.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
            found[key] = function
        return found

    def stream(self) -> ctypes.c_void_p:
        """Create a stream that does not wait for the default stream."""
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), NON_BLOCKING)
        return stream

    def event(self) -> ctypes.c_void_p:
        """Create an event that shows only that work has finished, not when."""
        event = ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(event), DISABLE_TIMING)
        return event

    def launcher(self, function: ctypes.c_void_p, stream: ctypes.c_void_p) -> Any:
        """Return a function without arguments that launches one block of the kernel, with as little overhead as ctypes
        allows."""
        launch = self.library.cuLaunchKernel
        one, none, null = ctypes.c_uint(1), ctypes.c_uint(0), ctypes.c_void_p()
        return lambda: launch(function, one, one, one, one, one, one, none, stream, null, null)

    def launch(self, function: ctypes.c_void_p, stream: ctypes.c_void_p, *numbers: int) -> None:
        """Launch one thread of a kernel. The kernel's arguments are these 64-bit numbers."""
        values = [ctypes.c_uint64(number) for number in numbers]
        places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        one, none = ctypes.c_uint(1), ctypes.c_uint(0)
        self.call("cuLaunchKernel", function, one, one, one, one, one, one, none, stream, places, ctypes.c_void_p())

    def graph(self, function: ctypes.c_void_p, stream: ctypes.c_void_p, kernels: int) -> ctypes.c_void_p:
        """Return an executable graph of `kernels` kernels that run one after the other. It is captured from the
        stream."""
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        launch = self.launcher(function, stream)
        self.call("cuStreamBeginCapture_v2", stream, CAPTURE_MODES["thread local"])
        for _ in range(kernels):
            launch()
        self.call("cuStreamEndCapture", stream, ctypes.byref(graph))
        self.call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        self.call("cuGraphDestroy", graph)
        return executable
