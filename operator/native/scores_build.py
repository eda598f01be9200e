"""Builds `sharepod.placement._scores`, the inner loops of placement in C, by cffi in API mode.

The declarations are read from the header itself. setuptools runs it (`cffi_modules` in setup.py).
"""

from __future__ import annotations

from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
HEADER, SOURCE = HERE / "scores.h", HERE / "scores.c"

ffi = FFI()
ffi.cdef("\n".join(line for line in HEADER.read_text(encoding="utf-8").splitlines() if not line.startswith("#")))
ffi.set_source(
    "sharepod.placement._scores",
    '#include "scores.h"\n',
    sources=[str(SOURCE.relative_to(HERE.parent.parent))],
    include_dirs=[str(HERE)],
    depends=[str(HEADER), str(SOURCE)],
    # The same sums on every machine: nothing is contracted or reordered.
    extra_compile_args=[
        "-std=c11",
        "-O3",
        "-ffp-contract=off",
        "-fno-trapping-math",
        "-fno-math-errno",
        "-fno-signed-zeros",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unused-parameter",
        "-Wno-psabi",  # vectors are passed between functions of this one file alone
    ],
    libraries=["m"],
    py_limited_api=False,
)
