"""Build script of `sharepod.protocol._wire`, the agent's binding of the wire format, by cffi in API mode.

The declarations are read from protocol.h itself, and the C compiler compares each struct with the header. So a binding
that differs from `protocol.h` cannot be imported. setuptools runs this script (`cffi_modules` in setup.py). To run it
by hand: `python shim/wire_build.py`.
"""

from __future__ import annotations

import re
from pathlib import Path

from cffi import FFI

SHIM = Path(__file__).resolve().parent
HEADER = SHIM / "include" / "sharepod" / "protocol.h"

_CONSTANT = re.compile(r"^#define\s+SHP_\w+\s+(0x[0-9a-fA-F]+|\d+)\s*(/\*.*\*/)?\s*$")


def declarations(header: str) -> str:
    """Return the header as cffi can read it: without preprocessor lines, except `#define`s of plain numbers."""
    return "\n".join(line for line in header.splitlines() if not line.startswith("#") or _CONSTANT.match(line))


ffi = FFI()
ffi.cdef(declarations(HEADER.read_text(encoding="utf-8")))
ffi.set_source(
    "sharepod.protocol._wire",
    '#include "sharepod/protocol.h"\n',
    include_dirs=[str(SHIM / "include")],
    depends=[str(HEADER)],
    extra_compile_args=["-std=c11", "-O2"],
    py_limited_api=False,
)

if __name__ == "__main__":
    ffi.compile(tmpdir=str(SHIM.parent / "operator"), verbose=True)
