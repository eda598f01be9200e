"""Admission with only an API server and manifests/: which objects are refused, accepted and shown by kubectl."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from cluster.admission import GPUNODES, sharepod
from cluster.malformed import CASES
from cluster.malformed_case import CONTAINER, UUID, Case, nested
from harness.api import ApiError
from harness.cluster import Cluster
from harness.installation import POOL_LABEL, SHAREPODS
from sharepod.api.gpunode import Pool


@pytest.mark.promise("install-refusals")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title.replace(" ", "-"))
def test_a_refusal_names_the_field_and_the_mend(server: Cluster, case: Case) -> None:
    answer = server.kubectl("apply", "-f", "-", input=json.dumps(case.manifest()), check=False)
    output = answer.stdout + answer.stderr
    assert answer.returncode != 0, f"accepted: {output}"
    assert case.names in output
    assert case.mend in output


def test_a_refusal_blames_no_field_that_the_manifest_does_not_have(server: Cluster) -> None:
    with pytest.raises(ApiError) as refused:
        server.api.create(SHAREPODS, sharepod("too-much", {"request": 1.5}))
    assert "spec.gpu.request" in refused.value.message
    assert "spec.gpu.limit" not in refused.value.message


def test_a_misspelt_pool_is_refused_and_the_label_can_be_removed(server: Cluster) -> None:
    server.api.create("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "spelt"}})
    for pool in Pool:
        server.kubectl("label", "node", "spelt", "--overwrite", f"{POOL_LABEL}={pool}")
    answer = server.kubectl("label", "node", "spelt", "--overwrite", f"{POOL_LABEL}=dedicted", check=False)
    assert '"dedicted" is not a pool; write dedicated, device-plugin or scheduler' in answer.stderr
    server.kubectl("label", "node", "spelt", f"{POOL_LABEL}-")


def test_an_accepted_share_shows_in_the_printer_columns(server: Cluster) -> None:
    server.api.create(SHAREPODS, sharepod("columns", {"request": 0.25, "limit": 0.5, "memory": "4Gi"}))
    share = {"request": "0.25", "limit": "0.5", "memory": "4Gi"}
    shown = {"summary": "Running", "readyContainers": "1/1", "restarts": 2, "podIP": "10.0.0.1"}
    usage = {"heldMilli": 240, "memory": 1 << 30, "shown": "0.24", "memoryShown": "1Gi"}
    status = {"phase": "Running", "node": "node-0", "gpuIndexes": "0,1", "share": share, "usage": usage, **shown}
    server.api.patch(f"{SHAREPODS}/columns/status", {"status": status})
    header, row = server.kubectl("get", "shp", "columns").stdout.splitlines()
    asked = ["REQUEST", "LIMIT", "MEMORY", "NODE", "GPU", "AGE"]
    assert header.split() == ["NAME", "READY", "STATUS", "RESTARTS", "USED", *asked]
    words = ["columns", "1/1", "Running", "2", "0.24", "0.25", "0.5", "4Gi", "node-0", "0,1"]
    assert row.split()[:-1] == words
    wide, row = server.kubectl("get", "shp", "columns", "-o", "wide").stdout.splitlines()
    assert wide.split()[-4:] == ["PROGRESS", "IN-USE", "IP", "WHY"]
    assert "1Gi" in row.split()
    assert "10.0.0.1" in row
    everything = server.kubectl("get", "all").stdout
    assert "sharepod.sharepod.dev/columns" in everything
    assert "gpunode" not in everything, "a tenant may not see GPUNodes"


@pytest.mark.promise("operator-unseen")
def test_a_sharepod_that_no_operator_has_looked_at_yet_is_not_ready(server: Cluster) -> None:
    server.api.create(SHAREPODS, sharepod("unseen", {"request": 0.25}))
    unseen = server.api.get(f"{SHAREPODS}/unseen")
    assert unseen["status"] == {"observedGeneration": -1, "phase": "Pending", "summary": "Pending"}
    assert unseen["metadata"]["generation"] == 1, "kstatus: on its way, as the status is of another generation"
    assert "Pending" in server.kubectl("get", "shp", "unseen").stdout


@pytest.mark.parametrize(("field", "value"), [("containers", []), ("activeDeadlineSeconds", 0)])
def test_what_no_pod_can_be_made_of_is_refused_at_apply(server: Cluster, field: str, value: Any) -> None:
    with pytest.raises(ApiError) as refused:
        server.api.create(SHAREPODS, sharepod("unmade", {"request": 0.25}, **{field: value}))
    assert refused.value.code == 422
    assert f"spec.{field}" in refused.value.message


def test_a_port_under_two_names_and_a_variable_said_again_are_taken_as_of_a_pod(server: Cluster) -> None:
    ports = [{"containerPort": 80, "name": "web"}, {"containerPort": 80, "name": "metrics"}]
    env = [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]
    twice = {"name": "c", "image": "i", "ports": ports, "env": env}
    made = server.api.create(SHAREPODS, sharepod("twice", {"request": 0.25}, containers=[twice]))
    assert [item["name"] for item in made["spec"]["containers"][0]["ports"]] == ["web", "metrics"]


@pytest.mark.promise("operator-one-pod")
def test_a_sharepod_is_one_pod_and_says_so_to_who_wants_more(server: Cluster) -> None:
    made = server.api.create(SHAREPODS, sharepod("single", {"request": 0.25}))
    assert made["spec"]["replicas"] == 1
    with pytest.raises(ApiError) as refused:
        server.api.create(SHAREPODS, sharepod("double", {"request": 0.25}, replicas=2))
    assert "create as many SharePods as you need pods" in str(refused.value)
    scaled = server.kubectl("scale", "sharepod", "single", "--replicas=2", check=False)
    assert scaled.returncode != 0
    assert "create as many SharePods as you need pods" in scaled.stderr


def test_a_gpunode_shows_pool_and_agent(server: Cluster) -> None:
    server.api.create(
        GPUNODES, {"apiVersion": "sharepod.dev/v1alpha1", "kind": "GPUNode", "metadata": {"name": "shown"}, "spec": {}}
    )
    status = {
        "agentVersion": "0.1.0",
        "gpus": [{"uuid": UUID, "index": 0, "model": "A100", "memory": 1}],
        "conditions": [{"type": "AgentReady", "status": "True", "reason": "Running"}],
        "gpuCount": 1,
        "tenantCount": 2,
        "reserved": "0.9",
    }
    server.api.patch(f"{GPUNODES}/shown/status", {"status": status})
    header, row = server.kubectl("get", "gn", "shown").stdout.splitlines()
    assert header.split() == ["NAME", "POOL", "MODEL", "GPUS", "RESERVED", "TENANTS", "READY", "AGENT", "AGE"]
    assert row.split()[:-1] == ["shown", "dedicated", "A100", "1", "0.9", "2", "True", "0.1.0"]


@pytest.mark.promise("operator-unknown-fields")
def test_an_unknown_field_is_refused_by_name_and_never_stored(server: Cluster) -> None:
    body = sharepod("unknown", {"request": 0.5, "colour": "red"}, futureField={"deep": nested(300)})
    body["spec"]["containers"][0]["futureProbe"] = {"period": 3}
    with pytest.raises(ApiError) as refused:
        server.api.create(SHAREPODS, body, fieldValidation="Strict")
    for name in ("spec.futureField", "spec.gpu.colour", "spec.containers[0].futureProbe"):
        assert f'unknown field "{name}"' in refused.value.message
    made = server.api.create(SHAREPODS, body, fieldValidation="Ignore")
    assert set(made["spec"]) == {"gpu", "replicas", "containers"}
    assert "futureProbe" not in made["spec"]["containers"][0]
    assert "colour" not in made["spec"]["gpu"]


@pytest.mark.promise("operator-explain")
def test_kubectl_explains_each_field_of_ours_and_points_to_the_pods(server: Cluster) -> None:
    def explained(field: str) -> str:
        return " ".join(server.kubectl("explain", f"sharepod.{field}").stdout.split())

    assert "Guaranteed fraction of each GPU's time, 0 to 1, to 3 decimals." in explained("spec.gpu.request")
    assert "it may use all idle time" in explained("spec.gpu.limit")
    assert "Seconds from the SharePod's end to its deletion" in explained("spec.ttlSecondsAfterFinished")
    assert "STATUS as kubectl get shows it" in explained("status.summary")
    assert "Earliest start of the next run." in explained("status.lastEnd.retryAt")
    assert "kubectl explain pod.spec.tolerations" in explained("spec.tolerations")
    assert "A list of containers" not in explained("spec.containers"), "the PodSpec's own texts are not repeated"


@pytest.mark.promise("operator-limit-default")
def test_the_limit_is_a_whole_gpu_where_none_is_written(server: Cluster) -> None:
    for name, gpu in (("limitless", {"request": 0.4}), ("alone", {"mode": "Exclusive"})):
        made = server.api.create(SHAREPODS, sharepod(name, gpu))
        assert made["spec"]["gpu"]["limit"] == 1
    server.api.patch(f"{SHAREPODS}/limitless", {"spec": {"gpu": {"limit": 0.5}}})
    assert server.api.patch(f"{SHAREPODS}/limitless", {"spec": {"gpu": {"limit": None}}})["spec"]["gpu"]["limit"] == 1
    written = {"sharepod.dev/gpu-mode": "Exclusive", "sharepod.dev/gpu-limit": "1"}
    server.api.create(SHAREPODS, sharepod("alone-too", annotations=written))


def test_the_largest_sharepod_of_the_bounds_is_within_the_cost_budget_of_the_rules(server: Cluster) -> None:
    """Each list has its greatest length by the schema. Larger objects would exceed etcd's limit."""
    mounts = [{"name": "v", "mountPath": f"/{'m' * 100}{number}"} for number in range(80)]
    asked = {f"example.com/{'r' * 40}{number}": 1 for number in range(8)}
    containers = [
        {**CONTAINER, "name": f"c{number}", "volumeMounts": mounts, "resources": {"limits": asked, "requests": asked}}
        for number in range(64)
    ]
    volumes = [{"name": f"v{number}", "emptyDir": {}} for number in range(1_024)]
    tolerations = [{"key": f"k{number}", "operator": "Exists"} for number in range(64)]
    annotations = {f"example.com/a{number}": "x" * 50 for number in range(1_000)}
    body = sharepod("largest", {"request": 0.5}, annotations, volumes=volumes, tolerations=tolerations)
    body["spec"]["containers"] = containers
    server.api.create(SHAREPODS, body, dryRun="All")


def test_a_quantity_may_be_a_plain_number_as_in_a_pod(server: Cluster) -> None:
    resources = {"requests": {"cpu": 0.5, "memory": 1000000}}
    body = sharepod("numbers", {"request": 0.5}, containers=[{**CONTAINER, "resources": resources}])
    assert server.api.create(SHAREPODS, body)["spec"]["containers"][0]["resources"] == resources


def test_policies_type_check_without_warnings(server: Cluster) -> None:
    """Copies of the policies without bindings are checked. The API server checks a policy once, and the originals may
    be older than the schema."""
    path = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
    policies = server.api.get(path)["items"]
    assert len(policies) >= 11, "policies of claims are included once the tests of claims have run"
    for policy in policies:
        metadata = {"name": f"copy-of-{policy['metadata']['name']}"}
        server.api.create(path, {**policy, "metadata": metadata, "status": {}})
    found: dict[str, object] = {}
    try:
        end = time.monotonic() + 120
        while len(found) < len(policies) and time.monotonic() < end:
            copies = [one for one in server.api.get(path)["items"] if one["metadata"]["name"].startswith("copy-of-")]
            found = {
                one["metadata"]["name"]: one["status"]["typeChecking"]
                for one in copies
                if "typeChecking" in (one.get("status") or {})
            }
            time.sleep(0.2)
    finally:
        for policy in policies:
            server.api.delete(f"{path}/copy-of-{policy['metadata']['name']}")
    assert found == {f"copy-of-{policy['metadata']['name']}": {} for policy in policies}
