"""Reader of NVIDIA's headers: the entry points that a release of CUDA declares.

Guarantees:
- Every function of cuda.h is found under every symbol that libcuda exports for it, including older forms and per-thread
  stream forms. Functions that only cudaTypedefs.h still has are also found. The same holds for cudaGL.h, cudaEGL.h,
  cudaVDPAU.h and cudaProfiler.h.
- Types of OpenGL, EGL and VDPAU are replaced by the plain types that they stand for, so their headers are not needed.

The headers go through the C preprocessor, because they rename their own functions by macros. The typedef files show the
CUDA version since which cuGetProcAddress returns a form.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

_FUNCTION = re.compile(r"\bCUresult\s+(?:CUDAAPI\s+)?(cu\w+)\s*\(([^;{}]*)\)\s*;")
_TYPEDEF = re.compile(
    r"typedef\s+CUresult\s*\(\s*CUDAAPI\s*\*\s*PFN_(cu\w+?)_v(\d{4,6})(_ptds|_ptsz)?\s*\)\s*\(([^;]*)\)\s*;"
)
_RELEASE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+CUDA_VERSION[ \t]+(\d+)", re.MULTILINE)
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_INTEROP = ("cudaGL", "cudaEGL", "cudaVDPAU", "cudaProfiler")
"""Headers next to cuda.h, without suffix. A release may lack some of them."""
_FOREIGN = ("GL/gl.h", "EGL/egl.h", "EGL/eglext.h", "vdpau/vdpau.h")
"""Headers of other projects that these headers include. They are replaced by empty files."""
_PLAIN = {
    "GLuint": "unsigned int",
    "GLenum": "unsigned int",
    "CUGLDeviceList": "unsigned int",
    "CUoutput_mode": "unsigned int",
    "EGLint": "int",
    "EGLImageKHR": "void *",
    "EGLStreamKHR": "void *",
    "EGLSyncKHR": "void *",
    "CUeglStreamConnection": "void *",
    "CUeglFrame": "struct CUeglFrame_st",
    "CUeglFrame_v1": "struct CUeglFrame_st",
    "VdpDevice": "unsigned int",
    "VdpVideoSurface": "unsigned int",
    "VdpOutputSurface": "unsigned int",
    "VdpGetProcAddress": "void",
}
"""Types that the headers next to cuda.h use, and the plain C types that replace them. A function type is `void`,
because it occurs only behind pointers."""
_WITHOUT_HEADER = {"cuMemGetAttribute": "void"}
"""Functions that libcuda exports although no header declares them, with their parameters."""
_SUFFIX = re.compile(r"^(cu\w+?)(?:_v(\d+))?(_ptds|_ptsz)?$")


class HeaderError(ValueError):
    """A header is missing, or its content is unexpected. The message names the header."""


@dataclass(frozen=True)
class EntryPoint:
    """Entry point of the driver: one symbol of libcuda."""

    symbol: str
    """The exported symbol."""
    name: str
    """Name for cuGetProcAddress: the symbol without version and stream suffix."""
    since: int
    """CUDA version since which cuGetProcAddress returns this form: 11020 is 11.2. 0: no header shows it."""
    parameters: str
    """Parameters as C text, without the parentheses."""
    headers: tuple[int, ...]
    """Releases that declare it, among those read, in ascending order."""

    @property
    def per_thread(self) -> str:
        """`ptds` or `ptsz` for the form that takes the per-thread default stream, else empty."""
        return self.symbol[-4:] if self.symbol.endswith(("_ptds", "_ptsz")) else ""


@dataclass(frozen=True)
class _Form:
    since: int
    per_thread: str
    parameters: str


@dataclass(frozen=True)
class Header:
    """Declarations of one release's headers."""

    release: int
    """CUDA_VERSION: 11080 is 11.8."""
    functions: dict[str, str]
    """Parameters by symbol."""
    forms: dict[str, tuple[_Form, ...]]
    """By function name: its forms in cudaTypedefs.h, oldest first."""


def read(include: Path) -> Header:
    """Return the declarations of the headers in `include`."""
    plain = _text(include / "cuda.h")
    release = _RELEASE.search(plain)
    if release is None:
        raise HeaderError(f"{include / 'cuda.h'}: no CUDA_VERSION; is this NVIDIA's cuda.h?")
    interop = [name for name in _INTEROP if (include / f"{name}.h").is_file()]
    functions = dict(_WITHOUT_HEADER)
    for name in ("cuda", *interop):
        declared = _FUNCTION.findall(_preprocessed(include, f"{name}.h"))
        functions |= {symbol: _tidy(parameters) for symbol, parameters in declared}
    forms: dict[str, list[_Form]] = {}
    for typedefs in ("cudaTypedefs.h", *(f"{name}Typedefs.h" for name in _INTEROP)):
        if typedefs != "cudaTypedefs.h" and not (include / typedefs).is_file():
            continue
        for name, since, per_thread, parameters in _TYPEDEF.findall(_COMMENT.sub(" ", _text(include / typedefs))):
            if "HGPUNV" not in parameters:  # only on Windows
                forms.setdefault(name, []).append(_Form(int(since), per_thread.lstrip("_"), _tidy(parameters)))
    if not functions or not forms:
        raise HeaderError(
            f"{include}: found {len(functions)} functions and {len(forms)} typedefs; is this NVIDIA's cuda.h?"
        )
    ordered = {name: tuple(sorted(found, key=lambda form: form.since)) for name, found in forms.items()}
    return Header(int(release[1]), functions, ordered)


def union(headers: Sequence[Header]) -> list[EntryPoint]:
    """Return the entry points of all releases, sorted by symbol. If releases declare different parameters, the newest
    applies."""
    found: dict[str, EntryPoint] = {}
    for header in sorted(headers, key=lambda header: header.release):
        for entry in _entries(header):
            known = found.get(entry.symbol)
            if known is not None:
                entry = replace(entry, since=entry.since or known.since, headers=(*known.headers, *entry.headers))
            found[entry.symbol] = entry
    return sorted(found.values(), key=lambda entry: entry.symbol)


def _entries(header: Header) -> list[EntryPoint]:
    parameters = dict(header.functions)
    since: dict[str, int] = {}
    symbols: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for symbol in header.functions:
        name, version, per_thread = _split(symbol)
        symbols.setdefault((name, per_thread), []).append((version, symbol))
    for name, forms in header.forms.items():
        for per_thread in {form.per_thread for form in forms}:
            wanted = [form for form in forms if form.per_thread == per_thread]
            declared = [symbol for _, symbol in sorted(symbols.get((name, per_thread), []))]
            if not declared:  # cuda.h no longer declares it, but the driver has it
                declared = [f"{name}_{per_thread}" if per_thread else name]
                parameters[declared[0]] = wanted[-1].parameters
            since.update((symbol, form.since) for symbol, form in _pair(declared, wanted, parameters))
    return [
        EntryPoint(symbol, _split(symbol)[0], since.get(symbol, 0), text, (header.release,))
        for symbol, text in parameters.items()
    ]


def _pair(symbols: list[str], forms: list[_Form], parameters: dict[str, str]) -> Iterable[tuple[str, _Form]]:
    """Return (symbol, its form in cudaTypedefs.h). Lists of equal length are paired in ascending order of versions.
    Otherwise a symbol is paired with the only form that has the same parameters.
    """
    if len(symbols) == len(forms):
        return zip(symbols, forms, strict=True)
    paired = []
    for symbol in symbols:
        same = [form for form in forms if _types(form.parameters) == _types(parameters[symbol])]
        if len(same) == 1:
            paired.append((symbol, same[0]))
    return paired


def _types(parameters: str) -> str:
    """Return the parameters without their names and without the version suffixes of their types, for comparisons."""
    kept = (re.sub(r"\s*\w+(\[\])?$", "", part) if " " in part else part for part in parameters.split(", "))
    return re.sub(r"\s|_v\d+\b", "", ", ".join(kept))


def _split(symbol: str) -> tuple[str, int, str]:
    match = _SUFFIX.match(symbol)
    assert match is not None, symbol
    return match[1], int(match[2] or 1), (match[3] or "").lstrip("_")


def _tidy(parameters: str) -> str:
    text = " ".join(parameters.replace("CUDAAPI", " ").split())
    text = re.sub(r"\b\w+\b", lambda word: _PLAIN.get(word[0], word[0]), text)
    text = re.sub(r"\s*,\s*", ", ", text)
    text = re.sub(r"\*\s+(?=\*)", "*", text)
    return re.sub(r"\s*(\*+)\s*(?=\w)", r" \1", text).strip() or "void"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise HeaderError(f"{path}: {error.strerror}; it comes with the wheel nvidia-cuda-runtime") from error


def _preprocessed(include: Path, name: str) -> str:
    """Return a header as the preprocessor outputs it. A macro keeps cuda.h from renaming functions, so each form has
    its own name."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    with tempfile.TemporaryDirectory() as empty:
        for foreign in _FOREIGN:
            (Path(empty) / foreign).parent.mkdir(exist_ok=True)
            (Path(empty) / foreign).touch()
        flags = ["-E", "-P", "-D__CUDA_API_VERSION_INTERNAL", f"-I{include}", f"-I{empty}"]
        command = [*compiler, *flags, str(include / name)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode != 0:
        raise HeaderError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
