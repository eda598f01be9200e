"""`resize` of Pods with a resource line and of claims: it waits for the operator's answer, on a cluster in memory."""

from __future__ import annotations

import pytest
from kubectl_sharepod.kubectl import Json, UsageError
from kubectl_sharepod.output import Page
from kubectl_sharepod.resize import resize

from .fleet import Memory, cluster, gpunode, row

CLAIM = "/apis/resource.k8s.io/v1/namespaces/team/resourceclaims/c"
EVENTS = "/api/v1/namespaces/team/events"
GPUNODE = "/apis/sharepod.dev/v1alpha1/gpunodes/node-a"
POD = "/api/v1/namespaces/team/pods/notebook"


def with_line(*, claim: bool) -> Memory:
    """Return a cluster with a Pod of a resource line that runs with request 0.2, with or without a claim."""
    kubectl = cluster()
    limits = {"sharepod.dev/gpu-milli": "400"}
    kubectl.objects[POD] = {
        "metadata": {"name": "notebook", "namespace": "team", "uid": "uid-notebook"},
        "spec": {"nodeName": "node-a", "containers": [{"name": "main", "resources": {"limits": limits}}]},
        "status": {"resourceClaimStatuses": [{"name": "sharepod", "resourceClaimName": "c"}]} if claim else {},
    }
    kubectl.objects[GPUNODE] = gpunode("node-a", {0: 0}, [row("notebook", (0,), 200, 8, door="Pod")])
    results = [{"driver": "gpu.sharepod.dev", "pool": "node-a", "device": "gpu-0"}]
    device: Json = {"conditions": [], "data": {"requestMilli": 200}}
    kubectl.objects[CLAIM] = {
        "metadata": {"name": "c"},
        "status": {"allocation": {"devices": {"results": results}}, "devices": [device]},
    }
    kubectl.objects[EVENTS] = {"items": []}
    return kubectl


def resized(kubectl: Memory, kind: str, name: str, answer: Json | None = None) -> Page:
    """Resize to 0.3. `answer`: objects as the operator changes them in the first pause."""

    def pause(_s: float) -> None:
        kubectl.objects.update(answer or {})

    return resize(kubectl, "team", kind, name, request="0.3", limit=None, memory=None, pause=pause)


def answered(milli: int, refusal: str = "") -> Json:
    resized = [{"type": "Resized", "status": "False", "message": refusal}] if refusal else []
    claim = with_line(claim=True).objects[CLAIM]
    claim["status"]["devices"] = [{"conditions": resized, "data": {"requestMilli": milli}}]
    return claim


@pytest.mark.parametrize(("kind", "name"), [("pod", "notebook"), ("claim", "c")])
def test_the_answer_about_a_claim_is_in_its_status(kind: str, name: str) -> None:
    page = resized(with_line(claim=True), kind, name, {CLAIM: answered(300)})
    assert (page.before, page.status) == ([f"{kind}/{name}: request 0.3"], 0)
    page = resized(with_line(claim=True), kind, name, {CLAIM: answered(200, "no room")})
    assert (page.before, page.status) == ([f"{kind}/{name} keeps its share: no room"], 1)
    page = resized(with_line(claim=True), kind, name)
    assert (page.before, page.status) == ([f"{kind}/{name}: the operator has not answered within 10 s"], 1)


def test_a_former_refusal_is_no_answer_while_another_may_come() -> None:
    kubectl = with_line(claim=True)
    kubectl.objects[CLAIM] = answered(200, "no room")
    assert resized(kubectl, "pod", "notebook", {CLAIM: answered(300)}).status == 0
    kubectl.objects[CLAIM] = answered(200, "no room")
    page = resized(kubectl, "pod", "notebook")
    assert (page.before, page.status) == (["pod/notebook keeps its share: no room"], 1)


def test_the_answer_about_a_pod_without_a_claim_is_its_row_or_an_event() -> None:
    granted = gpunode("node-a", {0: 0}, [row("notebook", (0,), 300, 8, door="Pod")])
    page = resized(with_line(claim=False), "pod", "notebook", {GPUNODE: granted})
    assert (page.before, page.status) == (["pod/notebook: request 0.3"], 0)
    event = {"metadata": {"uid": "e"}, "reason": "ResizeRefused", "message": "no room"}
    kubectl = with_line(claim=False)
    page = resized(kubectl, "pod", "notebook", {EVENTS: {"items": [event]}})
    assert (page.before, page.status) == (["pod/notebook keeps its share: no room"], 1)


def test_an_answer_that_the_user_may_not_read_is_not_reported_as_done() -> None:
    kubectl = with_line(claim=False)
    denied = Memory(objects=kubectl.objects, denied=("/apis/sharepod.dev/v1alpha1/gpunodes",))
    page = resized(denied, "pod", "notebook")
    assert page.status == 3
    assert "pod/notebook: request 0.3 is written; you may not read the answer: " in page.before[0]


def test_a_pod_whose_annotation_has_no_effect_is_refused() -> None:
    kubectl = with_line(claim=False)
    pod = kubectl.objects[POD]
    pod["metadata"]["ownerReferences"] = [{"kind": "SharePod", "name": "train"}]
    with pytest.raises(UsageError, match="belongs to SharePod train; write `kubectl sharepod resize train`"):
        resized(kubectl, "pod", "notebook")
    del pod["metadata"]["ownerReferences"], pod["spec"]["containers"][0]["resources"]
    with pytest.raises(UsageError, match="has no resource line; write NAME of its SharePod, or claim/NAME"):
        resized(kubectl, "pod", "notebook")
    assert kubectl.patches == []
