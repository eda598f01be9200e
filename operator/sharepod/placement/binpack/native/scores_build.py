"""Build of `sharepod.placement.binpack._scores`, the inner loops of placement in C, by cffi in API mode.

The declarations are read from the headers. setuptools runs this file (`cffi_modules` in setup.py).
"""

from __future__ import annotations

from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
HEADERS = [HERE / name for name in ("scores.h", "hole_prices.h")]
SOURCES = [HERE / name for name in ("filters.c", "scores.c", "spread.c", "hole_prices.c")]

ffi = FFI()
for header in HEADERS:
    lines = header.read_text(encoding="utf-8").splitlines()
    ffi.cdef("\n".join(line for line in lines if not line.startswith("#")))
ffi.set_source(
    "sharepod.placement.binpack._scores",
    "".join(f'#include "{header.name}"\n' for header in HEADERS),
    sources=[str(source.relative_to(HERE.parents[4])) for source in SOURCES],
    include_dirs=[str(HERE)],
    depends=[str(path) for path in (*HEADERS, HERE / "columns.h", HERE / "filters.h", *SOURCES)],
    # Without contraction and reordering of floating-point operations, sums are the same on every machine.
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
        "-Wno-psabi",  # vectors are passed only between functions of one file
    ],
    libraries=["m"],
    py_limited_api=False,
)
