"""Allocates device memory from CuPy's pool until an allocation is refused, and reports the allocated size."""

from __future__ import annotations

import cupy
from conversation import Answer, by_hand
from filling import fill


class Memory:
    """Memory that stays allocated until `clear` is called."""

    def __init__(self) -> None:
        self._held: list[object] = []
        cupy.zeros(1)

    def fill(self, *, chunk: int, most: int) -> Answer:
        """Allocate pieces of `chunk` bytes until one is refused, or `most` bytes in all."""
        filled = fill(self._take, chunk=chunk, most=most)
        free, total = cupy.cuda.runtime.memGetInfo()
        return filled | {"free": free, "total": total}

    def _take(self, chunk: int) -> None:
        self._held.append(cupy.empty(chunk, dtype=cupy.uint8))

    def clear(self) -> Answer:
        """Free all allocated memory."""
        self._held.clear()
        cupy.get_default_memory_pool().free_all_blocks()
        return {}


def main() -> None:
    memory = Memory()
    by_hand({"fill": memory.fill, "clear": memory.clear}, None)


if __name__ == "__main__":
    main()
