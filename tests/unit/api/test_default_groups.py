"""Default groups of Pods."""

from __future__ import annotations

from typing import Any

import pytest
from sharepod.api.default_groups import default_group
from sharepod.api.sharepod import NO_GROUP, GpuRequest
from sharepod.api.units import Milli, TenantId
from sharepod.placement.state.types import PlacementRequest

INDEXED = {"batch.kubernetes.io/job-completion-index": "0"}
JOB_SET = {"jobset.sigs.k8s.io/jobset-name": "train"}


def pod(kind: str | None, api: str = "batch/v1", uid: str = "u", **metadata: Any) -> dict[str, Any]:
    owners: list[dict[str, Any]] = [{"apiVersion": "v1", "kind": "Other", "uid": "x"}]
    if kind is not None:
        owners.append({"apiVersion": api, "kind": kind, "name": "n", "uid": uid, "controller": True})
    return {"name": "p", "ownerReferences": owners} | metadata


@pytest.mark.promise("placement-default-group")
@pytest.mark.parametrize(
    ("metadata", "group"),
    [
        (pod("Job", annotations=INDEXED), "Job/u"),
        (pod("Job"), None),
        (pod("Job", annotations=INDEXED, labels=JOB_SET), "JobSet/train"),
        (pod("Job", labels=JOB_SET), "JobSet/train"),
        (pod("PyTorchJob", "kubeflow.org/v1"), "PyTorchJob/u"),
        (pod("ReplicaSet", "apps/v1", annotations=INDEXED, labels=JOB_SET), None),
        (pod(None, annotations=INDEXED), None),
    ],
)
def test_pods_of_one_training_are_a_group(metadata: dict[str, Any], group: str | None) -> None:
    assert default_group(metadata) == group


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"ownerReferences": "Job"},
        {"ownerReferences": [None, 1, {"controller": True}]},
        pod("Job", annotations=["batch.kubernetes.io/job-completion-index"], labels=7),
        pod("Job", labels={"jobset.sigs.k8s.io/jobset-name": {}}),
    ],
)
def test_metadata_that_is_none_is_in_no_group(metadata: dict[str, Any]) -> None:
    assert default_group(metadata) is None


def test_a_group_is_as_long_as_a_row_takes() -> None:
    assert len(default_group(pod("Job", uid="u" * 500, annotations=INDEXED)) or "") == 80


@pytest.mark.promise("placement-default-group")
@pytest.mark.parametrize(
    ("named", "default", "group"),
    [(None, "Job/u", "Job/u"), ("own", "Job/u", "own"), (NO_GROUP, "Job/u", None), ("none", "Job/u", None)],
)
def test_a_named_group_replaces_the_default_and_none_turns_it_off(
    named: str | None, default: str, group: str | None
) -> None:
    asked = GpuRequest(request_milli=Milli(500), limit_milli=Milli(1000), memory=None, group=named)
    request = PlacementRequest(tenant=TenantId("t"), namespace="n", name="p", gpu=asked, default_group=default)
    assert request.group == group
