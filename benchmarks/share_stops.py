"""A tenant whose process is stopped and continued repeatedly, with an always busy neighbour; both request 0.5.

The process is stopped by SIGSTOP for `stopped_ms` after every `runs_ms`, as by a CPU quota or on a busy node. The
simulated GPU continues to run launched work while the process is stopped, as hardware does.
- `together`: the part of the GPU's time that both tenants got. `together_of_control`: the same, relative to a run
  without stops.
- `busy_share`: share of the tenant that is never stopped; `wait_p50` and `wait_p99` are its waits. `stopped_share`:
  share of the other tenant.
- `apart`: time of the never stopped tenant on its own GPU, while the other tenant is stopped as often on another GPU.
  It shows what machine and program allow. `together_of_apart`: `together` relative to `apart`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hook.world.agent_node import GPUS, Node, Program, running, tenant, wait_for
from hook.world.stopping import AHEAD, drawn, regular, stopping
from results import Row
from share_window import TOLD_S, wait_rows, waits_of, waits_since

SETTLE_S = 1.5
SEED = 16


@dataclass(frozen=True)
class Stops:
    """One case. `stopped_ms`, `runs_ms`: length of each stop, and of the time between two stops. `drawn`: True if the
    lengths are uniformly distributed around these values. `sync_every`: both programs wait for their work after this
    many launches; 0: they never wait."""

    stopped_ms: float
    runs_ms: float
    kernel_us: int = 1000
    drawn: bool = False
    sync_every: int = 16

    @property
    def name(self) -> str:
        """Return the name of the case."""
        lengths = "drawn, mean " if self.drawn else ""
        waits = f"waits every {self.sync_every}" if self.sync_every else "never waits"
        return f"stopped {lengths}{self.stopped_ms:g} ms, runs {self.runs_ms:g} ms, {self.kernel_us} us, {waits}"

    def lengths(self) -> Iterator[tuple[float, float]]:
        """Yield (length of a stop, length of the run after it) in milliseconds, without end."""
        means = (self.stopped_ms, self.runs_ms)
        return drawn(*means, SEED) if self.drawn else regular(*means)


STOPS = (
    Stops(10, 10),
    Stops(30, 10),
    Stops(10, 30),
    Stops(50, 50),
    Stops(10, 10, drawn=True),
    Stops(10, 10, kernel_us=100, sync_every=0),
    Stops(5, 5, kernel_us=100, sync_every=0),
    Stops(5, 5, kernel_us=100),
)


def measure_stops(stops: Stops, seconds: float) -> list[Row]:
    """Measure one case."""
    names = ("stopped", "busy")
    rows = [tenant(name, 0.5) for name in names]
    with tempfile.TemporaryDirectory(prefix="sh") as directory, running(Path(directory), *rows) as node:
        stopped, _ = (_launched(node, stops, name) for name in names)
        wait_for(lambda: all(node.devices().busy_ns(name) for name in names), "device time of both", 60)
        time.sleep(SETTLE_S)
        control = _together(node, seconds / 2, names)
        with stopping(stopped.process, stops.lengths()):
            time.sleep(SETTLE_S)
            waits = waits_of(node, "busy")
            shares = node.shares(seconds, *names)
            time.sleep(TOLD_S)
            waited = waits_since(node, "busy", waits)
    together, apart = sum(shares.values()), _apart(stops, seconds / 2)
    return [
        Row(stops.name, "together", "fraction", round(together, 4)),
        Row(stops.name, "together_of_control", "ratio", round(together / control, 4)),
        Row(stops.name, "apart", "fraction", round(apart, 4)),
        Row(stops.name, "together_of_apart", "ratio", round(together / apart, 4)),
        Row(stops.name, "stopped_share", "fraction", round(shares["stopped"], 4)),
        Row(stops.name, "busy_share", "fraction", round(shares["busy"], 4)),
        *wait_rows(stops.name, waited),
    ]


def _apart(stops: Stops, seconds: float) -> float:
    rows = [tenant("stopped", 0.5, gpus=GPUS[1:2]), tenant("busy", 0.5)]
    with tempfile.TemporaryDirectory(prefix="sh") as directory, running(Path(directory), *rows) as node:
        stopped, _ = (_launched(node, stops, row["id"], row["gpus"]) for row in rows)
        wait_for(lambda: all(node.devices().busy_ns(row["id"]) for row in rows), "device time of both", 60)
        with stopping(stopped.process, stops.lengths()):
            time.sleep(SETTLE_S)
            return node.shares(seconds, "busy")["busy"]


def _launched(node: Node, stops: Stops, name: str, gpus: Sequence[str] = GPUS[:1]) -> Program:
    arguments = ("--kernel-us", f"{stops.kernel_us}", "--sync-every", f"{stops.sync_every}")
    return node.launch(name, *arguments, gpus=gpus, extra=AHEAD)


def _together(node: Node, seconds: float, names: tuple[str, ...]) -> float:
    return sum(node.shares(seconds, *names).values())
