"""World of one SharePod on two nodes, with an operator that decides by `lifecycle`, all as plain values. Users, admins,
kubelets and failures act on the SharePod. Invariants are checked after each step.

A test may erase the operator's memory at any time. A status may stay unwritten after a step, as after a crash between
two writes. Kubelet and agent of a node do nothing while the node is unreachable.
"""

from __future__ import annotations

import copy
import datetime
import random

from sharepod.api.gpunode import Tenant, TenantState
from sharepod.api.objects import TAKEN_BACK
from sharepod.controller.decisions import lifecycle, status, steps
from sharepod.controller.decisions.conditions import StatusInputs
from sharepod.controller.decisions.snapshot import ReservationSnapshot, TenantSnapshot
from sharepod.controller.decisions.steps import RemovalReason
from sharepod.controller.state.facts.pod_facts import PodFacts, pod_facts
from sharepod.controller.state.facts.sharepod_facts import SharePodFacts, sharepod_facts
from sharepod.kube import Json
from sharepod.placement.state.types import Reservation
from unit.controller.objects import PODS, pod_object, row, sharepod_object

NODES = ("node-a", "node-b")


class LifeWorld:
    """Cluster with one SharePod. Each method is one event. `problems` lists broken promises."""

    def __init__(self, policy: str, seed: int) -> None:
        self.policy = policy
        self.chance = random.Random(seed)
        self.now = 1000.0
        self.status: Json = {}
        self.pod: Json | None = None
        self.rows: dict[str, Tenant] = {}
        self.processes: dict[str, str] = {}
        """For each uid of a Pod: the node on which its process runs."""
        self.reachable = dict.fromkeys(NODES, True)
        self.there = dict.fromkeys(NODES, True)
        self.out_of_service = dict.fromkeys(NODES, False)
        self.gpu_failed = dict.fromkeys(NODES, False)
        self.lost: PodFacts | None = None
        self.refuses = False
        """True if kube-scheduler finds no node for the Pod."""
        self.unbound_since: float | None = None
        self.runs: list[str] = []
        """Uids of Pods whose process was started, in order."""
        self.overridden: set[str] = set()
        """Uids of Pods whose share was removed although their processes may still run: their node was deleted or
        declared shut down, or an admin deleted the row. The invariants ignore them.
        """
        self.problems: list[str] = []
        self._pods = 0

    # The operator

    def sharepod(self) -> SharePodFacts:
        found = sharepod_object(status=self.status, spec={"restartPolicy": self.policy})
        return sharepod_facts(found, PODS)

    def snapshot(self) -> TenantSnapshot:
        reserved = tuple(self._reserved(node, item) for node, item in sorted(self.rows.items()))
        return TenantSnapshot(
            sharepod=self.sharepod(),
            pod=pod_facts(self.pod) if self.pod is not None else None,
            reserved=reserved,
            lost=self.lost,
            unbound_since=self.unbound_since,
            now=self.now,
            wall=self.now,
            gpu_failed=self.pod is not None and any(self.gpu_failed[node] for node in self.rows),
        )

    def _reserved(self, node: str, item: Tenant) -> ReservationSnapshot:
        override = RemovalReason.OUT_OF_SERVICE if self.out_of_service[node] else None
        if not self.there[node]:
            override = RemovalReason.NODE_GONE
        drained = self.reachable[node] and self.there[node] and node not in self.processes.values()
        return ReservationSnapshot(
            node=node, wanted=Reservation.of_row(item), written=item, drained=drained, override=override
        )

    def look(self, *, crash: bool = False) -> steps.Step:
        """Let the operator take one step. With `crash` it dies before it writes the status."""
        snapshot = self.snapshot()
        step = lifecycle.decide(snapshot)
        end: steps.Ending | None = None
        match step:
            case steps.CreatePod():
                self._create()
            case steps.Place():
                self._place()
            case steps.OpenGate(node=node):
                self._replace_pod(gated=False, pin=node)
            case steps.DeletePod():
                self.delete_pod()
            case steps.TakeBackPod():
                self._take_back(dies=crash and self.chance.random() < 0.5)
            case steps.LetPodGo():
                self._let_go()
            case steps.BeginRelease(node=node):
                self.rows[node] = self.rows[node].model_copy(update={"state": TenantState.RELEASING})
            case steps.RemoveRow(node=node):
                self._remove(node)
            case steps.Finish() | steps.EndRun():
                end = step
            case _:
                pass
        if not crash:
            self._write_status(end)
        else:
            self.crash()
        return step

    def _write_status(self, end: steps.Ending | None) -> None:
        own, snapshot = self.sharepod(), self.snapshot()
        node = next(iter(self.rows), None)
        inputs = StatusInputs(
            snapshot=snapshot,
            node=node,
            row=self.rows[node] if node is not None else None,
            gpus=None,
            seen=None,
            refusal=None,
            resize_refusal=None,
            resizing=False,
            blocked=None,
            usage_due=False,
            now=datetime.datetime.fromtimestamp(self.now, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        )
        self.status = status.compose(own, inputs, end)

    def crash(self) -> None:
        """Let the operator die. Its successor knows only the API server's state."""
        self.lost, self.unbound_since = None, None

    def _create(self) -> None:
        if self.pod is not None:
            self.problems.append("a second Pod")
        if self.rows:
            self.problems.append("a Pod while the last run still has a share")
        self._pods += 1
        self.lost, self.unbound_since = None, None
        self.pod = pod_object(uid=f"pod-{self._pods}", gated=True, restart=self.policy)

    def _place(self) -> None:
        assert self.pod is not None
        able = [node for node in NODES if self.reachable[node] and self.there[node] and not self.out_of_service[node]]
        able = [node for node in able if not self.gpu_failed[node]]
        if able:
            self.rows[self.chance.choice(able)] = row(pod_uid=self.pod["metadata"]["uid"])

    def _take_back(self, *, dies: bool) -> None:
        """Mark the Pod as withdrawn, then delete it. With `dies` the operator dies after the mark."""
        assert self.pod is not None
        self._replace_pod(finalizers=[TAKEN_BACK])
        if not dies:
            self._replace_pod(deleting=True)

    def _let_go(self) -> None:
        assert self.pod is not None
        self._replace_pod(finalizers=())
        if pod_facts(self.pod).deleting and pod_facts(self.pod).node is None:
            self._pod_gone()

    def _remove(self, node: str) -> None:
        item = self.rows.pop(node)
        known = self.there[node] and not self.out_of_service[node]
        for uid, where in self.processes.items():
            if where == node and known:
                self.problems.append(f"the share of {uid} was given away while it lives")
            elif where == node:
                self.overridden.add(uid)
        if not known and item.pod_uid is not None:
            self.overridden.add(item.pod_uid)

    # kube-scheduler, kubelets and the pod garbage collector

    def _replace_pod(self, **fields: object) -> None:
        assert self.pod is not None
        known = pod_facts(self.pod)
        conditions = self.pod["status"]["conditions"]
        values: dict[str, object] = {
            "uid": known.uid,
            "gated": known.waits_for_share,
            "pin": known.pin or "",
            "node": known.node,
            "phase": known.phase,
            "deleting": known.deleting,
            "conditions": conditions,
            "restart": self.policy,
            "finalizers": known.finalizers,
        }
        self.pod = pod_object(**values | fields, version=known.version + 1)  # type: ignore[arg-type]

    def _pod_gone(self) -> None:
        assert self.pod is not None
        self.lost, self.pod = pod_facts(self.pod), None

    def play(self) -> None:
        """Let scheduler, kubelets and controllers take all due steps."""
        for uid, node in list(self.processes.items()):
            alive = self.pod is not None and self.pod["metadata"]["uid"] == uid
            if self.reachable[node] and self.there[node] and not alive:
                del self.processes[uid]  # the kubelet ends a process if the API server no longer has its Pod
        if self.pod is None:
            return
        known = pod_facts(self.pod)
        if known.node is None:
            if known.deleting:
                if not known.finalizers:
                    self._pod_gone()
            elif self.refuses and not known.gates:
                if known.unschedulable:
                    return
                refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
                self._replace_pod(conditions=[refused])
                self.unbound_since = self.now
            elif not known.gates and known.pin and self.there[known.pin] and not self.out_of_service[known.pin]:
                self._replace_pod(node=known.pin, conditions=[])
            return
        if known.finalizers:
            return  # the object stays until the operator removes its finalizer
        if not self.there[known.node] or (self.out_of_service[known.node] and known.deleting):
            self._pod_gone()
            return
        if not self.reachable[known.node]:
            return
        if known.deleting:
            self.processes.pop(known.uid, None)
            self._pod_gone()
        elif known.phase == "Pending":
            self._start(known)
        # the node was rebooted, so the kubelet starts the Pod's process again
        elif known.phase == "Running" and known.uid not in self.processes:
            if self.policy == "Never":
                self._replace_pod(phase="Failed")
            else:
                self.processes[known.uid] = known.node

    def _start(self, known: PodFacts) -> None:
        assert known.node is not None
        mine = self.rows.get(known.node)
        if mine is None or mine.pod_uid != known.uid or mine.state is TenantState.RELEASING:
            return  # no process starts, because the agent mounts no volume for a share without a row
        others = [uid for uid in self.processes if uid not in self.overridden]
        if others:
            self.problems.append(f"{known.uid} starts while {others} live")
        self.processes[known.uid] = known.node
        self.runs.append(known.uid)
        ready = {"type": "Ready", "status": "True"}
        self._replace_pod(phase="Running", conditions=[ready])

    # Events

    def delete_pod(self, *, disrupted: str = "") -> None:
        """Delete the Pod, as the operator, a user, or the Eviction API does."""
        if self.pod is not None and not self.pod["metadata"].get("deletionTimestamp"):
            known = pod_facts(self.pod)
            if known.waits_for_share or known.node is None:
                if known.finalizers:
                    self._replace_pod(deleting=True)
                else:
                    self._pod_gone()
                return
            shown = [{"type": "DisruptionTarget", "status": "True", "reason": disrupted}] if disrupted else []
            self._replace_pod(deleting=True, conditions=shown)

    def refuse(self) -> None:
        """Let kube-scheduler refuse the Pod from now on, as if another pod had used the node's resources first."""
        self.refuses = True

    def bind(self) -> None:
        """Let kube-scheduler accept the Pod again."""
        self.refuses = False

    def drain(self) -> None:
        """Evict the Pod by the Eviction API, as `kubectl drain` does."""
        self.delete_pod(disrupted="EvictionByEvictionAPI")

    def force_delete(self) -> None:
        """Delete the object at once, as `kubectl delete pod --force` does. The process may continue to run."""
        if self.pod is not None and not pod_facts(self.pod).finalizers:
            self._pod_gone()

    def complete(self) -> None:
        """Let all containers end with exit code 0. With restartPolicy Always the Pod continues."""
        if self.pod is not None and pod_facts(self.pod).phase == "Running" and self.policy != "Always":
            known = pod_facts(self.pod)
            if known.node is not None and self.reachable[known.node]:
                self.processes.pop(known.uid, None)
                self._replace_pod(phase="Succeeded")

    def fail(self, reason: str = "") -> None:
        """Let the Pod fail, or its kubelet evict it."""
        if self.pod is not None and pod_facts(self.pod).phase == "Running":
            known = pod_facts(self.pod)
            if known.node is not None and self.reachable[known.node]:
                self.processes.pop(known.uid, None)
                self._replace_pod(phase="Failed")
                assert self.pod is not None
                self.pod["status"]["reason"] = reason

    def evict_by_kubelet(self) -> None:
        """Let the kubelet evict the Pod because of memory pressure."""
        self.fail("Evicted")

    def lose_row(self) -> None:
        """Remove a row from the ledger, as an admin may do. The Pod's processes there belong to no tenant until their
        Pod is deleted."""
        for node in list(self.rows):
            if self.rows[node].state is TenantState.RESERVED and self.pod is not None:
                self.overridden |= set(self.processes)
                del self.rows[node]

    def cut(self) -> None:
        """Make one of the nodes unreachable."""
        self.reachable[self.chance.choice(NODES)] = False

    def join(self) -> None:
        self.reachable = dict.fromkeys(NODES, True)

    def taint(self) -> None:
        """Report that an unreachable node is shut down, as an admin does. No process runs there any more."""
        for node in NODES:
            if not self.reachable[node]:
                self.out_of_service[node] = True
                self._ends_on(node)

    def remove_node(self) -> None:
        """Delete an unreachable node."""
        for node in NODES:
            if not self.reachable[node]:
                self.there[node] = False
                self._ends_on(node)

    def _ends_on(self, node: str) -> None:
        self.processes = {uid: where for uid, where in self.processes.items() if where != node}

    def fail_gpu(self) -> None:
        """Let a GPU fail on one of the nodes."""
        node = self.chance.choice(NODES)
        self.gpu_failed[node] = True
        if self.pod is not None and pod_facts(self.pod).node == node and pod_facts(self.pod).phase == "Running":
            self._replace_pod(conditions=[])

    def go_on(self) -> None:
        """Let the operator, kube-scheduler, kubelets and controllers take a few steps each."""
        for _ in range(3):
            self.look()
            self.play()

    def wait(self) -> None:
        self.now += self.chance.choice((1.0, 30.0, 700.0))

    def heal(self) -> None:
        """End all failures: nodes are reachable and kube-scheduler accepts Pods."""
        self.join()
        self.bind()
        self.there = dict.fromkeys(NODES, True)
        self.out_of_service = dict.fromkeys(NODES, False)
        self.gpu_failed = dict.fromkeys(NODES, False)

    def seen(self) -> object:
        """Return everything that the API server shows, for comparison."""
        return copy.deepcopy((self.status, self.pod, self.rows, self.processes))
