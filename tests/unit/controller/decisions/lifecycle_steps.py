"""SharePods, Pods and conditions for the tests of a tenant's next step, and the call that returns the step."""

from __future__ import annotations

from typing import Any

from sharepod.controller.decisions.lifecycle import decide
from sharepod.controller.decisions.snapshot import ReservationSnapshot, TenantSnapshot
from sharepod.controller.decisions.steps import RemovalReason
from sharepod.controller.state.facts.pod_facts import PodFacts
from sharepod.controller.state.facts.sharepod_facts import SharePodFacts
from unit.controller.objects import pod, sharepod

EVICTION = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "evicted"}
REFUSED = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}


def step(
    own: SharePodFacts | None, its_pod: PodFacts | None = None, *reservations: ReservationSnapshot, **known: Any
) -> object:
    return decide(TenantSnapshot(sharepod=own, pod=its_pod, reserved=reservations, **known))


def made(**fields: Any) -> SharePodFacts:
    """Return a SharePod whose Pod was created."""
    return sharepod(status={"podUID": "pod-1", **fields})


GATED = pod(gated=True)
NEVER_BOUND = RemovalReason.NEVER_BOUND
ENDED = {"podUID": "pod-1", "node": "node-a", "cause": "Drained", "retryAt": "1970-01-01T00:01:40Z", "attempts": 2}


def between(**status: Any) -> SharePodFacts:
    """Return a SharePod whose last run has ended and is followed by another run."""
    return sharepod(status={"lastEnd": ENDED, **status}, spec={"restartPolicy": "Always"})
