"""Pods whose owner writes their status: a forged status affects only this owner."""

from __future__ import annotations

from typing import Any

import pytest
from sharepod.controller.decisions.steps import BeginRelease, RemovalReason, RemoveRow, Wait
from sharepod.controller.state.facts.claim_facts import claim_pod_facts
from sharepod.controller.state.facts.pod_facts import pod_facts
from unit.controller.decisions.lifecycle_steps import step
from unit.controller.objects import TENANT, pod, pod_object, reserved, sharepod

CREATED = "2026-03-01T12:00:00Z"


def forged(**status: Any) -> dict[str, Any]:
    raw = pod_object(node="node-a", phase="Running", status=status)
    raw["metadata"]["creationTimestamp"] = CREATED
    return raw


@pytest.mark.promise("security-pod-status")
@pytest.mark.parametrize(
    ("reported", "counts"),
    [
        ("1970-01-01T00:00:00Z", CREATED),
        ("2026-03-01T11:59:59Z", CREATED),
        ("2026-03-01T12:00:30Z", "2026-03-01T12:00:30Z"),
        ("long ago", "long ago"),
    ],
)
def test_no_pod_started_before_it_was_created(reported: str, counts: str) -> None:
    assert pod_facts(forged(startTime=reported)).started == counts
    assert claim_pod_facts(forged(startTime=reported)).started == counts


@pytest.mark.promise("security-pod-status")
@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_says_it_has_ended_gives_its_share_to_nobody_while_its_agent_sees_its_processes(phase: str) -> None:
    """The SharePod ends with its Pod. Its share is released only once the agent has found no process of it."""
    ended, owner = pod(phase=phase, node="node-a"), sharepod(status={"podUID": "pod-1", "phase": phase})
    assert step(owner, ended, reserved()) == BeginRelease("node-a")
    assert step(owner, ended, reserved(releasing=True)) == Wait()
    assert step(owner, ended, reserved(releasing=True, drained=True)) == RemoveRow("node-a", RemovalReason.DRAINED)


@pytest.mark.promise("security-pod-status")
def test_a_pods_node_is_the_one_it_is_bound_to_whatever_addresses_it_shows() -> None:
    raw = forged(podIP="10.0.0.1", hostIP="10.9.9.9", nominatedNodeName="node-b")
    found = pod_facts(raw)
    assert (found.node, found.pin, found.namespace, found.tenant) == ("node-a", "node-a", "n", TENANT)
    assert claim_pod_facts(raw).node == "node-a"
