"""Plain Pods that are their own tenants: the differences from SharePods.

The Pod is the only object: it has no status for SharePod, and only the Pod's controller creates another Pod.

Guarantees:
- Events on the Pod show what it waits for, and what it got.
- A Pod that has lost its row is ended: its GPUs may be assigned to another tenant.
- No share is booked for a plain Pod while nodes do not advertise the line.
- A controller's next Pod avoids for a while a node that its former Pod did not fit.
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
"""Controllers of which it is remembered where their Pods did not fit."""


def is_line(snapshot: TenantSnapshot, tenant: str) -> bool:
    """Return whether a tenant is a plain Pod, even if only its row is left."""
    if snapshot.sharepod is not None:
        return snapshot.sharepod.plain
    return any(item.wanted.pod_uid == tenant for item in snapshot.reserved)


class LinePods:
    """Handling of plain Pods. Methods that call the API server may raise an `ApiError`. `clock`: monotonic seconds."""

    in_force: Callable[[], bool] = staticmethod(lambda: True)
    """Returns whether nodes advertise the line."""

    def __init__(self, pod_control: PodControl, events: Events, clock: Callable[[], float]) -> None:
        self._pod_control = pod_control
        self._events = events
        self._clock = clock
        self._avoided: OrderedDict[str, dict[str, tuple[str, float]]] = OrderedDict()
        """By controller: the nodes that its Pods did not fit, why, and until when to stay away."""

    def may_be_placed(self, sharepod: SharePodFacts | None, memo: TenantMemo) -> bool:
        """Return whether a tenant may be placed now: a plain Pod only while nodes advertise the line, without which it
        would never be bound. It avoids nodes that its controller's former Pods did not fit."""
        if sharepod is None or not sharepod.plain:
            return True
        for node, (why, until) in self._avoided.get(sharepod.owner or "", {}).items():
            if until > self._clock():
                memo.avoid.setdefault(node, (why, until))
        return self.in_force()

    def taken_back(self, sharepod: SharePodFacts, step: TakeBackPod, memo: TenantMemo) -> None:
        """Record and announce that a Pod was withdrawn."""
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
        """Return how a SharePod ends; delete a plain Pod, which must not run without its row."""
        sharepod, pod = snapshot.sharepod, snapshot.pod
        if sharepod is None or not sharepod.plain:
            return step
        if isinstance(step, Finish) and step.reason == EndReason.RESERVATION_LOST and pod is not None:
            self._events.warning(sharepod.kind, sharepod, step.reason, "Release", step.message)
            await self._pod_control.delete(pod, memo, snapshot.now, disrupts=True)
        return None

    def announce(self, snapshot: TenantSnapshot, memo: TenantMemo) -> None:
        """Announce what the Pod waits for, or what it got."""
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
            text = clipped(of_lines(memo.refusal.message, count))
            self._events.warning(sharepod.kind, sharepod, memo.refusal.outlook.value, "Place", text)
        elif not pod.waits_for_share and pod.node is None and row is not None:
            self._events.normal(sharepod.kind, sharepod, "Placed", "Place", f"on {pod.pin}: {share(row)}")
        if memo.resize_refusal is not None and row is not None:
            text = clipped(of_lines(memo.resize_refusal.message, count))
            self._events.warning(sharepod.kind, sharepod, "ResizeRefused", "Resize", text)
