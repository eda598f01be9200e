"""Threads that mix streams, copies, graphs, captures and allocations with PyTorch, and check every result.

Each thread has two streams and a graph of its own, and chooses at random: products, copies from and to pinned memory on
a second stream, replays and captures of graphs, allocations, work on the default stream. It waits for results in one of
the ways of real programs. All numbers are small integers, so that every result is exact. Each choice and its work are a
step.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections.abc import Callable

import torch
from conversation import Answer, by_hand

THREADS = 3
SIDE = 512
MOST_BYTES = 256 << 20
_NAMED = 5
_WHOLE_DEVICE = threading.Lock()
"""Lock for a capture, or for a wait for the whole device, because CUDA forbids such a wait during a capture."""


class Worker:
    """Streams, graph and numbers of one thread. `seed` decides the order of its steps."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._main, self._beside = torch.cuda.Stream(), torch.cuda.Stream()
        self._host = torch.arange(1 << 20, dtype=torch.int32).pin_memory()
        self._back = torch.empty_like(self._host).pin_memory()
        with torch.cuda.stream(self._main):
            self._a = torch.randint(0, 3, (SIDE, SIDE), device="cuda").float()
            self._b = torch.randint(0, 3, (SIDE, SIDE), device="cuda").float()
            self._counter = torch.zeros(1, device="cuda", dtype=torch.int64)
        self._main.synchronize()
        self._product = self._a.double().cpu() @ self._b.double().cpu()
        self._counted = 0
        self._graph = self._captured()
        self._kinds: dict[str, Callable[[], bool]] = {
            "product": self._multiply,
            "copies": self._copy,
            "replays": self._replay,
            "capture": self._capture,
            "memory": self._allocate,
            "default stream": self._on_the_default_stream,
        }

    def step(self) -> tuple[str, bool]:
        """Do one step. Return its name, and whether its result is right."""
        kind = self._random.choice(list(self._kinds))
        with torch.cuda.stream(self._main):
            return kind, self._kinds[kind]()

    def _multiply(self) -> bool:
        out = self._a
        for _ in range(self._random.randint(1, 20)):
            out = self._a @ self._b
        self._wait()
        return bool(torch.equal(out.double().cpu(), self._product))

    def _copy(self) -> bool:
        """Copy numbers to the device on the second stream, add a number, and copy them back. Both copies are
        asynchronous."""
        number = self._random.randint(1, 1000)
        with torch.cuda.stream(self._beside):
            there = self._host.to("cuda", non_blocking=True)
            arrived = self._beside.record_event()
        self._main.wait_event(arrived)
        there.record_stream(self._main)
        there += number
        self._back.copy_(there, non_blocking=True)
        self._wait()
        return bool((self._back == self._host + number).all())

    def _replay(self) -> bool:
        for _ in range(self._random.randint(1, 50)):
            self._graph.replay()
            self._counted += 1
        self._wait()
        return int(self._counter.item()) == self._counted

    def _capture(self) -> bool:
        """Replace the thread's graph by a newly captured one, while other threads launch."""
        self._graph = self._captured()
        return self._replay()

    def _captured(self) -> torch.cuda.CUDAGraph:
        self._main.synchronize()
        graph = torch.cuda.CUDAGraph()
        with _WHOLE_DEVICE, torch.cuda.graph(graph, stream=self._main, capture_error_mode="thread_local"):
            self._counter.add_(1)
        return graph

    def _allocate(self) -> bool:
        """Allocate a few pieces, and fill each with a different number. Refused pieces are left out."""
        pieces = []
        for number in range(self._random.randint(1, 6)):
            try:
                size = self._random.randint(1, MOST_BYTES)
                pieces.append((number, torch.full((size,), number, device="cuda", dtype=torch.uint8)))
            except torch.OutOfMemoryError:
                break
        right = all(int(piece.min()) == int(piece.max()) == number for number, piece in pieces)
        del pieces
        if self._random.random() < 0.1:
            with _WHOLE_DEVICE:
                torch.cuda.empty_cache()
        return right

    def _on_the_default_stream(self) -> bool:
        """Return whether work on the default stream gives the right result. That stream waits for the thread's own
        streams only by an event."""
        done = self._main.record_event()
        with torch.cuda.stream(torch.cuda.default_stream()):
            torch.cuda.current_stream().wait_event(done)
            total = int(self._a.sum(dtype=torch.float64).item())
        return total == int(self._a.double().cpu().sum())

    def _wait(self) -> None:
        way = self._random.randrange(4)
        if way == 0:
            self._main.synchronize()
        elif way == 1:
            event = torch.cuda.Event(blocking=True)
            event.record()
            event.synchronize()
        elif way == 2:
            event = self._main.record_event()
            while not event.query():
                time.sleep(0.0002)
        else:
            with _WHOLE_DEVICE:
                torch.cuda.synchronize()


class Mixed:
    """All threads of the program."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self._workers = [Worker(number) for number in range(THREADS)]
        for worker in self._workers:
            worker.step()

    def run(self, *, settle: float, seconds: float, tail: float = 0.0) -> Answer:
        """Return the steps per second, the results that were wrong or raised an exception, and the number of steps by
        kind."""
        until = time.monotonic() + settle + seconds + tail
        done: list[tuple[str, str]] = []

        def work(worker: Worker) -> None:
            while time.monotonic() < until:
                kind = ""
                try:
                    kind, right = worker.step()
                    done.append((kind, "" if right else f"{kind}: another result"))
                except Exception as error:
                    done.append((kind, f"{type(error).__name__}: {error}"[:300]))
                    return

        threads = [threading.Thread(target=work, args=(worker,)) for worker in self._workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wrong = [what for _, what in done if what]
        return {
            "rate": len(done) / (settle + seconds + tail),
            "steps": len(done),
            "wrong": len(wrong),
            "named": wrong[:_NAMED],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, help="run once and end")
    arguments = parser.parse_args()
    by_hand({"run": Mixed().run}, arguments.seconds)


if __name__ == "__main__":
    main()
