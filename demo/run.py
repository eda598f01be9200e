"""`make demo`: two SharePods share one simulated GPU at the requested fractions; a third waits for both GPUs.

Everything but the GPU is real: API server, scheduler, kubelet, containerd, the operator and the agent under their
ServiceAccounts, the hook in the containers. The GPU is the tests' double: a libcuda whose kernels occupy a simulated
device for a stated time. Exits non-zero if a share or a phase differs from the promise, and leaves nothing running.

Once images were made here (root on a Debian-like machine) the operator is a Deployment and the agent a DaemonSet. Both
have images of this tree and unchanged manifests, as users install them. Before and elsewhere, or with `--processes`,
both are processes, and one line gives the reason. `--images` (`make demo-images`) makes the images, or fails.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType

from harness.build import programs
from harness.cluster import Cluster
from harness.delivered import Delivery
from harness.errors import HarnessError
from harness.machines import Machine
from harness.shares import POINTS, QUIET, WINDOW_S, Shares, measured, right
from playground import (
    HERE,
    NAMESPACE,
    RESTRICTED,
    as_pods,
    as_processes,
    await_gpus,
    delivered,
    make_images,
)
from results import Row, write
from screen import DemoError, Phase, Screen

SETTLE_S = 3.0
"""Seconds between the start of a tenant and the measurement. This is three times as long as a token bucket can save
credit."""
SETTLE_RAISED_S = 1.0
"""Seconds between a changed request and the measurement. They are fewer, because the tenants were busy before, so their
buckets have saved nothing."""

APPLY = Phase("two SharePods for one GPU, and a third for half of both GPUs", 4)
SHARE = Phase("measuring GPU time: alpha and beta share one GPU", SETTLE_S + WINDOW_S)
DELETE = Phase("beta is deleted: gamma gets both GPUs", 4)
LEND = Phase("measuring GPU time: alpha and gamma", SETTLE_S + WINDOW_S)
RAISE = Phase("alpha is raised to 0.5 while it runs", 1)
RAISED = Phase("measuring GPU time: alpha raised", SETTLE_RAISED_S + WINDOW_S)
CLEAN = Phase("cleaning up", 2)
SHOW = (APPLY, SHARE, DELETE, LEND, RAISE, RAISED, CLEAN)


@dataclass(frozen=True)
class Expected:
    """Expected share of one GPU. `milli`: thousandths: the request plus the tenant's part of lent time."""

    sharepod: str
    gpu: str
    asked: str
    milli: float


@dataclass(frozen=True)
class Share:
    """Measured and expected share of one GPU, in percent. `stolen`: percent of this machine's processor time that its
    host took during the measurement."""

    case: str
    due: float
    got: float
    stolen: float

    @property
    def points_off(self) -> float:
        return abs(self.got - self.due)

    def rows(self) -> list[Row]:
        return [
            Row(self.case, "share_expected", "percent", round(self.due, 2)),
            Row(self.case, "share", "percent", round(self.got, 2)),
            Row(self.case, "share_error", "points", round(self.points_off, 2)),
            Row(self.case, "stolen", "percent", round(self.stolen, 2)),
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--images", action="store_true", help="fail where no images can be made")
    way.add_argument("--processes", action="store_true", help="make no images; operator and agent are processes")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    screen = Screen((*as_pods(), *SHOW))
    try:
        programs()
        with ExitStack() as stack:
            made = "--processes is given" if chosen.processes else make_images(screen, stack, with_roots=chosen.images)
            if isinstance(made, Delivery):
                cluster, machine = delivered(screen, stack, made)
            elif chosen.images:
                raise DemoError(f"no images here: {made}; `make demo` needs none")
            else:
                cluster, machine = as_processes(screen, stack, made, SHOW)
            shares = _show(screen, cluster, machine)
            screen.begin(CLEAN)
        screen.end()
        write("demo", [row for share in shares for row in share.rows()])
        for share in shares:
            if not right(share.due, share.got, share.stolen):
                raise DemoError(f"{share.case} is {share.points_off:.1f} points off, more than {POINTS}{_busy()}")
    except (DemoError, HarnessError) as error:
        print(f"\ndemo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; everything is stopped", file=sys.stderr)
        return 130
    return 0


def _busy() -> str:
    """Return the likely cause of a wrong share if other programs keep the processors busy. Empty otherwise."""
    load, cpus = os.getloadavg()[0], os.cpu_count() or 1
    if load <= cpus:
        return ""
    return f"; the machine is busy (load {load:.1f} on {cpus} CPUs): run it again with fewer other programs"


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _show(screen: Screen, cluster: Cluster, machine: Machine) -> list[Share]:
    await_gpus(screen, cluster, machine)

    cluster.namespace(NAMESPACE, labels=RESTRICTED)
    screen.begin(APPLY)
    for name in ("alpha", "beta"):
        _apply(screen, cluster, name)
    for name in ("alpha", "beta"):
        _await_phase(screen, cluster, machine, name, "Running")
    _apply(screen, cluster, "gamma")
    _await_phase(screen, cluster, machine, "gamma", "Pending")
    screen.watch_until(cluster, lambda: bool(_refusal(cluster, "gamma")), what="gamma's reason", timeout=20)
    screen.command("kubectl describe sharepod gamma    # condition Placed")
    screen.write(f"  {_refusal(cluster, 'gamma')}")
    if _gpu_of(cluster, "alpha") != _gpu_of(cluster, "beta"):
        raise DemoError("alpha and beta are not on one GPU")

    first = _gpu_of(cluster, "alpha")[0]
    shares = _measure(
        screen,
        machine,
        SHARE,
        [Expected("alpha", first, "0.4, limit 0.7", 400), Expected("beta", first, "0.6, limit 0.8", 600)],
    )

    screen.begin(DELETE)
    screen.command("kubectl delete sharepod beta")
    cluster.kubectl("delete", "sharepod", "beta", "-n", NAMESPACE, timeout=60)
    _await_phase(screen, cluster, machine, "gamma", "Running")
    # The remaining 0.1 of the GPU is requested by no tenant: it is lent in proportion to the requests.
    shares += _measure(
        screen,
        machine,
        LEND,
        [
            Expected("alpha", first, "0.4, limit 0.7", 400 + 100 * 4 / 9),
            Expected("gamma", first, "0.5 of two GPUs", 500 + 100 * 5 / 9),
        ],
    )

    screen.begin(RAISE)
    patch = '{"spec": {"gpu": {"request": 0.5}}}'
    screen.command(f"kubectl patch sharepod alpha --type merge -p '{patch}'")
    cluster.kubectl("patch", "sharepod", "alpha", "-n", NAMESPACE, "--type", "merge", "-p", patch)
    screen.watch_until(cluster, lambda: _granted(cluster, "alpha") == 500, what="alpha's raise", timeout=20)
    shares += _measure(
        screen,
        machine,
        RAISED,
        [Expected("alpha", first, "0.5, limit 0.7", 500), Expected("gamma", first, "0.5 of two GPUs", 500)],
    )
    return shares


def _apply(screen: Screen, cluster: Cluster, name: str) -> None:
    screen.command(f"kubectl apply -f demo/{name}.yaml")
    screen.write(cluster.kubectl("apply", "-f", HERE / f"{name}.yaml").stdout.rstrip())


def _sharepod(cluster: Cluster, name: str) -> dict[str, object]:
    found: dict[str, object] = cluster.api.get(f"/apis/sharepod.dev/v1alpha1/namespaces/{NAMESPACE}/sharepods/{name}")
    status = found.get("status")
    return status if isinstance(status, dict) else {}


def _await_phase(screen: Screen, cluster: Cluster, machine: Machine, name: str, phase: str) -> None:
    def reached() -> bool:
        machine.follow()
        return _sharepod(cluster, name).get("phase") == phase

    try:
        screen.watch_until(cluster, reached, what=f"{name} {phase}", timeout=60)
    except DemoError as error:
        raise DemoError(f"{error}; its conditions: {_sharepod(cluster, name).get('conditions')}") from None


def _refusal(cluster: Cluster, name: str) -> str:
    conditions = _sharepod(cluster, name).get("conditions", [])
    assert isinstance(conditions, list)
    return next((c["message"] for c in conditions if c["type"] == "Placed" and c["status"] == "False"), "")


def _gpu_of(cluster: Cluster, name: str) -> list[str]:
    gpus = _sharepod(cluster, name).get("gpus", [])
    assert isinstance(gpus, list)
    return [gpu["uuid"] for gpu in gpus]


def _granted(cluster: Cluster, name: str) -> int | None:
    granted = _sharepod(cluster, name).get("granted")
    return granted.get("requestMilli") if isinstance(granted, dict) else None


def _measure(screen: Screen, machine: Machine, phase: Phase, expected: list[Expected]) -> list[Share]:
    """Measure the GPU time that each SharePod gets from the device during `WINDOW_S`. Return it together with the
    expected share."""
    screen.begin(phase)
    time.sleep(phase.usual_s - WINDOW_S)

    def sleep(seconds: float) -> None:
        started = time.monotonic()
        for second in range(1, int(seconds) + 1):
            time.sleep(max(0.0, started + second - time.monotonic()))
            screen.progress(f"measured {second} of {seconds:.0f} s", plain=second == seconds // 2)

    def again(window: Shares) -> None:
        screen.write(f"  The host of this machine took {window.stolen:.0f} % of its processors: measuring again.")

    window = measured(machine.busy_ns, sleep, again)
    case = phase.title.partition(": ")[2]
    shares, shown = [], []
    for each in expected:
        got = window.percent.get((each.sharepod, each.gpu), 0.0)
        share = Share(f"{case}: {each.sharepod}", each.milli / 10, got, window.stolen)
        shares.append(share)
        shown.append([each.sharepod, each.asked, f"{share.due:.1f} %", f"{got:.1f} %", f"{share.points_off:.1f}"])
    screen.table(["SHAREPOD", "ASKED", "DUE", "GOT", "POINTS OFF"], shown)
    if window.stolen > QUIET:
        screen.write(f"  The host took {window.stolen:.0f} % of the processors in the quietest of the windows.")
    return shares


if __name__ == "__main__":
    sys.exit(main())
