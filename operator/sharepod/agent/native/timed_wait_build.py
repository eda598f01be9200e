"""Build of `sharepod.agent._timed_wait`, the wait of the agent's event loop in C, by cffi in API mode.

The declarations come from the headers. setuptools runs this file (`cffi_modules` in setup.py).
"""

from __future__ import annotations

from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
HEADERS = HERE / "hand_offs.h", HERE / "timed_wait.h"
"""In this order, because the second header includes the first."""
SOURCES = HERE / "hand_offs.c", HERE / "timed_wait.c"
ROOT = HERE.parents[3]
PROTOCOL = ROOT / "shim" / "include"

ffi = FFI()
lines = [line for header in HEADERS for line in header.read_text(encoding="utf-8").splitlines()]
ffi.cdef("\n".join(line for line in lines if not line.startswith("#")))
ffi.set_source(
    "sharepod.agent._timed_wait",
    f'#include "{HEADERS[-1].name}"\n',
    sources=[str(source.relative_to(ROOT)) for source in SOURCES],
    include_dirs=[str(HERE), str(PROTOCOL)],
    depends=[*map(str, HEADERS), *map(str, SOURCES), str(PROTOCOL / "sharepod" / "protocol.h")],
    extra_compile_args=["-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"],
    py_limited_api=False,
)
