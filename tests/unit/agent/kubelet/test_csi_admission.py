"""Admission of volumes: only the pod that the ledger names, by the kubelet's name and UID of it, gets a
tenant's volume."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.agent.kubelet.csi.admission import (
    PodIdentity,
    VolumeRefusalReason,
    VolumeRefusedError,
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


def row(**changes: Any) -> Tenant:
    fields = {
        "id": "tenant-a",
        "namespace": "team",
        "pod_name": "train",
        "pod_uid": "pod-uid",
        "gpus": ("GPU-0",),
        "request_milli": 400,
        "limit_milli": 1000,
        "memory": 1 << 30,
    }
    return Tenant(**{**fields, **changes})


@pytest.mark.promise("node-identity")
@pytest.mark.promise("security-own-volume")
def test_the_pods_identity_comes_from_the_kubelet() -> None:
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


def test_the_row_with_the_pods_name_and_uid_entitles_it() -> None:
    mine = row()
    assert choose_tenant([row(id="b", pod_name="other"), mine], WHO, NODE) == mine


@pytest.mark.promise("node-pod-compared")
@pytest.mark.parametrize(
    ("rows", "reason", "message"),
    [
        ([], VolumeRefusalReason.NO_RESERVATION, "create a SharePod"),
        ([row(namespace="other")], VolumeRefusalReason.NO_RESERVATION, "no share of a GPU is reserved on node node-1"),
        ([row(pod_name="other")], VolumeRefusalReason.NO_RESERVATION, "for pod team/train"),
        ([row(pod_uid="made-again")], VolumeRefusalReason.NO_RESERVATION, "for the pod with UID made-again"),
        ([row(pod_uid=None)], VolumeRefusalReason.NO_RESERVATION, "names no pod yet"),
        ([row(state=TenantState.RELEASING)], VolumeRefusalReason.NOT_ENTITLED, "is being released"),
    ],
)
def test_a_pod_without_reservation_gets_a_message(
    rows: list[Tenant], reason: VolumeRefusalReason, message: str
) -> None:
    with pytest.raises(VolumeRefusedError, match=message) as refusal:
        choose_tenant(rows, WHO, NODE)
    assert refusal.value.reason is reason


_names = st.sampled_from(["a", "b"])
_ids = st.sampled_from(["x", "y", "z"])
_uids = st.sampled_from(["u", "v", None])


@pytest.mark.promise("node-identity", "security-identity")
@given(
    rows=st.lists(
        st.tuples(_ids, _names, _names, _uids, st.sampled_from(TenantState)), max_size=4, unique_by=lambda r: r[0]
    ),
    namespace=_names,
    name=_names,
)
def test_no_pod_ever_gets_a_tenant_that_is_not_reserved_for_it_by_name_and_uid(
    rows: list[tuple[str, str, str, str | None, TenantState]], namespace: str, name: str
) -> None:
    ledger = [row(id=i, namespace=ns, pod_name=n, pod_uid=uid, state=state) for i, ns, n, uid, state in rows]
    states = [state for _, ns, n, uid, state in rows if (ns, n, uid) == (namespace, name, "u")]
    try:
        tenant = choose_tenant(ledger, PodIdentity(namespace=namespace, name=name, uid="u"), NODE)
    except VolumeRefusedError:
        assert states[:1] != [TenantState.RESERVED]
    else:
        assert tenant.state is TenantState.RESERVED
        assert (tenant.namespace, tenant.pod_name, tenant.pod_uid) == (namespace, name, "u")
