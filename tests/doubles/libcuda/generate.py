"""Generates the parts of the libcuda double that follow from NVIDIA's headers alone: `generate.py DIRECTORY [VERSION]`.

The headers cuda.h and cudaTypedefs.h are read through the compiler's preprocessor, so every form of every function is
found under the name of its symbol. (The headers of CUDA 13 still contain all forms of 11.8 and 12.) Files written into
DIRECTORY:

    per_thread.c   every _ptds and _ptsz form that the header declares: it calls the plain form, with the thread's own
                   default stream as the default stream
    stubs.c a weak definition of every symbol: returns CUDA_ERROR_NOT_SUPPORTED. A function in a C file here replaces it
    entries.c the exported functions: each counts the call, takes the driver's lock, and calls inside_SYMBOL inside.map
    for objcopy: renames the functions of the C files and stubs.c to inside_SYMBOL names.c        for cuGetProcAddress:
    each name, the CUDA version in which a form appeared, and its symbol; and the names of errors exports.map the
    exported symbols: those up to VERSION of CUDA (11080, ...), by default all of the headers

tests/doubles/Makefile runs it. CC is the compiler, CUDA_INCLUDE the headers' directory.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

PER_THREAD = ("_ptds", "_ptsz")
# Functions of cudaGL.h and cudaVDPAU.h that create a context, with the CUDA version of each. VDPAU's types are replaced
# by types of C.
_CONTEXT = "CUcontext *context, unsigned int flags, CUdevice device"
BESIDE = {
    "cuGLCtxCreate": (_CONTEXT, 2000, 3020),
    "cuVDPAUCtxCreate": (f"{_CONTEXT}, unsigned int vdpau_device, void *functions", 3010, 3020),
}
# Pattern of calls that use only state of the thread, or constants. They do not take the driver's lock.
LOCKLESS = re.compile(
    r"cuCtx(GetCurrent|PushCurrent|PopCurrent|SetCurrent|GetDevice|GetApiVersion)|cuThreadExchangeStreamCaptureMode"
    r"|cuGetProcAddress|cuGetError|cuDriverGetVersion|cuDeviceGet(Count)?(_v\d)?$"
)
# Pattern of calls that succeed in a context with a fault.
UNFAULTED = re.compile(
    r"cuInit|cuDriver|cuGetError|cuGetProcAddress|cuDevice|cuThreadExchangeStreamCaptureMode"
    r"|cuCtx(Get|Set|Push|Pop|Create|Destroy|Attach|Detach)|cuGLCtxCreate|cuVDPAUCtxCreate|cuGreenCtx"
)
# Pattern of calls that report a fault of the work for which they wait or whose state they query.
FINDING = re.compile(r"cu\w+(Synchronize|Query)(_ptsz)?$")
# Symbols for which the number of the form and the order of CUDA versions differ.
SYMBOLS = {
    ("cuGraphInstantiate", 12000): "cuGraphInstantiateWithFlags",
}
_FUNCTION = re.compile(r"\bCUresult\s+(cu\w+)\s*\(([^;{}]*)\)\s*;")
_TYPEDEF = re.compile(r"\(\s*\*\s*PFN_(cu\w+?)_v(\d+)(_ptds|_ptsz)?\s*\)")
_ERROR = re.compile(r"\b(CUDA_(?:SUCCESS|ERROR_\w+))\s*=\s*(\d+)")
_FORM = re.compile(r"(cu\w+?)(?:_v(\d+))?(_ptds|_ptsz)?$")


@dataclass(frozen=True)
class Headers:
    """Entry points and errors of the headers.

    Args:
        functions: By symbol: its parameters as the header writes them.
        versions: By (name, per-thread suffix or ""): the CUDA versions in which a form appeared.
        errors: By name: the value.
    """

    functions: dict[str, str]
    errors: dict[str, int]
    versions: dict[tuple[str, str], list[int]]


def preprocessed(include: Path, header: str, compiler: str = "cc") -> str:
    """Return the header as the compiler's preprocessor outputs it, including forms that only old programs use."""
    command = [
        *shlex.split(compiler), "-E", "-P", "-D__CUDA_API_VERSION_INTERNAL", "-I", str(include), str(include / header),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode != 0:
        sys.exit(f"{shlex.join(command)} failed:\n{done.stderr}")
    return done.stdout


def read_headers(include: Path, compiler: str = "cc") -> Headers:
    text = preprocessed(include, "cuda.h", compiler)
    functions = {symbol: " ".join(parameters.split()) for symbol, parameters in _FUNCTION.findall(text)}
    functions |= {name + form: text for name, (text, *_) in BESIDE.items() for form in ("", "_v2")}
    errors = {name: int(value) for name, value in _ERROR.findall(text)}
    versions: dict[tuple[str, str], set[int]] = defaultdict(set)
    for name, version, suffix in _TYPEDEF.findall(preprocessed(include, "cudaTypedefs.h", compiler)):
        versions[name, suffix].add(int(version))
    for name, (_, *since) in BESIDE.items():
        versions[name, ""].update(since)
    return Headers(functions, errors, {key: sorted(found) for key, found in versions.items()})


def forms(symbols: set[str], versions: dict[tuple[str, str], list[int]]) -> dict[tuple[str, int, str], str]:
    """Return the symbol of each (name, CUDA version, per-thread suffix): the n-th newest symbol of a name belongs to
    its n-th newest version."""
    numbered: dict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)
    for symbol in symbols:
        match = _FORM.match(symbol)
        assert match is not None
        numbered[match[1], match[3] or ""].append((int(match[2] or 1), symbol))
    answer = {}
    for (name, suffix), since in versions.items():
        exact = name.rpartition("_v")[0] if re.search(r"_v\d+$", name) else ""
        candidates = [(1, name + suffix)] if exact else sorted(numbered[name, suffix])
        for version, (_, symbol) in zip(reversed(since), reversed(candidates), strict=False):
            answer[name, version, suffix] = symbol
    for (name, version), symbol in SYMBOLS.items():
        answer[name, version, ""] = symbol
    return answer


def _argument(parameter: str) -> str:
    match = re.search(r"(\w+)\s*(?:\[\w*\])?$", parameter)
    assert match is not None, parameter
    return match[1]


def per_thread(functions: dict[str, str]) -> str:
    out = ['/* The forms that take the default stream to be the thread\'s own. */\n#include "device/fake.h"\n']
    for symbol, parameters in sorted(functions.items()):
        if not symbol.endswith(PER_THREAD):
            continue
        arguments = ", ".join(_argument(parameter) for parameter in parameters.split(","))
        out.append(
            f"EXPORT CUresult {symbol}({parameters}) {{\n"
            "    bool before = fake_per_thread;\n"
            "    fake_per_thread = true;\n"
            f"    CUresult result = {symbol[:-5]}({arguments});\n"
            "    fake_per_thread = before;\n"
            "    return result;\n"
            "}\n"
        )
    return "\n".join(out)


def entries(functions: dict[str, str]) -> str:
    out = ['/* The ways into the driver. */\n#include "device/fake.h"\n']
    for symbol, parameters in sorted(functions.items()):
        arguments = "" if parameters == "void" else ", ".join(_argument(part) for part in parameters.split(","))
        locks = "false" if LOCKLESS.match(symbol) else "true"
        refuses = (
            "" if UNFAULTED.match(symbol) else "    if (fake_fault() != CUDA_SUCCESS)\n        return fake_fault();\n"
        )
        out.append(
            f"CUresult inside_{symbol}({parameters});\n"
            f"EXPORT CUresult {symbol}({parameters}) {{\n"
            f"    fake_entered({locks});\n"
            f"{refuses}"
            f"    return {'fake_found' if FINDING.match(symbol) else ''}(inside_{symbol}({arguments}));\n"
            "}\n"
        )
    return "\n".join(out)


def stubs(symbols: set[str], declared: set[str]) -> str:
    out = [
        "/* Functions without behaviour. No cuda.h: the prototypes do not matter to what only fails. */",
        "int fake_unsupported(const char *symbol);",
        '#define STUB(symbol) __attribute__((weak, visibility("default"))) int symbol(void); \\',
        "    int symbol(void) { return fake_unsupported(#symbol); }",
    ]
    out += [f"STUB({symbol})" for symbol in sorted(symbols) if not (symbol.endswith(PER_THREAD) and symbol in declared)]
    return "\n".join(out) + "\n"


def _said(error: str) -> str:
    """Return the text for cuGetErrorString. It is a text of this project, because the driver's texts belong to
    NVIDIA."""
    return "no error" if error == "CUDA_SUCCESS" else error.removeprefix("CUDA_ERROR_").lower().replace("_", " ")


def names(table: dict[tuple[str, int, str], str], symbols: set[str], errors: dict[str, int]) -> str:
    rows: dict[str, list[tuple[int, str, str]]] = defaultdict(list)
    for (name, version, suffix), symbol in table.items():
        rows[name].append((version, suffix, symbol))
    out = [
        "/* Every name that cuGetProcAddress knows: newer forms of a name stand before older ones. */",
        '#include "device/names.h"',
        *(f"extern int {symbol}(void);" for symbol in sorted(symbols)),
        "const struct fake_name fake_names[] = {",
    ]
    for name in sorted(rows):
        for version, suffix, symbol in sorted(rows[name], key=lambda row: (-row[0], row[1])):
            out.append(f'    {{"{name}", {version}, {"true" if suffix else "false"}, (void *){symbol}}},')
    out.append("};\nconst unsigned fake_name_count = sizeof fake_names / sizeof *fake_names;")
    out.append("const struct fake_error fake_errors[] = {")
    out += [f'    {{{value}, "{name}", "{_said(name)}"}},' for name, value in errors.items()]
    out.append("};\nconst unsigned fake_error_count = sizeof fake_errors / sizeof *fake_errors;")
    return "\n".join(out) + "\n"


def main(directory: Path, version: int | None) -> None:
    include = os.environ.get("CUDA_INCLUDE")
    if not include:
        sys.exit("CUDA_INCLUDE must name the directory of cuda.h; shim/cuda_headers.py prints it")
    headers = read_headers(Path(include), os.environ.get("CC", "cc"))
    symbols = set(headers.functions)
    table = forms(symbols, headers.versions)
    appeared: dict[str, int] = {}
    for (_, since, _), symbol in table.items():
        appeared[symbol] = min(since, appeared.get(symbol, since))
    here = {symbol for symbol in symbols if version is None or appeared.get(symbol, 0) <= version}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "per_thread.c").write_text(per_thread(headers.functions))
    (directory / "entries.c").write_text(entries(headers.functions))
    (directory / "inside.map").write_text("".join(f"{symbol} inside_{symbol}\n" for symbol in sorted(symbols)))
    (directory / "stubs.c").write_text(stubs(symbols, set(headers.functions)))
    (directory / "names.c").write_text(names({k: v for k, v in table.items() if v in here}, here, headers.errors))
    exported = "".join(f"        {symbol};\n" for symbol in sorted(here))
    (directory / "exports.map").write_text(
        "{\n    global:\n        fake_*;\n" + exported + "    local:\n        *;\n};\n"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
