"""The hook's table of the queues that a thread remembers (shim/src/time/gate/remembered.c), compiled without the rest
of the hook.
"""

from __future__ import annotations

import functools
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import cffi

ROOT = Path(__file__).resolve().parents[2]
OWN_BITS = 5
TABLE_BITS = 8
# Number of the lowest hash bit that selects a place. The hook uses the bits from 32 on as a byte offset, and a place
# has 16 bytes.
PLACE_BITS = 32 + 4
FACTOR = 0x9E3779B97F4A7C15
_WORD = 1 << 64

_INTERFACE = """
void *made(void);
void *found(void *table, uint64_t key);
void added(void *table, uint64_t key, void *queue);
void removed(void *table, uint64_t key, void *queue);
_Bool lost(void *table);
extern _Bool refuses;
"""
_AROUND = """
#include <stdlib.h>
#include <string.h>
#include "time/gate/remembered.c"
_Bool refuses;
void *sys_map(size_t bytes) { return refuses ? NULL : calloc(1, bytes); }
void sys_unmap(void *memory, size_t bytes) { (void)bytes; free(memory); }
void *made(void) {
    void *table = aligned_alloc(64, sizeof(struct remembered)); /* a multiple of 64 */
    return table == NULL ? NULL : memset(table, 0, sizeof(struct remembered));
}
void *found(void *table, uint64_t key) { return remembered_find(table, key); }
void added(void *table, uint64_t key, void *queue) { remembered_add(table, key, queue); }
void removed(void *table, uint64_t key, void *queue) { remembered_remove(table, key, queue); }
_Bool lost(void *table) { return ((struct remembered *)table)->lost; }
"""


@functools.cache
def library() -> tuple[Any, Any]:
    """Compile the table with sanitizers of undefined behaviour and bounds; return (ffi, functions)."""
    ffi = cffi.FFI()
    ffi.cdef(_INTERFACE)
    with tempfile.TemporaryDirectory(prefix="sharepod-remembered-") as folder:
        source, target = Path(folder, "around.c"), Path(folder, "around.so")
        source.write_text(_AROUND)
        command = ["cc", "-std=c11", "-D_GNU_SOURCE", "-O1", "-fPIC", "-shared", "-fsanitize=undefined"]
        command += ["-fno-sanitize-recover=all", f"-I{ROOT / 'shim/src'}", "-o", str(target), str(source)]
        subprocess.run(command, check=True, timeout=60)
        return ffi, ffi.dlopen(str(target))


def key_at(place: int, bits: int, number: int) -> int:
    """Return the `number`-th of the keys whose first place is `place` in a table of 2 to the power of `bits` places."""
    hashed = (number << (PLACE_BITS + bits) | place << PLACE_BITS) + number
    return hashed * pow(FACTOR, -1, _WORD) % _WORD


class Table:
    """Table of one thread, empty at first. Numbers represent queues."""

    def __init__(self) -> None:
        self.ffi, self._functions = library()
        self._functions.refuses = False
        self._table = self._functions.made()

    def refuse_memory(self, refuse: bool) -> None:
        self._functions.refuses = refuse

    def add(self, key: int, queue: int) -> None:
        self._functions.added(self._table, key, self.ffi.cast("void *", queue))

    def remove(self, key: int, queue: int) -> None:
        self._functions.removed(self._table, key, self.ffi.cast("void *", queue))

    def find(self, key: int) -> int:
        """Return the queue of a key. 0 if there is none."""
        return int(self.ffi.cast("uintptr_t", self._functions.found(self._table, key)))

    @property
    def lost(self) -> bool:
        return bool(self._functions.lost(self._table))
