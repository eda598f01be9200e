"""Allocates device memory by one of PyTorch's allocators until it is refused, and reports the size.

--allocator native       cudaMalloc in segments, kept in PyTorch's cache
--allocator expandable   segments that grow, by virtual memory management
--allocator async        cudaMallocAsync and the driver's own pool
--allocator graphs       the private pools of CUDA graphs
"""

from __future__ import annotations

import argparse
import os

from conversation import Answer, by_hand
from filling import fill

SETTINGS = {
    "native": "",
    "expandable": "expandable_segments:True",
    "async": "backend:cudaMallocAsync",
    "graphs": "",
}


class Memory:
    """Memory that stays allocated until `clear` is called."""

    def __init__(self, allocator: str) -> None:
        import torch  # after the allocator has been chosen

        self._torch = torch
        self._graphs = allocator == "graphs"
        self._held: list[object] = []
        torch.cuda.init()
        torch.zeros(1, device="cuda")

    def fill(self, *, chunk: int, most: int) -> Answer:
        """Allocate pieces of `chunk` bytes until one is refused, or `most` bytes in all."""
        filled = fill(self._take, chunk=chunk, most=most)
        free, total = self._torch.cuda.mem_get_info()
        reserved = self._torch.cuda.memory_reserved()
        return filled | {"free": free, "total": total, "reserved": reserved}

    def _take(self, chunk: int) -> None:
        self._held.append(self._capture(chunk) if self._graphs else self._tensor(chunk))

    def reuse(self, *, chunk: int) -> Answer:
        """Free half of the memory into PyTorch's cache. Then allocate one piece of two thirds of that half. No cached
        piece is that large, so PyTorch must release its cache and allocate again. The piece is only two thirds, because
        growing segments release only whole pages of 20 MiB, and the first and last page of a freed piece of 64 MiB may
        still be in use."""
        if self._graphs:
            return {"reused": "does not apply"}
        del self._held[::2]
        wanted = max(1, len(self._held) * 2 // 3) * chunk
        try:
            self._held.append(self._tensor(wanted))
        except Exception as error:
            return {"reused": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        return {"reused": "yes"}

    def clear(self) -> Answer:
        """Free all allocated memory."""
        self._held.clear()
        self._torch.cuda.synchronize()
        self._torch.cuda.empty_cache()
        return {"reserved": self._torch.cuda.memory_reserved()}

    def _tensor(self, size: int) -> object:
        return self._torch.empty(size, device="cuda", dtype=self._torch.uint8)

    def _capture(self, size: int) -> object:
        """Return a graph whose private pool holds a tensor of this size."""
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph):
            kept = self._torch.ones(size, device="cuda", dtype=self._torch.uint8)
        graph.replay()
        self._torch.cuda.synchronize()
        return graph, kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--allocator", choices=SETTINGS, default="native")
    arguments = parser.parse_args()
    if SETTINGS[arguments.allocator]:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = SETTINGS[arguments.allocator]
    memory = Memory(arguments.allocator)
    by_hand({"fill": memory.fill, "reuse": memory.reuse, "clear": memory.clear}, None)


if __name__ == "__main__":
    main()
