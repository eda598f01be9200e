"""Takes device memory by CuPy's pool until it is refused, and says where that was."""

from __future__ import annotations

import cupy
from conversation import Answer, by_hand


class Memory:
    """What was taken stays taken until `clear`."""

    def __init__(self) -> None:
        self._held: list[object] = []
        cupy.zeros(1)

    def fill(self, *, chunk: int, most: int) -> Answer:
        """Allocates `chunk` bytes at a time, at most `most` in all."""
        taken, stopped = 0, "nothing stopped it"
        while taken < most:
            try:
                self._held.append(cupy.empty(chunk, dtype=cupy.uint8))
            except Exception as error:
                stopped = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                break
            taken += chunk
        free, total = cupy.cuda.runtime.memGetInfo()
        return {"taken": taken, "stopped": stopped, "free": free, "total": total}

    def clear(self) -> Answer:
        """Gives all of it back."""
        self._held.clear()
        cupy.get_default_memory_pool().free_all_blocks()
        return {}


def main() -> None:
    memory = Memory()
    by_hand({"fill": memory.fill, "clear": memory.clear}, None)


if __name__ == "__main__":
    main()
