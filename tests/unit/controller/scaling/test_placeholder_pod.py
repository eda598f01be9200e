"""Pods of placeholders: their requests, the Pods that they exclude, and shares that get no placeholder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sharepod.api.gpunode import Mode, SchedulingLabels
from sharepod.api.sharepod import GpuRequest
from sharepod.api.units import Bytes, Milli, TenantId
from sharepod.controller.scaling.placeholder_pod import PlaceholderSettings, new_node_helps, placeholder_pod
from sharepod.placement.state.types import (
    NodeRequirement,
    NodeSelectorTerm,
    Obstacle,
    Outlook,
    PlacementRequest,
    PodNeeds,
    Refusal,
    Resources,
    Toleration,
)

GIB = 1 << 30
NO_ROOM = Refusal(outlook=Outlook.WAITING, headline="no")
SETTINGS = PlaceholderSettings(namespace="system", image="pause", priority_class="sharepod-placeholder", with_line=True)
GPU = GpuRequest(request_milli=Milli(400), limit_milli=Milli(800), memory=Bytes(4 * GIB), count=2)


def request(gpu: GpuRequest = GPU, **needs: Any) -> PlacementRequest:
    return PlacementRequest(tenant=TenantId("t-1"), namespace="team", name="train", gpu=gpu, pod=PodNeeds(**needs))


def term(*expressions: NodeRequirement, fields: tuple[NodeRequirement, ...] = ()) -> NodeSelectorTerm:
    return NodeSelectorTerm(expressions=expressions, fields=fields)


ZONE = NodeRequirement("topology.kubernetes.io/zone", "In", ("a", "b"))
POOL = {"key": "sharepod.dev/pool", "operator": "In", "values": ["dedicated", "device-plugin"]}


def terms_of(pod: dict[str, Any]) -> list[Any]:
    affinity = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    return [one["matchExpressions"] for one in affinity["nodeSelectorTerms"]]


@pytest.mark.promise("operator-placeholder-asks")
def test_it_asks_for_the_line_and_for_what_the_pod_asks_of_a_node() -> None:
    gpu = {"key": "nvidia.com/gpu", "operator": "Exists"}
    asked = request(
        resources=Resources(1500, 2 * GIB, {"ephemeral-storage": 5}),
        node_selector={"kind": "big"},
        node_affinity_terms=(term(ZONE),),
        tolerations=(Toleration(**gpu),),
    )
    pod = placeholder_pod(replace(asked, siblings=(request(),)), SETTINGS)
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["limits"] == {
        "cpu": "1500m",
        "memory": str(2 * GIB),
        "ephemeral-storage": "5",
        "sharepod.dev/gpu-milli": "1600",
        "sharepod.dev/gpu-memory-mib": "16384",
    }
    assert pod["spec"]["nodeSelector"] == {"kind": "big"}
    assert pod["spec"]["tolerations"] == [gpu]
    zone = {"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["a", "b"]}
    assert terms_of(pod) == [[zone, POOL]]


@pytest.mark.promise("operator-placeholder-never-runs")
def test_it_names_no_scheduler_that_exists_and_has_no_claim_volume_or_gate() -> None:
    spec = placeholder_pod(request(), SETTINGS)["spec"]
    assert spec["schedulerName"] == "sharepod-placeholder"
    assert not {"resourceClaims", "volumes", "schedulingGates", "nodeName", "runtimeClassName"} & spec.keys()
    assert terms_of({"spec": spec}) == [[POOL]]
    kept_from = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    keys = [one["labelSelector"]["matchExpressions"][0]["key"] for one in kept_from]
    assert keys == ["sharepod.dev/tenant", "sharepod.dev/line"]
    assert all(one["namespaceSelector"] == {} for one in kept_from), "of every namespace"
    of_daemon_sets = [one["labelSelector"]["matchExpressions"][1] for one in kept_from]
    assert of_daemon_sets == [{"key": "pod-template-generation", "operator": "DoesNotExist"}] * 2, (
        "each new node has them"
    )


def test_without_lines_or_memory_it_carries_what_can_be_said() -> None:
    best_effort = replace(GPU, request_milli=Milli(0), memory=None)
    amounts = placeholder_pod(request(best_effort), SETTINGS)["spec"]["containers"][0]["resources"]["requests"]
    assert amounts == {"cpu": "1m", "memory": "1Mi"}
    without = placeholder_pod(request(), replace(SETTINGS, with_line=False))
    assert set(without["spec"]["containers"][0]["resources"]["requests"]) == {"cpu", "memory"}


def test_another_request_is_another_hash_and_the_same_one_is_not() -> None:
    def written(one: PlacementRequest) -> object:
        return placeholder_pod(one, SETTINGS)["metadata"]["annotations"]["sharepod.dev/placeholder-spec"]

    assert written(request()) == written(request())
    assert written(request()) != written(request(replace(GPU, count=1)))


@pytest.mark.promise("operator-placeholder-helps")
@pytest.mark.parametrize(
    "gpu",
    [
        replace(GPU, uuids=("GPU-1",)),
        replace(GPU, models=("A100",)),
        replace(GPU, labels=SchedulingLabels(affinity="group")),
    ],
)
def test_a_share_that_names_gpus_or_its_company_asks_for_none(gpu: GpuRequest) -> None:
    assert new_node_helps(request(), NO_ROOM)
    assert not new_node_helps(request(gpu), NO_ROOM)
    assert not new_node_helps(replace(request(), siblings=(request(gpu),)), NO_ROOM), "nor its sibling"


@pytest.mark.promise("operator-placeholder-helps")
def test_a_share_that_the_cap_on_exclusion_stops_asks_for_none() -> None:
    capped = replace(NO_ROOM, obstacles=(Obstacle("ExclusionCap", "GPU", 2, "are kept"),))
    assert not new_node_helps(request(), capped)
    assert new_node_helps(request(replace(GPU, mode=Mode.EXCLUSIVE)), NO_ROOM)


@pytest.mark.promise("operator-placeholder-helps")
def test_a_share_bound_to_nodes_by_name_asks_for_none_and_other_terms_go_without_names() -> None:
    by_name = NodeRequirement("kubernetes.io/hostname", "In", ("node-a",))
    not_there = NodeRequirement("kubernetes.io/hostname", "NotIn", ("node-a",))
    field = NodeRequirement("metadata.name", "In", ("node-a",))
    assert not new_node_helps(request(node_selector={"kubernetes.io/hostname": "node-a"}), NO_ROOM)
    assert not new_node_helps(request(node_affinity_terms=(term(by_name), term(ZONE, fields=(field,)))), NO_ROOM)
    mixed = request(node_affinity_terms=(term(by_name), term(ZONE, not_there)))
    assert new_node_helps(mixed, NO_ROOM)
    zone = {"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["a", "b"]}
    assert terms_of(placeholder_pod(mixed, SETTINGS)) == [[zone, POOL]], "Karpenter refuses a Pod that names hosts"
