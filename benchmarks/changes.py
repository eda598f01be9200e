"""Effect on tenants of a killed or upgraded agent, and delay until an edited share is effective.

Cases: `agent killed`: its privileged process and its worker are killed. `container killed`: its supervisor is killed,
too, and all three are started again. `agent upgraded`: the agent gets SIGTERM while the next agent stands by.
- `second_off`: difference between the shares of a second and the requests, of the worst tenant, in points. It is given
  for `undisturbed` seconds and for the `first` seconds after the new agent serves. `four_off`: the same over four
  seconds. A quantum is up to 100 ms long, so the shares of a single second always differ by some points.
- `gap`: longest time in which attempts to connect failed. `unanswered`: longest time from an attempt to the WELCOME of
  the agent. Callers of each tenant connect 25 times a second.
- `hooks_back`: time from the moment when the new agent serves until every program is connected.
- `right_after`: time from that moment, or from the edit, until the shares of a second differ no more than in
  undisturbed seconds.
- `over_limit`: number of further processes of a tenant, started at that moment, that got more memory than was left.
- `dead`: number of programs that ended.

Three busy tenants share one simulated GPU. The hook is real, and so is the agent, at its default settings. The agent
consists of two processes as in its DaemonSet, so the benchmark needs root. With `--tenants N`, N tenants without
programs are added, and the figures of callers of twelve of them. With `--cluster`, two figures are added: `gap` of an
agent with its whole Kubernetes part, and the time from a change of a GPUNode (the answer to the write) until the limits
of the tenant are applied. Prints a table and writes `build/results/changes.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path

from hook.world.agent_node import GI, GPUS, Node, Program, built, running, tenant
from results import Row, write
from sharepod.agent.apart.pair import MOST_KILLED, WITHIN_S

PROMISES = {
    "install-reconnect": ("max", "hooks_back_max"),
    "install-exact-again": ("max", "right_after_max", "agent"),
    "time-resized": ("max", "right_after_max", "share edited"),
}
REQUESTS = {"a": 0.5, "b": 0.3, "c": 0.2}
EDITED = {"a": 0.3, "b": 0.5, "c": 0.2}
LIMIT, HELD = 2 * GI, 1 * GI
LEAST_OFF = 0.03
STEP_S = 0.05
WATCHED_S = 4.0
_KILLED_AT_ONCE = (MOST_KILLED - 1) // 2
"""Number of kills of an agent that its supervisor tolerates within `WITHIN_S`; each kills two processes."""


Seen = list[tuple[float, dict[str, int]]]
"""Samples: (monotonic seconds, GPU time of each tenant up to then in nanoseconds, by tenant)."""


def rows(requests: Mapping[str, float]) -> list[dict[str, object]]:
    """Return the rows for the tenants file, given the request of each tenant."""
    return [tenant(name, request, memory=LIMIT) for name, request in requests.items()]


def points(part: float) -> float:
    """Return a fraction as percentage points."""
    return round(100 * part, 1)


class Meter:
    """Meter of the GPU time of each tenant. It includes the GPU time of programs that have ended, which the simulated
    device forgets."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._most: dict[str, int] = {}

    def read(self) -> dict[str, int]:
        """Return the GPU time of each tenant up to now, in nanoseconds."""
        devices = self._node.devices()
        for label in {client.label for client in devices.clients}:
            self._most[label] = max(self._most.get(label, 0), devices.busy_ns(label))
        return {name: sum(t for label, t in self._most.items() if label.split(".")[0] == name) for name in REQUESTS}


def watch(meter: Meter, seconds: float) -> Seen:
    """Sample the GPU time of each tenant for `seconds`."""
    seen, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        seen.append((time.monotonic(), meter.read()))
        time.sleep(STEP_S)
    return seen


def off(seen: Seen, begin: float, seconds: float, wanted: Mapping[str, float]) -> float | None:
    """Return the largest error of a tenant's share in the `seconds` from `begin`, in points. None if it was not
    sampled."""
    first = next((busy for at, busy in seen if at >= begin), None)
    last = next((busy for at, busy in seen if at >= begin + seconds), None)
    if first is None or last is None:
        return None
    got = {name: last[name] - first[name] for name in wanted}
    total = sum(got.values()) or 1
    return max(abs(got[name] / total - part) for name, part in wanted.items())


def seconds_off(seen: Seen, wanted: Mapping[str, float]) -> list[tuple[float, float]]:
    """Return (begin, largest error of a tenant's share in points) for each second."""
    return [(at, found) for at, _ in seen if (found := off(seen, at, 1.0, wanted)) is not None]


def right_after(seen: Seen, begin: float, wanted: Mapping[str, float], usual: float) -> float:
    """Return the seconds from `begin` until the shares of a second are within `usual` points of the requests; if they
    never are, the whole sampled time."""
    return next((at - begin for at, far in seconds_off(seen, wanted) if at >= begin and far <= usual), WATCHED_S)


CASES = {
    "agent killed": Node.kill_agent,
    "container killed": Node.restart_container,
    "agent upgraded": Node.upgrade_agent,
}


def turns(case: str, times: int) -> Iterator[int]:
    """Yield the number of each repetition of a case. Wait before a repetition if one more kill would make the agent's
    supervisor give up."""
    for turn in range(times):
        if case == "agent killed" and turn and turn % _KILLED_AT_ONCE == 0:
            time.sleep(WITHIN_S)
        yield turn


def restarted(node: Node, meter: Meter, case: str, programs: Mapping[str, Program], usual: float) -> dict[str, float]:
    """End the running agent as `case` requires, and let another agent take over. Return the measured figures."""
    logged = len(node.log())
    label = f"a.greedy.{time.monotonic()}"
    greedy = node.launch("a", "--memory", str(LIMIT - HELD + (1 << 20)), "--seconds", "1", label=label, quiet=True)
    seen_by_callers = CASES[case](node)
    listening, wall = time.monotonic(), seen_by_callers.answered_at
    seen = watch(meter, WATCHED_S)
    events = [json.loads(line) for line in node.log()[logged:].splitlines() if line.startswith("{")]
    back = [
        datetime.fromisoformat(event["timestamp"]).timestamp()
        for event in events
        if event["event"] == "client connected"
    ]
    assert len(back) >= len(REQUESTS), f"only {len(back)} of {len(REQUESTS)} hooks were back after {WATCHED_S:g} s"
    greedy.process.wait(60)
    greedy.close()
    got = max((u.peak for c in node.devices().clients if c.label == label for u in c.usage.values()), default=0)
    return {
        "gap": seen_by_callers.refused_s,
        "unanswered": seen_by_callers.unanswered_s,
        "hooks_back": max(0.0, max(back[: len(REQUESTS)], default=wall + WATCHED_S) - wall),
        "right_after": right_after(seen, listening, REQUESTS, usual),
        "first_second_off": off(seen, listening, 1.0, REQUESTS) or 0.0,
        "four_off": off(seen, listening, WATCHED_S - 0.2, REQUESTS) or 0.0,
        "over_limit": int(got > LIMIT - HELD),
        "dead": sum(program.process.poll() is not None for program in programs.values()),
    }


def beside_many(tenants: int, times: int) -> list[Row]:
    """Measure how an upgrade and a kill of the agent affect callers, on a node with `tenants` tenants on eight GPUs."""
    a_gpu = -(-tenants // len(GPUS))
    many = [tenant(f"m{i:03}", 1 / a_gpu - 5e-4, memory=GI // 4, gpus=[GPUS[i % len(GPUS)]]) for i in range(tenants)]
    result: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="ch") as directory, running(Path(directory), *many, apart=True) as node:
        for case in ("agent upgraded", "agent killed"):
            found = [CASES[case](node) for _ in turns(case, times)]
            for metric, values in (
                ("gap", [each.refused_s * 1000 for each in found]),
                ("unanswered", [each.unanswered_s * 1000 for each in found]),
            ):
                result.append(
                    Row(f"{case}, {tenants} tenants", f"{metric}_p50", "ms", round(statistics.median(values)))
                )
                result.append(Row(f"{case}, {tenants} tenants", f"{metric}_max", "ms", round(max(values))))
    return result


def edited(node: Node, meter: Meter, requests: Mapping[str, float], usual: float) -> float:
    """Change the tenants' requests. Return the seconds until the measured shares had followed."""
    begin = time.monotonic()
    node.set_tenants(*rows(requests))
    return right_after(watch(meter, WATCHED_S), begin, requests, usual)


def standalone(times: int) -> list[Row]:
    """Measure restarts of the agent and changes of shares, without a cluster."""
    result: list[Row] = []
    with (
        tempfile.TemporaryDirectory(prefix="ch") as directory,
        running(Path(directory), *rows(REQUESTS), log_level="debug", apart=True) as node,
    ):
        programs = {
            name: node.launch(name, "--sync-every", "16", "--memory", str(HELD), "--report", "60", quiet=True)
            for name in REQUESTS
        }
        meter = Meter(node)
        watch(meter, 2.0)
        undisturbed = [far for _, far in seconds_off(watch(meter, 2 * WATCHED_S), REQUESTS)]
        usual = max(LEAST_OFF, *undisturbed)
        result.append(Row("undisturbed", "second_off_p50", "points", points(statistics.median(undisturbed))))
        result.append(Row("undisturbed", "second_off_max", "points", points(usual)))
        for case in CASES:
            found = [restarted(node, meter, case, programs, usual) for _ in turns(case, times)]
            for metric in ("gap", "unanswered", "hooks_back", "right_after"):
                values = [each[metric] * 1000 for each in found]
                result.append(Row(case, f"{metric}_p50", "ms", round(statistics.median(values))))
                result.append(Row(case, f"{metric}_max", "ms", round(max(values))))
            for metric in ("first_second_off", "four_off"):
                result.append(Row(case, f"{metric}_p50", "points", points(statistics.median(f[metric] for f in found))))
                result.append(Row(case, f"{metric}_max", "points", points(max(f[metric] for f in found))))
            for metric in ("over_limit", "dead"):
                result.append(Row(case, metric, "count", sum(each[metric] for each in found)))
        took = [edited(node, meter, EDITED if turn % 2 == 0 else REQUESTS, usual) * 1000 for turn in range(times)]
        result.append(Row("share edited", "right_after_p50", "ms", round(statistics.median(took))))
        result.append(Row("share edited", "right_after_max", "ms", round(max(took))))
    return result


def in_cluster(times: int) -> list[Row]:
    """Measure, in a cluster, the time from a GPUNode's change until the tenant's limits are applied."""
    from cluster.agent_world import OneNode, install, row
    from harness.cluster import Cluster

    took, gaps = [], []
    with Cluster(scheduler=False, controller_manager=True) as cluster:
        install(cluster)
        node = OneNode(cluster, "edited-0")
        node.make_gpunode(row("a"))
        agent = node.start_agent()
        node.await_observed(1)
        limits = node.tenant_directory("a") / "limits"
        for turn in range(times):
            request = 100 + turn
            node.reserve(row("a", requestMilli=request))
            begin = time.monotonic()
            while f"request {request} " not in limits.read_text():
                if time.monotonic() > begin + 10:
                    raise RuntimeError(f"the agent did not follow its GPUNode within 10 s: {limits.read_text()}")
                time.sleep(0.001)
            took.append((time.monotonic() - begin) * 1000)
            time.sleep(0.05)
        listening = node.tenant_directory("a") / "agent.sock"
        for _ in range(3):
            former, begin = listening.stat().st_ctime_ns, time.monotonic()
            agent.signal(signal.SIGKILL)
            agent.wait(10)
            agent = node.start_agent()
            while listening.stat().st_ctime_ns == former:
                if time.monotonic() > begin + 30:
                    raise RuntimeError("the agent did not listen again within 30 s")
                time.sleep(0.002)
            gaps.append((time.monotonic() - begin) * 1000)
    return [
        Row("agent of a cluster killed", "gap_p50", "ms", round(statistics.median(gaps))),
        Row("agent of a cluster killed", "gap_max", "ms", round(max(gaps))),
        Row("GPUNode edited", "in_force_p50", "ms", round(statistics.median(took), 1)),
        Row("GPUNode edited", "in_force_max", "ms", round(max(took), 1)),
    ]


def main() -> int:
    """Run the benchmark. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5, help="how often each thing is done (default 5)")
    parser.add_argument("--tenants", type=int, default=0, help="measure with so many tenants on eight GPUs, too")
    parser.add_argument("--cluster", action="store_true", help="on a real API server, too")
    arguments = parser.parse_args()
    if not built():
        print("hook or test double not built; run `make shim doubles`", file=sys.stderr)
        return 1
    if os.geteuid() != 0:
        print("run as root: the agent's two processes need it", file=sys.stderr)
        return 1
    result = standalone(arguments.times)
    if arguments.tenants:
        result += beside_many(arguments.tenants, arguments.times)
    if arguments.cluster:
        result += in_cluster(10 * arguments.times)
    write("changes", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
