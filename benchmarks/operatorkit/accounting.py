"""Accounts of the operator's processor time, by part: the operator with some of its functions timed.

    python -m operatorkit.accounting --out FILE     in place of sharepod-operator

Guarantees:
- A synchronous function is timed by the thread's processor time, less the time of timed functions that it calls.
- Each step of the event loop counts for the task that it belongs to, so that the parts add up to the whole.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import functools
import importlib
import json
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from results import Row

from operatorkit.client import Door, client
from operatorkit.planes import MemoryPlane
from operatorkit.process import cpu_of

CONTROLLER = "sharepod.controller"
PARTS: dict[str, tuple[str, ...]] = {
    "read SharePods into facts": (f"{CONTROLLER}.state.cluster_state:sharepod_facts",),
    "read GPUNodes into facts": (f"{CONTROLLER}.state.cluster_state:gpunode_facts",),
    "read Pods into facts": (f"{CONTROLLER}.state.cluster_state:pod_facts",),
    "count other Pods": (f"{CONTROLLER}.state.other_pods:other_pod",),
    "load a ledger into placement": (f"{CONTROLLER}.state.ledgers:Ledgers.load",),
    "cluster state, other": (
        f"{CONTROLLER}.state.cluster_state:ClusterState.put_sharepod",
        f"{CONTROLLER}.state.cluster_state:ClusterState.put_pod",
        f"{CONTROLLER}.state.cluster_state:ClusterState.put_gpunode",
    ),
    "decide a place": (f"{CONTROLLER}.placing.loop:PlacementLoop._place",),
    "compose the ledger's patch": (f"{CONTROLLER}.placing.ledger_writer:patch",),
    "take a snapshot": (f"{CONTROLLER}.tenants.snapshots:Snapshots.take",),
    "decide the next step": (f"{CONTROLLER}.decisions.lifecycle:decide",),
    "build the Pod": (f"{CONTROLLER}.tenants.pods:build_pod",),
    "compose the status": (f"{CONTROLLER}.decisions.status:compose",),
    "compare the status": (f"{CONTROLLER}.decisions.status:difference",),
    "announce": (f"{CONTROLLER}.tenants.status_writer:announcements",),
    "record Events": (
        f"{CONTROLLER}.apiserver.events:Events._record",
        f"{CONTROLLER}.apiserver.events:Events._manifest",
    ),
    "parse JSON": ("orjson:loads", "json:loads"),
    "write JSON": ("orjson:dumps", "json:dumps"),
}
"""Functions whose time is measured, by part of the account."""
TASKS = (
    ("tenant ", "tenant workers: calls and the rest"),
    ("ledger", "ledger workers: calls and the rest"),
    ("node ", "node workers"),
    ("events", "Events: calls and the rest"),
    ("placement", "placement loop, other"),
    ("watch of ", "watches"),
    ("tick", "tick"),
    ("lease", "own Lease"),
)
"""Beginnings of the names of the operator's tasks, and the part of the account to which each task belongs."""
KOPF = "Kopf: its tasks"
"""Part of the account for Kopf's tasks, including waits on queues and events for which only Kopf creates tasks."""
OTHER_TASKS = "other tasks"
SOCKETS = "sockets: read, write, HTTP parser"
LOOP = "event loop, other"
_CALLS = "calls of "
_RATE = 40.0
"""SharePods created a second: well below the operator's rate, so that none waits."""
_COUNT = 600
_WARM = 50
"""SharePods before the measurement: they cause the imports, fill the caches and open the connections."""


def ablation(nodes: int) -> list[Row]:
    """Measure the operator with accounts. Return rows of its processor time in ms per SharePod, by part."""
    rows: list[Row] = []
    used, parts = asyncio.run(_one(nodes))
    counted = sum(value for part, value in parts.items() if not part.startswith(_CALLS))
    found = {"processor time of the process": used, "sum of the parts": counted}
    found |= {part: value for part, value in parts.items() if not part.startswith(_CALLS)}
    for part, value in sorted(found.items(), key=lambda item: -item[1]):
        times = f" ({parts[_CALLS + part]:.1f} times)" if _CALLS + part in parts else ""
        rows.append(Row(f"all parts: {part}{times}", "operator_cpu", "ms per SharePod", value))
        print(f"{rows[-1].case}: {value:.3f}", flush=True)
    return rows


async def _one(nodes: int) -> tuple[float, dict[str, float]]:
    """Return (ms of processor time that the operator uses for one SharePod until it runs, the same time by part)."""
    with MemoryPlane(nodes) as plane:
        out = plane.kubeconfig.parent / "accounts.json"
        arguments = ["--out", str(out)]
        plane.start_operator([sys.executable, "-m", "operatorkit.accounting", *arguments])
        async with client(plane.kubeconfig, "warm", Door.SHAREPODS) as load:
            await load.in_flight(8, count=_WARM)
            await load.all_bound()
        await asyncio.sleep(3)
        plane.signal(signal.SIGUSR1)
        begun = cpu_of(plane.pid)
        async with client(plane.kubeconfig, "counted", Door.SHAREPODS) as load:
            await load.at_rate(_RATE, _COUNT)
        await asyncio.sleep(3)
        used = (cpu_of(plane.pid) - begun) / _COUNT * 1000
        plane.stop_operator()
        parts = json.loads(out.read_text())
        return used, {name: value / _COUNT for name, value in parts.items()}


class Accounts:
    """Processor time in ms by part, and number of calls, since the last `SIGUSR1`. They are written to a file when the
    operator ends."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._inner: list[float] = []
        signal.signal(signal.SIGUSR1, lambda *_: self._spent.clear())
        atexit.register(self._write)

    def _write(self) -> None:
        self._out.write_text(json.dumps(dict(self._spent)))

    def time(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `function` and adds its time to a part."""

        @functools.wraps(function)
        def timed(*args: Any, **named: Any) -> Any:
            begun = time.thread_time()
            self._inner.append(0.0)
            try:
                return function(*args, **named)
            finally:
                took = time.thread_time() - begun
                self._spent[part] += (took - self._inner.pop()) * 1000
                self._spent[_CALLS + part] += 1
                if self._inner:
                    self._inner[-1] += took

        return timed

    def step(self, run: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return a replacement of `Handle._run` that adds the time of each step to the part of the step's task."""

        def timed(handle: Any) -> None:
            begun = time.thread_time()
            self._inner.append(0.0)
            try:
                run(handle)
            finally:
                took = time.thread_time() - begun
                self._spent[_part_of(handle)] += (took - self._inner.pop()) * 1000

        return timed


def _part_of(handle: Any) -> str:
    owner = getattr(handle._callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        name = owner.get_name()
        for beginning, part in TASKS:
            if name.startswith(beginning):
                return part
        file = getattr(getattr(owner.get_coro(), "cr_code", None), "co_filename", "")
        return KOPF if "/kopf/" in file or "/asyncio/" in file else OTHER_TASKS
    return SOCKETS if isinstance(owner, asyncio.BaseTransport) else LOOP


def _replace(where: str, new: Callable[[Any], Any]) -> None:
    """Replace the function `module:Class.name` by `new(function)`."""
    module, _, path = where.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    setattr(owner, name, new(getattr(owner, name)))


def _timed() -> Iterator[tuple[str, str]]:
    for part, functions in PARTS.items():
        for function in functions:
            yield part, function


def main() -> None:
    """Run the operator with accounts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    accounts = Accounts(options.out)
    program = importlib.import_module(f"{CONTROLLER}.main")
    for part, function in _timed():
        _replace(function, functools.partial(accounts.time, part))
    _replace("asyncio.events:Handle._run", accounts.step)
    # the standard event loop, because the steps of uvloop cannot be timed
    _replace("uvloop:new_event_loop", lambda _: asyncio.new_event_loop)
    sys.argv = ["sharepod-operator"]
    with suppress(SystemExit):
        program.main()


if __name__ == "__main__":
    main()
