"""One SharePod under the operator's own code over an API server in memory. The operator may die before any of its
writes. Users, admins, kubelets and agents act on the SharePod, and invariants are checked after each step.

A new operator starts with only the API server's state. Kubelet and agent of a node do nothing while the node is
unreachable. All randomness comes from the seed.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack, suppress

from doubles.apiserver.server import ApiServer
from doubles.apiserver.storage import Change
from sharepod.controller.apiserver.client import NotLeadingError
from sharepod.kube import ApiError, Json
from unit.controller.acting_world import World, acting

NODES = ("node-a", "node-b")
OUT_OF_SERVICE = {"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}
REFUSED = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
READY = {"type": "Ready", "status": "True"}


class ActingLife:
    """Cluster with one SharePod. Each public method is one event. `problems` lists broken promises."""

    def __init__(self, server: ApiServer, policy: str, seed: int) -> None:
        self.server = server
        self.policy = policy
        self.chance = random.Random(seed)
        self.processes: dict[str, str] = {}
        """For each uid of a Pod: the node on which its process lives."""
        self.runs: list[str] = []
        """Uids of Pods whose process was started, in order."""
        self.unreachable: set[str] = set()
        self.refuses = False
        self.problems: list[str] = []
        self.deaths = 0
        self._stack = AsyncExitStack()
        self._world: World | None = None
        server.storage.listeners.append(self._judge)

    @property
    def world(self) -> World:
        """The present operator process."""
        assert self._world is not None
        return self._world

    async def begin(self) -> None:
        """Start the first operator, two nodes, and the SharePod."""
        self._world = await self._stack.enter_async_context(acting(self.server))
        for node in NODES:
            self.world.node(node)
        self.world.sharepod(restartPolicy=self.policy)

    async def end(self) -> None:
        await self._stack.aclose()

    # The operator

    async def look(self) -> None:
        """Let the operator take a step. If it has died, start a new operator first."""
        if self.world.died:
            await self._succeed()
        for node in NODES:
            if node not in self.unreachable:
                self.world.renew(node)
        with suppress(NotLeadingError, ApiError):
            await self.world.look()
        await asyncio.sleep(0.002)  # the operator's ledger writer and placement loop run in this time

    async def _succeed(self) -> None:
        former = self.world
        await self._stack.aclose()
        self._world = await self._stack.enter_async_context(acting(self.server, after=former))
        self.deaths += 1

    def die_soon(self) -> None:
        """Let the operator die before one of its next writes."""
        self.world.writes_left = self.chance.randrange(4)

    # Invariants

    def _judge(self, change: Change) -> None:
        if change.kind.plural == "gpunodes" and change.before is not None and change.after is not None:
            node = change.after["metadata"]["name"]
            removed = _rows(change.before).keys() - _rows(change.after).keys()
            if removed and node in self.processes.values() and not self._gone(node):
                self.problems.append(f"the share on {node} was given away while a process lives there")
        if change.kind.plural == "pods" and change.before is None and self.processes:
            self.problems.append(f"a Pod was created while {self.processes} live")

    def _gone(self, node: str) -> bool:
        found = self.world.read("nodes", node)
        return found is None or OUT_OF_SERVICE in (found["spec"].get("taints") or [])

    # kube-scheduler, kubelets and agents

    def pod(self) -> Json | None:
        """Return the Pod as the API server has it. None if there is none."""
        return self.world.read("pods")

    def play(self) -> None:
        """Let scheduler, kubelets and agents take all due steps."""
        found = self.pod()
        for uid, node in list(self.processes.items()):
            if node not in self.unreachable and (found is None or found["metadata"]["uid"] != uid):
                del self.processes[uid]  # the kubelet ends a process if the API server no longer has its Pod
        if found is not None:
            self._play_pod(found)
        for node in NODES:
            if node not in self.unreachable:
                self._report(node)

    def _play_pod(self, found: Json) -> None:
        metadata, spec = found["metadata"], found["spec"]
        node, deleting = spec.get("nodeName"), "deletionTimestamp" in metadata
        if node is None:
            pin = _pin(spec)
            if deleting or spec.get("schedulingGates") or pin is None:
                return
            if self.refuses:
                self._pod_status(conditions=[REFUSED])
            elif not self._gone(pin):
                self.world.change("pods", "one", lambda item: item["spec"].update(nodeName=pin))
            return
        if node in self.unreachable:
            return
        phase = found.get("status", {}).get("phase", "Pending")
        if deleting:
            self.processes.pop(metadata["uid"], None)
            if not metadata.get("finalizers"):
                self.world.pod_gone()
        elif phase == "Pending":
            row = self.world.rows(node).get(self.world.tenant)
            if row is not None and row["state"] == "Reserved" and row["podUID"] == metadata["uid"]:
                self._start(metadata["uid"], node)

    def _start(self, uid: str, node: str) -> None:
        if self.processes:
            self.problems.append(f"{uid} starts while {self.processes} live")
        self.processes[uid] = node
        self.runs.append(uid)
        self._pod_status(phase="Running", startTime="2026-01-01T00:00:00Z", conditions=[READY])

    def _pod_status(self, **status: object) -> None:
        self.world.change("pods", "one", lambda item: item.update(status=item.get("status", {}) | status), status=True)

    def _report(self, node: str) -> None:
        row = self.world.rows(node).get(self.world.tenant)
        if row is None:
            return
        drained = row["state"] == "Releasing" and node not in self.processes.values()
        self.world.report({"id": self.world.tenant, "drained": drained}, node=node)

    # Events

    def delete_pod(self) -> None:
        """Delete the Pod, as `kubectl delete pod` does."""
        with suppress(Exception):
            self.world.delete("pods")

    def drain(self) -> None:
        """Delete the Pod by the Eviction API, as `kubectl drain` does."""
        if self.pod() is not None:
            shown = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "m"}
            self._pod_status(conditions=[shown])
            self.world.delete("pods")

    def force_delete(self) -> None:
        """Delete the object at once, as `kubectl delete pod --force` does. The process may continue to run."""
        found = self.pod()
        if found is not None and not found["metadata"].get("finalizers"):
            self.world.pod_gone()

    def fail(self) -> None:
        """Let a container fail, and the Pod with it."""
        self._ends("Failed")

    def complete(self) -> None:
        """Let all containers end with exit code 0. With restartPolicy Always the Pod continues."""
        if self.policy != "Always":
            self._ends("Succeeded")

    def _ends(self, phase: str) -> None:
        found = self.pod()
        if found is None or found.get("status", {}).get("phase") != "Running":
            return
        if found["spec"]["nodeName"] not in self.unreachable:
            self.processes.pop(found["metadata"]["uid"], None)
            self._pod_status(phase=phase, conditions=[])

    def cut(self) -> None:
        """Make one of the nodes unreachable."""
        self.unreachable.add(self.chance.choice(NODES))

    def taint(self) -> None:
        """Report that an unreachable node is shut down, as an admin does. No process runs there any more."""
        for node in sorted(self.unreachable):
            self.processes = {uid: where for uid, where in self.processes.items() if where != node}
            self.world.change("nodes", node, lambda item: item["spec"].update(taints=[OUT_OF_SERVICE]))
            found = self.pod()
            if (
                found is not None
                and found["spec"].get("nodeName") == node
                and found["metadata"].get("finalizers") is None
            ):
                self.world.pod_gone()  # as the pod garbage collector does

    def refuse(self) -> None:
        """Let kube-scheduler refuse the Pod from now on, as if another pod had used the node's resources first."""
        self.refuses = True

    def set_clock(self) -> None:
        """Set the operator's time of day to a wrong value."""
        self.world.clock_set = self.chance.choice((-7200.0, 0.0, 7200.0))

    def wait(self) -> None:
        """Let 1 s, 30 s or 700 s pass."""
        self.world.now += self.chance.choice((1.0, 30.0, 700.0))

    def heal(self) -> None:
        """Let kube-scheduler accept Pods again, and make all nodes reachable and free of taints."""
        self.refuses = False
        self.unreachable.clear()
        for node in NODES:
            self.world.change("nodes", node, lambda item: item["spec"].update(taints=[]))

    async def settle(self, done: str) -> None:
        """Take all due steps until the SharePod has this phase. Stop at a limit."""
        for turn in range(60):
            await self.look()
            self.play()
            status = self.world.status()
            if status.get("phase") == done and (done != "Running" or self.processes):
                return
            if turn % 6 == 5:
                self.world.now += 60.0


def _rows(gpunode: Json) -> dict[str, Json]:
    return {row["id"]: row for row in gpunode["spec"].get("tenants") or ()}


def _pin(spec: Json) -> str | None:
    terms = spec.get("affinity", {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", {})
    for term in terms.get("nodeSelectorTerms") or ():
        for wanted in term.get("matchFields") or ():
            return str(wanted["values"][0])
    return None
