"""Only the pod that the ledger names, as the kubelet and the API server know it, gets a tenant's volume."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.agent.kubelet.csi.admission import (
    PodIdentity,
    VolumeRefusalReason,
    VolumeRefusedError,
    check_pod,
    choose_tenant,
    identify,
)
from sharepod.api.gpunode import Tenant, TenantState

NODE = "node-1"
WHO = PodIdentity(namespace="team", name="train", uid="pod-uid")


def context(**changes: str) -> dict[str, str]:
    return {
        "csi.storage.k8s.io/ephemeral": "true",
        "csi.storage.k8s.io/pod.namespace": "team",
        "csi.storage.k8s.io/pod.name": "train",
        "csi.storage.k8s.io/pod.uid": "pod-uid",
        **{f"csi.storage.k8s.io/{key.replace('_', '.')}": value for key, value in changes.items()},
    }


def pod(uid: str = "pod-uid", node: str | None = NODE, owners: list[dict[str, Any]] | None = None) -> dict[str, object]:
    return {"metadata": {"uid": uid, "ownerReferences": owners}, "spec": {"nodeName": node} if node else {}}


def row(**changes: Any) -> Tenant:
    fields = {
        "id": "tenant-a",
        "namespace": "team",
        "pod_name": "train",
        "gpus": ("GPU-0",),
        "request_milli": 400,
        "limit_milli": 1000,
        "memory": 1 << 30,
    }
    return Tenant(**{**fields, **changes})


@pytest.mark.promise("node-identity")
@pytest.mark.promise("security-own-volume")
def test_the_kubelet_says_who_the_pod_is() -> None:
    assert identify(context()) == WHO


@pytest.mark.parametrize(
    ("given_context", "advice"),
    [
        ({}, "through a SharePod"),
        (context(ephemeral="false"), "not through a PersistentVolumeClaim"),
        ({"csi.storage.k8s.io/ephemeral": "true"}, "podInfoOnMount: true"),
        (context(pod_uid=""), "podInfoOnMount: true"),
    ],
)
def test_a_volume_that_names_no_pod_is_malformed(given_context: dict[str, str], advice: str) -> None:
    with pytest.raises(VolumeRefusedError, match=advice) as refusal:
        identify(given_context)
    assert refusal.value.reason is VolumeRefusalReason.MALFORMED


def test_the_owner_is_the_controller_or_else_the_pod_itself() -> None:
    others: list[dict[str, Any]] = [{"uid": "other"}, {"uid": "not-it", "controller": False}]
    assert check_pod(pod(owners=[*others, {"uid": "tenant-a", "controller": True}]), WHO, NODE) == "tenant-a"
    assert check_pod(pod(owners=others), WHO, NODE) == "pod-uid"
    assert check_pod(pod(), WHO, NODE) == "pod-uid"


@pytest.mark.promise("node-pod-compared")
@pytest.mark.parametrize(
    ("found", "says"),
    [
        (pod(uid="made-again"), "is now another one"),
        (pod(node="node-2"), "belongs to node node-2"),
        (pod(node=None), "belongs to node None"),
        ({}, "is now another one"),
        ({"metadata": "nonsense"}, "is now another one"),
    ],
)
def test_another_pod_of_that_name_or_node_is_not_entitled(found: dict[str, object], says: str) -> None:
    with pytest.raises(VolumeRefusedError, match=says) as refusal:
        check_pod(found, WHO, NODE)
    assert refusal.value.reason is VolumeRefusalReason.NOT_ENTITLED


def test_the_row_of_the_pods_owner_entitles_it() -> None:
    mine = row()
    assert choose_tenant([row(id="b", pod_name="other"), mine], WHO, "tenant-a", NODE) == mine


def test_a_plain_pod_is_its_own_tenant() -> None:
    assert choose_tenant([row(id="pod-uid")], WHO, "pod-uid", NODE).id == "pod-uid"


@pytest.mark.parametrize(
    ("rows", "owner", "reason", "says"),
    [
        ([], "tenant-a", VolumeRefusalReason.NO_RESERVATION, "create a SharePod"),
        (
            [row(namespace="other")],
            "tenant-a",
            VolumeRefusalReason.NO_RESERVATION,
            "no share of a GPU is reserved on node node-1",
        ),
        ([row(pod_name="other")], "tenant-a", VolumeRefusalReason.NO_RESERVATION, "for pod team/train"),
        ([row()], "someone-else", VolumeRefusalReason.NOT_ENTITLED, "is SharePod tenant-a's"),
        ([row()], "pod-uid", VolumeRefusalReason.NOT_ENTITLED, "delete this pod"),
        ([row(state=TenantState.RELEASING)], "tenant-a", VolumeRefusalReason.NOT_ENTITLED, "is being released"),
    ],
)
def test_who_has_no_reservation_is_told_so(
    rows: list[Tenant], owner: str, reason: VolumeRefusalReason, says: str
) -> None:
    with pytest.raises(VolumeRefusedError, match=says) as refusal:
        choose_tenant(rows, WHO, owner, NODE)
    assert refusal.value.reason is reason


_names = st.sampled_from(["a", "b"])
_ids = st.sampled_from(["x", "y", "z"])


@pytest.mark.promise("node-identity", "security-identity")
@given(
    rows=st.lists(st.tuples(_ids, _names, _names, st.sampled_from(TenantState)), max_size=4, unique_by=lambda r: r[0]),
    namespace=_names,
    name=_names,
    owner=_ids,
)
def test_no_pod_ever_gets_a_tenant_that_is_not_reserved_under_its_own_name_for_its_own_owner(
    rows: list[tuple[str, str, str, TenantState]], namespace: str, name: str, owner: str
) -> None:
    ledger = [row(id=i, namespace=ns, pod_name=n, state=state) for i, ns, n, state in rows]
    entitled = (owner, namespace, name, TenantState.RESERVED) in rows
    try:
        tenant = choose_tenant(ledger, PodIdentity(namespace=namespace, name=name, uid="u"), owner, NODE)
    except VolumeRefusedError:
        assert not entitled
    else:
        assert entitled
        assert (tenant.id, tenant.namespace, tenant.pod_name) == (owner, namespace, name)
