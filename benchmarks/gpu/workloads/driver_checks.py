"""Checks of the driver behaviour that the hook depends on.

`symbols`         Does cuGetProcAddress return only pointers that the driver also exports by name? The hook knows the
                  driver's functions by their exported names, and cannot wrap a pointer without one.
`captures`        May another thread query an event while a stream is being captured? Does the capture stay valid?
`context`         The kit measures the memory of a context: it reads the device's memory before and after.
`busy_captures`   Streams are captured during work on another stream. Under the hook, the hook thread queries events at
                  the same time.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import struct
import threading
import time
from pathlib import Path
from typing import Any

from conversation import Answer, serve
from driver_calls import CAPTURE_MODES, NOT_READY, SUCCESS, Driver

RELAXED = CAPTURE_MODES["relaxed"]
PER_THREAD = 2  # CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM
_FORM = re.compile(r"(_v\d+)?(_ptds|_ptsz)?$")
_DYNSYM = 11  # SHT_DYNSYM


def exported(path: Path) -> list[str]:
    """Return the names of the functions of CUDA's driver API that a 64-bit ELF file exports."""
    image = path.read_bytes()
    if image[:5] != b"\x7fELF\x02":
        raise ValueError(f"{path} is not an ELF file for 64 bit")
    table_at, size, count = struct.unpack_from("<Q", image, 40)[0], *struct.unpack_from("<HH", image, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", image, table_at + size * number) for number in range(count)]
    names = []
    for section in sections:
        if section[1] != _DYNSYM:
            continue
        strings_at = sections[section[6]][4]
        for at in range(section[4], section[4] + section[5], section[9]):
            name_at, _, _, index = struct.unpack_from("<IBBH", image, at)
            if index == 0:
                continue
            start = strings_at + name_at
            name = image[start : image.index(b"\0", start)].decode()
            if re.match(r"cu[A-Z]", name):
                names.append(name)
    return sorted(set(names))


def asked_name(symbol: str) -> str:
    """Return the name of an exported symbol for cuGetProcAddress: without version and stream variant."""
    return _FORM.sub("", symbol)


def mapped(path: str) -> list[tuple[int, int]]:
    """Return the (first, last) addresses at which a file is mapped in this process."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].endswith(path):
            low, high = fields[0].split("-")
            ranges.append((int(low, 16), int(high, 16)))
    return ranges


class Checks:
    """Checks of the driver. `hook`: file of the hook, whose exports are the wrapped names."""

    def __init__(self, hook: Path) -> None:
        self._hook = hook
        self._driver: Driver | None = None

    @property
    def driver(self) -> Driver:
        """Return the driver. It is opened when a check first needs it."""
        if self._driver is None:
            self._driver = Driver()
        return self._driver

    def version(self) -> Answer:
        """Return the version of CUDA that the driver supports."""
        library = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int()
        library.cuDriverGetVersion(ctypes.byref(version))
        return {"version": version.value}

    def context(self) -> Answer:
        """Create the context whose memory the kit measures."""
        self.driver.call("cuCtxSynchronize")
        return {}

    def symbols(self) -> Answer:
        """Request each wrapped name from cuGetProcAddress, in old and new versions and both stream variants. In the
        answer, `unnamed`: pointers without an exported name; `unwrapped`: forms without a wrapper; `hook`: number of
        pointers into the hook."""
        library = ctypes.CDLL("libcuda.so.1")
        wrapped = set(exported(self._hook))
        where = next(
            line.split(maxsplit=5)[5]
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "/libcuda.so" in line
        )
        addresses: dict[int, list[str]] = {}
        for name in exported(Path(where)):
            pointer = ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
            addresses.setdefault(pointer, []).append(name)
        hook = mapped("/libsharepod.so")
        newest = int(self.version()["version"])
        versions = [v for v in (10020, 11000, 11040, 11080, 12000, 12040, 12080, 13000) if v < newest] + [newest]
        answers, in_hook, absent = 0, 0, []
        unnamed: set[str] = set()
        unwrapped: set[str] = set()
        for name in sorted({asked_name(symbol) for symbol in wrapped}):
            found = False
            for version in versions:
                for flags in (0, PER_THREAD):
                    pointer = self._ask(library, name, version, flags)
                    if not pointer:
                        continue
                    found = True
                    answers += 1
                    if any(low <= pointer < high for low, high in hook):
                        in_hook += 1
                    elif pointer not in addresses:
                        unnamed.add(f"{name} {version}{' per thread' if flags else ''}")
                    elif not wrapped.intersection(addresses[pointer]):
                        unwrapped.add("=".join(addresses[pointer]))
            if not found:
                absent.append(name)
        return {
            "library": where, "wrapped": len(wrapped), "answers": answers, "hook": in_hook, "absent": absent,
            "unnamed": sorted(unnamed), "unwrapped": sorted(unwrapped),
        }  # fmt: skip

    @staticmethod
    def _ask(library: Any, name: str, version: int, flags: int) -> int:
        pointer, status = ctypes.c_void_p(), ctypes.c_int()
        # as programs of CUDA 12 make the call; drivers before 12.0 have only the older form
        if hasattr(library, "cuGetProcAddress_v2"):
            code = library.cuGetProcAddress_v2(
                name.encode(), ctypes.byref(pointer), version, ctypes.c_ulonglong(flags), ctypes.byref(status)
            )
        else:
            code = library.cuGetProcAddress(name.encode(), ctypes.byref(pointer), version, ctypes.c_ulonglong(flags))
        return pointer.value or 0 if code == SUCCESS else 0

    def captures(self) -> Answer:
        """Query an event in another thread during a capture, in each mode of capture. Return the result of
        cuEventQuery, called normally and in relaxed mode, and whether the capture then ends without an error."""
        driver = self.driver
        function = driver.functions({0})[0]
        busy, stream = driver.stream(), driver.stream()
        results = {}
        for mode, number in CAPTURE_MODES.items():
            for relaxed in (False, True):
                event, graph = driver.event(), ctypes.c_void_p()
                driver.call("cuEventRecord", event, busy)
                driver.call("cuStreamSynchronize", busy)
                driver.call("cuStreamBeginCapture_v2", stream, number)
                code = driver.launcher(function, stream)()
                asked = self._elsewhere(event, relaxed=relaxed)
                ended = driver.attempt("cuStreamEndCapture", stream, ctypes.byref(graph))
                if graph.value:
                    driver.call("cuGraphDestroy", graph)
                how = "relaxed query" if relaxed else "plain query"
                results[f"{mode}, {how}"] = {"query": asked, "launch": code, "end": ended}
        return {"captures": results}

    def _elsewhere(self, event: ctypes.c_void_p, *, relaxed: bool) -> int:
        """Return the result of cuEventQuery, called in another thread."""
        codes_seen: list[int] = []

        def ask() -> None:
            self.driver.call("cuCtxSetCurrent", self.driver.context)
            mode = ctypes.c_int(RELAXED)
            if relaxed:
                self.driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
            codes_seen.append(self.driver.attempt("cuEventQuery", event))
            if relaxed:
                self.driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(10)
        return codes_seen[0] if codes_seen else -1

    def busy_captures(self, *, seconds: float) -> Answer:
        """Capture repeatedly in global mode while short kernels run on another stream. Return the number of captures,
        the number of captures that the driver found broken, and the driver's error."""
        driver = self.driver
        functions = driver.functions({0, 100})
        busy, stream = driver.stream(), driver.stream()
        work, node = driver.launcher(functions[100], busy), driver.launcher(functions[0], stream)
        made, broken, codes = 0, 0, set()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(50):
                work()
            graph = ctypes.c_void_p()
            driver.call("cuStreamBeginCapture_v2", stream, CAPTURE_MODES["global"])
            codes_seen = {node() for _ in range(10)}
            time.sleep(0.002)
            codes_seen.add(driver.attempt("cuStreamEndCapture", stream, ctypes.byref(graph)))
            made += 1
            if codes_seen != {SUCCESS}:
                broken += 1
                codes |= codes_seen
            if graph.value:
                driver.call("cuGraphDestroy", graph)
            driver.call("cuStreamSynchronize", busy)
        return {"made": made, "broken": broken, "codes": sorted(codes - {SUCCESS, NOT_READY})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hook", type=Path, required=True, help="the hook's file, libsharepod.so")
    checks = Checks(parser.parse_args().hook)
    serve(
        {
            "version": checks.version,
            "symbols": checks.symbols,
            "captures": checks.captures,
            "context": checks.context,
            "busy_captures": checks.busy_captures,
        }
    )


if __name__ == "__main__":
    main()
