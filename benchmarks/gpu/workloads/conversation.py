"""Protocol between a workload and the kit: one JSON object a line, commands on stdin, answers on stdout.

A workload prints `ready`, then executes and answers each command. It never outlives the kit: when standard input ends
it ends at once, even during a blocking driver call. Answers are lines that begin with `@ `; other output of a framework
is ignored.

By hand: `python3 workloads/NAME.py --seconds 5` does one `run` and prints its answer.
"""

from __future__ import annotations

import json
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

MARK = "@ "
Answer = dict[str, Any]


def answer_with(answer: Mapping[str, Any]) -> None:
    """Write an answer to standard output, without delay."""
    sys.stdout.write(MARK + json.dumps(answer) + "\n")
    sys.stdout.flush()


def serve(actions: Mapping[str, Callable[..., Answer]], **ready: Any) -> None:
    """Answer commands `{"do": NAME, ...}` by the result of `actions[NAME](...)`, until standard input ends. If an
    action raises an exception, the answer contains it as `error`, and the workload continues."""
    commands: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            commands.put(line)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    answer_with({"ready": True, "pid": os.getpid(), **ready})
    while True:
        command = json.loads(commands.get())
        action = command.pop("do")
        try:
            answer = actions[action](**command)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
        answer_with(answer)


def count(step: Callable[[], float], *, settle: float, seconds: float, tail: float = 0.0) -> Answer:
    """Call `step`, which returns the work finished since its previous call, repeatedly, and return the work counted.
    Work is counted from `settle` seconds on, for `seconds`. Then uncounted work continues for `tail` seconds, so that a
    measured neighbour keeps its competition."""
    begin = time.monotonic() + settle
    end = begin + seconds
    work = 0.0
    while True:
        done = step()
        now = time.monotonic()
        if begin < now <= end:
            work += done
        if now >= end + tail:
            break
    return {"work": work, "seconds": seconds, "rate": work / seconds}


def requests(serve_one: Callable[[], None], *, seconds: float, rate: float, seed: int) -> Answer:
    """Serve requests that arrive at random (Poisson, `rate` per second, drawn from `seed`), one after the other. A
    latency starts at the arrival: it includes the wait for earlier requests."""
    generator = random.Random(seed)
    begin = time.monotonic()
    arrival = begin
    latencies: list[float] = []
    while True:
        arrival += generator.expovariate(rate)
        if arrival > begin + seconds:
            break
        pause = arrival - time.monotonic()
        if pause > 0:
            time.sleep(pause)
        serve_one()
        latencies.append(time.monotonic() - arrival)
    if not latencies:
        return {"requests": 0}
    latencies.sort()

    def percentile(part: float) -> float:
        return latencies[min(len(latencies) - 1, int(part * len(latencies)))] * 1e3

    return {
        "requests": len(latencies),
        "p50_ms": percentile(0.50),
        "p90_ms": percentile(0.90),
        "p99_ms": percentile(0.99),
        "max_ms": latencies[-1] * 1e3,
        "latencies_ms": [round(latency * 1e3, 3) for latency in latencies],
    }


def by_hand(actions: Mapping[str, Callable[..., Answer]], seconds: float | None, **ready: Any) -> None:
    """Answer commands like `serve`. With `seconds`: make one measurement and print its answer."""
    if seconds is None:
        serve(actions, **ready)
    else:
        answer_with(actions["run"](settle=1.0, seconds=seconds))
