"""Allocates device memory by JAX until an allocation is refused, and reports the allocated size. JAX's default, to
reserve three quarters of the GPU at its start, is off, as on any shared GPU."""

from __future__ import annotations

import os

from conversation import Answer, by_hand
from filling import fill


class Memory:
    """Memory that stays allocated until `clear` is called."""

    def __init__(self) -> None:
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        import jax

        self._jax = jax
        self._held: list[object] = []
        self._device = jax.devices("gpu")[0]

    def fill(self, *, chunk: int, most: int) -> Answer:
        """Allocate pieces of `chunk` bytes until one is refused, or `most` bytes in all."""
        with self._jax.default_device(self._device):
            return fill(self._take, chunk=chunk, most=most)

    def _take(self, chunk: int) -> None:
        self._held.append(self._jax.numpy.ones(chunk, dtype="uint8").block_until_ready())

    def clear(self) -> Answer:
        """Return all memory to JAX's pool."""
        self._held.clear()
        return {}


def main() -> None:
    memory = Memory()
    by_hand({"fill": memory.fill, "clear": memory.clear}, None)


if __name__ == "__main__":
    main()
