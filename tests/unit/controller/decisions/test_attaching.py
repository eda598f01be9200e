"""Choice of the way, CSI or claims, by which GPUs of new Pods are attached: by setting, API server and nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sharepod.api.claims.share_claims import Attach
from sharepod.api.gpunode import Pool
from sharepod.controller.decisions.attaching import AttachReason, AttachSituation, attaching
from sharepod.controller.state.facts.node_facts import GpuNodeFacts, gpunode_facts

GPU = {"uuid": "GPU-1", "index": 0, "model": "T", "memory": 1 << 34, "health": "Healthy", "shareable": True}


def node(
    name: str, status: str | None = "True", *, shown: str | None = "Attached", message: str = "", **more: Any
) -> GpuNodeFacts:
    """Return a GPUNode whose agent reports whether claims can be attached, and the result of its self-test. None: no
    report."""
    conditions = [] if status is None else [{"type": "CDIDevices", "status": status, "reason": "R", "message": message}]
    if shown is not None:
        of = {"Attached": "True", "NotAttached": "False"}.get(shown, "Unknown")
        conditions.append({"type": "ClaimsAttach", "status": of, "reason": shown, "message": message})
    metadata = {"name": name, "uid": f"uid-{name}", "resourceVersion": "1", "generation": 1}
    status_of = {"gpus": [GPU], "conditions": conditions, **more}
    return gpunode_facts({"metadata": metadata, "spec": {"pool": "dedicated"}, "status": status_of})


def situation(setting: Attach = Attach.AUTO, **known: Any) -> AttachSituation:
    return AttachSituation(**{"setting": setting, "served": True, "guarded": True, **known})


@pytest.mark.promise("operator-attach-auto")
@pytest.mark.parametrize(
    ("known", "nodes", "reason", "message"),
    [
        ({}, ["True", "True"], AttachReason.CLAIMS, "every node"),
        ({}, ["True", "Unknown"], AttachReason.CLAIMS, "every node"),
        ({}, ["True", "False"], AttachReason.NODE_CANNOT, "node node-1 cannot attach GPUs by claims: install it"),
        ({}, ["True", None], AttachReason.NODE_CANNOT, "node node-1 cannot attach GPUs by claims: its agent"),
        ({}, ["Unknown"], AttachReason.NODE_CANNOT, "no node"),
        ({}, [], AttachReason.NODE_CANNOT, "no node"),
        ({"served": False}, ["True"], AttachReason.NOT_SERVED, "1.34"),
        ({"guarded": False}, ["True"], AttachReason.POLICY_ABSENT, "manifests/claims"),
        ({"guarded": None}, ["True"], AttachReason.POLICY_ABSENT, "manifests/claims"),
        ({"not_honoured": "kube-scheduler refused"}, ["True"], AttachReason.NOT_HONOURED, "kube-scheduler refused"),
    ],
)
def test_auto_uses_claims_where_all_can_and_says_why_where_not(
    known: dict[str, Any], nodes: list[str | None], reason: AttachReason, message: str
) -> None:
    found = attaching(
        situation(**known), [node(f"node-{index}", status, message="install it") for index, status in enumerate(nodes)]
    )
    assert found.reason is reason
    assert found.by_claims is (reason is AttachReason.CLAIMS)
    assert message in found.message


def test_a_node_without_a_gpu_to_share_has_no_vote() -> None:
    nodes = [node("a"), node("b", "False", gpus=[{**GPU, "shareable": False}]), node("c", "False", gpus=[])]
    assert attaching(situation(), nodes).by_claims


def test_a_node_of_pool_scheduler_has_no_vote_because_it_runs_no_sharepods() -> None:
    theirs = node("b", "False")
    theirs = replace(theirs, spec=theirs.spec.model_copy(update={"pool": Pool.SCHEDULER}))
    assert attaching(situation(), [node("a"), theirs]).by_claims
    assert not attaching(situation(), [replace(node("a"), spec=theirs.spec)]).by_claims


@pytest.mark.parametrize("setting", [Attach.CLAIMS, Attach.CSI])
def test_an_explicit_setting_overrides_the_nodes_reports(setting: Attach) -> None:
    for known in ({}, {"served": False, "guarded": False, "not_honoured": "x"}):
        found = attaching(situation(setting, **known), [node("a", "False")])
        assert found.by_claims is (setting is Attach.CLAIMS)
        assert setting in found.message


@pytest.mark.promise("operator-attach-tested")
@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        ("Attached", AttachReason.CLAIMS),
        ("Starting", AttachReason.CLAIMS),
        ("NotAttached", AttachReason.NODE_CANNOT),
        ("NoSelfTest", AttachReason.NODE_CANNOT),
        (None, AttachReason.NODE_CANNOT),
    ],
)
def test_auto_uses_claims_where_a_container_was_seen_to_get_what_they_bring(
    shown: str | None, reason: AttachReason
) -> None:
    found = attaching(situation(), [node("node-1"), node("node-2", shown=shown, message="no CDI")])
    assert found.reason is reason
    assert found.by_claims or "node node-2 cannot attach GPUs by claims: " in found.message
    assert attaching(situation(), [node("node-2", shown="Starting")]).reason is AttachReason.NODE_CANNOT
