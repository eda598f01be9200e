"""Pods of holders: the fields that the kubelet, kube-scheduler and autoscalers read."""

from __future__ import annotations

import pytest
from sharepod.api.pods.holder_pod import holder_pod
from sharepod.kube import Json

TOLERATED = {"key": "nvidia.com/gpu", "operator": "Exists"}


def made() -> Json:
    return holder_pod(
        "sharepod-holder-1",
        "system",
        node="node-a",
        tenant="t",
        image="pause",
        priority_class="sharepod-holder",
        tolerations=[TOLERATED],
    )


def test_a_holder_is_guaranteed_all_that_it_asks_for() -> None:
    (container,) = made()["spec"]["containers"]
    asked = container["resources"]
    assert asked["requests"] == asked["limits"] == {"cpu": "10m", "memory": "16Mi", "nvidia.com/gpu": "1"}


@pytest.mark.promise("placement-holder-pod")
def test_autoscalers_evict_no_holder_and_it_goes_to_its_node_alone() -> None:
    metadata, spec = made()["metadata"], made()["spec"]
    assert metadata["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
    (term,) = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term == {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-a"]}]}
    assert (spec["priorityClassName"], spec["tolerations"]) == ("sharepod-holder", [TOLERATED])


@pytest.mark.promise("placement-holder-pod")
def test_a_holder_has_no_token_and_is_fit_for_restricted_namespaces() -> None:
    spec = made()["spec"]
    assert spec["automountServiceAccountToken"] is False
    rights = spec["containers"][0]["securityContext"]
    assert rights["allowPrivilegeEscalation"] is False
    assert rights["capabilities"] == {"drop": ["ALL"]}
    assert (rights["runAsNonRoot"], rights["seccompProfile"]) == (True, {"type": "RuntimeDefault"})
