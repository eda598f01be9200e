"""Faults of a holder whose GPU a SharePod uses, in a random order from a seed, while native pods wait for a GPU."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from harness.cluster import suppress_reason, wait_until
from node.plugin_node import NATIVE, PODS, PluginNode
from sharepod.agent.kubelet.plugin_pods import TIMEOUT_S

FAULTS = (
    "forced deletion",
    "eviction",
    "boot without plugin",
    "kill -9",
    "kubelet restart",
    "kubelet hangs",
    "plugin restart",
    "operator kill -9",
    "agent kill -9",
)
BACK_WITHIN_S = 30.0
"""Seconds within which a SharePod that lost its GPU runs again, once the node has a free GPU."""


class HolderFaults:
    """Rounds of faults. The SharePod `alpha` uses a held GPU, native pods have the other GPUs, and one more native pod
    waits."""

    def __init__(self, node: PluginNode, seed: int) -> None:
        self._node = node
        self._random = random.Random(seed)
        self._natives: list[str] = []
        self._count = 0
        self.log = [f"SEED={seed}"]
        """Readable log of the faults."""
        self.heirs: set[str] = set()
        """Native pods, with their namespaces, that got a GPU after its holder was deleted by force, or while no
        operator led."""

    def run(self, rounds: int) -> None:
        """Cause this number of faults. Each kind occurs once before any kind occurs again."""
        self._alpha()
        self._fill()
        faults: list[str] = []
        while len(faults) < rounds:
            faults += self._random.sample(FAULTS, len(FAULTS))
        for fault in faults[:rounds]:
            began = time.monotonic()
            getattr(self, "_" + fault.replace(" ", "_").replace("-", ""))()
            self.log.append(f"{fault}: {time.monotonic() - began:.1f} s")

    # Faults that the holder survives with its GPU.

    def _kill_9(self) -> None:
        self._goes_on(self._node.kill_holder)

    def _kubelet_restart(self) -> None:
        self._goes_on(self._node.restart_kubelet)

    def _kubelet_hangs(self) -> None:
        self._goes_on(lambda: self._node.hang_kubelet(TIMEOUT_S + 2))

    def _plugin_restart(self) -> None:
        self._goes_on(self._node.restart_plugin)

    def _operator_kill_9(self) -> None:
        self._goes_on(self._node.restart_operator)

    def _agent_kill_9(self) -> None:
        self._goes_on(self._node.restart_agent)

    def _goes_on(self, fault: Callable[[], None]) -> None:
        before, pods = self._node.holders(), [pod["metadata"]["uid"] for pod in self._node.holder_pods()]
        runs = self._pod()
        fault()
        busy = self._busy()
        wait_until(lambda: self._busy() > busy, what="alpha at work", timeout=60)
        wait_until(lambda: self._holder_runs(), what="the holder running", timeout=60)
        assert [pod["metadata"]["uid"] for pod in self._node.holder_pods()] == pods
        assert self._node.holders() == before
        assert self._pod() == runs, "its tenant runs on"

    def _holder_runs(self) -> bool:
        (pod,) = self._node.holder_pods()
        statuses = pod["status"].get("containerStatuses") or []
        return all("running" in each["state"] for each in statuses)

    # Faults after which the pending native pod gets the GPU.

    def _forced_deletion(self) -> None:
        self.heirs.add(f"{NATIVE}/{self._natives[-1]}")
        self._inherited(self._node.force_delete_holder)

    def _eviction(self) -> None:
        if not self._node.operator_leads():
            self.log.append("  evicted while no operator leads")
            self.heirs.add(f"{NATIVE}/{self._natives[-1]}")
        self._inherited(self._node.evict_holder)

    def _inherited(self, fault: Callable[[], None]) -> None:
        node, heir, before = self._node, self._natives[-1], self._pod()
        (lost,) = [row["uuid"] for row in node.holders()]
        fault()
        wait_until(lambda: node.phase(heir) in ("Running", "Failed"), what=f"the GPU for {heir}", timeout=60)
        wait_until(lambda: self._pod() != before, what="the end of alpha's Pod", timeout=60)
        wait_until(lambda: "HolderLost" in node.events("alpha"), what="the Event HolderLost", timeout=60)
        if node.phase(heir) == "Failed":
            self.log.append("  the kubelet refused the pod that waited: it still counted the deleted holder")
            ended = self._natives.pop()
        else:
            assert node.seen_by(heir) == [lost]
            ended = self._natives.pop(0)
        with suppress_reason("NotFound"):
            node.cluster.api.delete(f"{PODS}/{ended}", grace=0)
        self._back()
        self._native()

    # Faults after which the kubelet refuses every pod with a GPU of the plugin, including the holder.

    def _boot_without_plugin(self) -> None:
        node, before = self._node, self._pod()
        node.boot_without_plugin()
        wait_until(lambda: self._pod() != before, what="the end of alpha's Pod", timeout=60)
        wait_until(lambda: "HolderLost" in node.events("alpha"), what="the Event HolderLost", timeout=60)
        refused = self._drop_refused()
        self._back()
        refused += self._drop_refused()  # a second time, because the kubelet refuses its pods one after the other
        self.log.append(f"  the kubelet refused {refused} native pods and the holder")
        self._fill()

    def _drop_refused(self) -> int:
        """Delete the native pods that the kubelet has refused. Return their number."""
        refused = [name for name in self._natives if self._node.phase(name) == "Failed"]
        for name in refused:
            self._node.cluster.api.delete(f"{PODS}/{name}", grace=0)
            self._natives.remove(name)
        return len(refused)

    def _back(self) -> None:
        """Wait until alpha runs again. Then delete and create it again, so that no back-off delays its next run."""
        began = time.monotonic()
        self._node.sharepod("alpha", timeout=BACK_WITHIN_S)
        self.log.append(f"  alpha runs again {time.monotonic() - began:.1f} s after a GPU was free")
        self._node.cluster.kubectl("delete", "sharepod", "alpha", "-n", NATIVE, timeout=60)
        self._alpha()

    def _fill(self) -> None:
        """Create native pods for all GPUs except alpha's, and one more, which waits."""
        while len(self._natives) < len(self._node.gpus) - 1:
            self._native()
        for name in self._natives:
            self._node.seen_by(name)
        self._native()

    def _alpha(self) -> None:
        self._node.apply("alpha", 0.5, "--kernel-us", "2000", restartPolicy="Always")
        self._node.sharepod("alpha")

    def _native(self) -> str:
        self._count += 1
        name = f"native-{self._count}"
        self._natives.append(name)
        self._node.run_native(name)
        return name

    def _pod(self) -> str:
        """Return the uid of alpha's Pod. Empty while there is none."""
        pods = self._node.cluster.api.get(PODS)["items"]
        return next((str(pod["metadata"]["uid"]) for pod in pods if pod["metadata"]["name"] == "alpha"), "")

    def _busy(self) -> int:
        return sum(spent for (name, _), spent in self._node.machine.busy_ns().items() if name == "alpha")
