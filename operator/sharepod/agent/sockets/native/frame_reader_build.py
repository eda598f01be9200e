"""Build of `sharepod.agent.sockets._frame_reader`, the reader of tenants' clients in C, by cffi in API mode.

The declarations come from the header. setuptools runs this file (`cffi_modules` in setup.py).
"""

from __future__ import annotations

from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[4]
HEADER = HERE / "frame_reader.h"
SOURCE = HERE / "frame_reader.c"
PROTOCOL = ROOT / "shim" / "include"

ffi = FFI()
ffi.cdef("\n".join(line for line in HEADER.read_text(encoding="utf-8").splitlines() if not line.startswith("#")))
ffi.set_source(
    "sharepod.agent.sockets._frame_reader",
    f'#include "{HEADER.name}"\n',
    sources=[str(SOURCE.relative_to(ROOT))],
    include_dirs=[str(HERE), str(PROTOCOL)],
    depends=[str(HEADER), str(SOURCE), str(PROTOCOL / "sharepod" / "protocol.h")],
    extra_compile_args=["-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"],
    py_limited_api=False,
)
