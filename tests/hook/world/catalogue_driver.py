"""Driver that consists of entry points only, for tests of symbol resolution.

Its libcuda.so.1 exports every symbol of the table up to a CUDA version; the functions do nothing. cuGetProcAddress
selects by name, version and stream flags. The driver may also be a stub, or a library of another driver, whose cuInit
fails.
"""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

from table.render import Row, read_table

NOT_SUPPORTED = 801
PRIVATE = "catalogue_private"
"""Function that cuGetProcAddress returns for the names in `private`. No symbol of the table has its address."""

_SOURCE = """\
#include <stddef.h>
#include <string.h>
#define EXPORT __attribute__((visibility("default")))
EXPORT int %(private)s(void) { return 801; }
%(functions)s
EXPORT int cuInit(unsigned flags) { return flags == 0 ? %(init)d : 1; }
EXPORT int cuDeviceGetCount(int *count) { *count = 0; return %(init)d; }
EXPORT int cuDriverGetVersion(int *version) { *version = %(version)d; return 0; }
EXPORT int cuGetExportTable(const void **table, const void *id) { (void)id; *table = NULL; return 500; }
EXPORT int cuGetProcAddress(const char *, void **, int, unsigned long long);
EXPORT int cuGetProcAddress_v2(const char *, void **, int, unsigned long long, int *);
static const struct { const char *name; int since, per_thread; void *function; } forms[] = {
%(forms)s
};
int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, int *status) {
    int found = 1; /* CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND */
    if (name == NULL || function == NULL || *name == 0 || version > %(version)d)
        return 1;
    *function = NULL;
    for (int per_thread = flags & 2 ? 1 : 0; per_thread >= 0 && *function == NULL; per_thread--)
        for (size_t i = 0; i < sizeof forms / sizeof *forms; i++)
            if (strcmp(forms[i].name, name) == 0 && forms[i].per_thread == per_thread) {
                if (forms[i].since <= version)
                    *function = forms[i].function; /* ascending: the newest that is old enough */
                else if (found == 1)
                    found = 2; /* CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT */
            }
    if (*function != NULL)
        found = 0;
    if (status != NULL)
        *status = found;
    return found == 0 || status != NULL ? 0 : 500;
}
int cuGetProcAddress(const char *name, void **function, int version, unsigned long long flags) {
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
"""
_OWN = {
    "cuInit",
    "cuDeviceGetCount",
    "cuDriverGetVersion",
    "cuGetExportTable",
    "cuGetProcAddress",
    "cuGetProcAddress_v2",
}


@cache
def _by_name() -> dict[str, list[Row]]:
    rows: dict[str, list[Row]] = {}
    for row in read_table():
        rows.setdefault(row.name, []).append(row)
    return rows


def exported(version: int) -> list[Row]:
    """Return the rows of the table that a driver of this CUDA version has."""
    return [row for row in read_table() if row.since <= version]


def expected_symbol(name: str, version: int, per_thread: bool) -> str | None:
    """Return the symbol that cuGetProcAddress must return by the table; None: not found."""
    rows = [row for row in _by_name().get(name, ()) if row.since <= version]
    streams = [row for row in rows if row.symbol.endswith(("_ptds", "_ptsz"))]
    chosen = streams if per_thread and streams else [row for row in rows if row not in streams]
    return max(chosen, key=lambda row: row.since).symbol if chosen else None


def build(folder: Path, version: int, *, private: tuple[str, ...] = (), init: int = 0) -> Path:
    """Build libcuda.so.1 in the folder, and return the folder.

    Args:
        folder: Folder, which is created.
        version: CUDA version.
        private: Names for which an unknown pointer is returned.
        init: Result of cuInit.
    """
    folder.mkdir(parents=True)
    rows = sorted(exported(version), key=lambda row: row.since)
    functions = "\n".join(f"EXPORT int {row.symbol}(void) {{ return 801; }}" for row in rows if row.symbol not in _OWN)
    forms = "\n".join(
        f'    {{"{row.name}", {row.since}, {int(row.symbol.endswith(("_ptds", "_ptsz")))}, '
        f"(void *){PRIVATE if row.name in private else row.symbol}}},"
        for row in rows
    )
    source = folder / "libcuda.c"
    values = {"private": PRIVATE, "functions": functions, "forms": forms, "version": version, "init": init}
    source.write_text(_SOURCE % values, encoding="utf-8")
    command = ["cc", "-O0", "-fPIC", "-fvisibility=hidden", "-shared", "-Wl,-Bsymbolic", "-Wl,-soname,libcuda.so.1"]
    target = folder / "libcuda.so.1"
    subprocess.run([*command, "-o", str(target), str(source)], check=True, timeout=60)
    return folder
