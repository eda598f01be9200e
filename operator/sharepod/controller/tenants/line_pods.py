"""Plain Pods whose resource line is attached by a CSI volume: what differs from SharePods. Such a Pod is a tenant
itself.

The Pod is the tenant's only object. It has no status like a SharePod's, so Events report everything. Only the Pod's
controller creates a next Pod, which is another tenant.

Guarantees:
- Events on the Pod report why it waits, and the share that it got.
- A Pod that has lost its row is deleted, because its GPUs may be assigned to another tenant.
- No share is booked for a plain Pod while nodes do not advertise the line.
- If a Pod did not fit a node, the next Pods of its controller avoid that node for some time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from sharepod.api.bounds import clipped
from sharepod.controller.apiserver.events import Events
from sharepod.controller.decisions.conditions import share
from sharepod.controller.decisions.ends import EndReason
from sharepod.controller.decisions.snapshot import TenantSnapshot
from sharepod.controller.decisions.steps import Ending, Finish, TakeBackPod
from sharepod.controller.state.facts.sharepod_facts import SharePodFacts
from sharepod.controller.state.memos import TenantMemo
from sharepod.placement.wording import of_lines

from .pods import PodControl

_NOT_IN_FORCE = (
    "resource lines are not in use in this cluster, so no node admits the pod: ask a cluster admin to apply "
    "manifests/plain-volume"
)
_MOST_OWNERS = 1000
"""Number of controllers for which avoided nodes are remembered."""


def is_line(snapshot: TenantSnapshot, tenant: str) -> bool:
    """Return True if a tenant is a plain Pod. If the Pod is deleted, its row shows it."""
    if snapshot.sharepod is not None:
        return snapshot.sharepod.plain
    return any(item.wanted.pod_uid == tenant for item in snapshot.reserved)


class LinePods:
    """Handling of plain Pods. Methods that call the API server may raise an `ApiError`. `clock`: monotonic seconds."""

    in_force: Callable[[], bool] = staticmethod(lambda: True)
    """Returns True if nodes advertise the resources of the resource line."""

    def __init__(self, pod_control: PodControl, events: Events, clock: Callable[[], float]) -> None:
        self._pod_control = pod_control
        self._events = events
        self._clock = clock
        self._avoided: OrderedDict[str, dict[str, tuple[str, float]]] = OrderedDict()
        """For each controller's uid, and each node that its next Pods must avoid: (reason, time until which they
        must)."""

    def may_be_placed(self, sharepod: SharePodFacts | None, memo: TenantMemo) -> bool:
        """Return True if a tenant may be placed now: a plain Pod only while nodes advertise the resources of the line,
        as kube-scheduler could not bind it otherwise. Also copy into its memo the nodes that its controller's former
        Pods did not fit.
        """
        if sharepod is None or not sharepod.plain:
            return True
        for node, (why, until) in self._avoided.get(sharepod.owner or "", {}).items():
            if until > self._clock():
                memo.avoid.setdefault(node, (why, until))
        return self.in_force()

    def taken_back(self, sharepod: SharePodFacts, step: TakeBackPod, memo: TenantMemo) -> None:
        """Write an Event that a Pod was withdrawn, and make the next Pods of its controller avoid the node."""
        pin = step.pod.pin
        next_one = "its controller makes another" if sharepod.owner is not None else "create it again"
        where = f" from {pin}" if pin is not None else ""
        text = f"took the pod back{where}, {next_one}: {step.message}"
        self._events.warning(sharepod.kind, sharepod, "PodTakenBack", "Bind", text)
        if sharepod.owner is not None and pin in memo.avoid:
            self._avoided.setdefault(sharepod.owner, {})[pin] = memo.avoid[pin]
            self._avoided.move_to_end(sharepod.owner)
            if len(self._avoided) > _MOST_OWNERS:
                self._avoided.popitem(last=False)

    async def ended(self, snapshot: TenantSnapshot, memo: TenantMemo, step: Ending) -> Ending | None:
        """Return `step` for a SharePod, and None for a plain Pod, which has no status to write. A plain Pod that has
        lost its row is deleted here.
        """
        sharepod, pod = snapshot.sharepod, snapshot.pod
        if sharepod is None or not sharepod.plain:
            return step
        if isinstance(step, Finish) and step.reason == EndReason.RESERVATION_LOST and pod is not None:
            self._events.warning(sharepod.kind, sharepod, step.reason, "Release", step.message)
            await self._pod_control.delete(pod, memo, snapshot.now, disrupts=True)
        return None

    def announce(self, snapshot: TenantSnapshot, memo: TenantMemo) -> None:
        """Write an Event about why the Pod waits, or about the share that it got."""
        sharepod, pod = snapshot.sharepod, snapshot.pod
        if sharepod is None or pod is None or pod.deleting or pod.ended:
            return
        row = next((item.written for item in snapshot.reserved if item.written is not None), None)
        count = sharepod.gpu.count if sharepod.gpu is not None else 1
        if sharepod.error is not None:
            self._events.warning(sharepod.kind, sharepod, "Invalid", "Place", str(sharepod.error))
        elif pod.waits_for_share and not self.in_force():
            self._events.warning(sharepod.kind, sharepod, "Waiting", "Place", _NOT_IN_FORCE)
        elif pod.waits_for_share and not snapshot.reserved and memo.refusal is not None:
            text = clipped(of_lines(memo.refusal.brief, count))
            self._events.warning(sharepod.kind, sharepod, memo.refusal.outlook.value, "Place", text)
        elif not pod.waits_for_share and pod.node is None and row is not None:
            self._events.normal(sharepod.kind, sharepod, "Placed", "Place", f"on {pod.pin}: {share(row)}")
        if memo.resize_refusal is not None and row is not None:
            text = clipped(of_lines(memo.resize_refusal.brief, count))
            self._events.warning(sharepod.kind, sharepod, "ResizeRefused", "Resize", text)
