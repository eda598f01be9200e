"""Policies on Pods: the volume, the label and the controller of SharePod's Pods, and their debug containers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cluster.admission import PODS, as_user, pod_of, refusal, sharepod
from cluster.malformed_case import CONTAINER
from cluster.test_template_warnings import workload_of
from harness.api import ApiError, Object
from harness.cluster import Cluster, wait_until
from harness.installation import NAMESPACE, SHAREPODS
from sharepod.api.pods.pod import open_gate


def volume_pod(name: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "containers": [dict(CONTAINER)],
            "volumes": [{"name": "mine", "csi": {"driver": "gpu.sharepod.dev", "readOnly": True}}],
        },
    }


@pytest.mark.promise("security-identity", "security-own-volume")
def test_a_users_pod_cannot_carry_our_volume_and_the_operators_can(server: Cluster, alice: Path) -> None:
    code, answer = as_user(server, alice, "apply", "-f", "-", body=volume_pod("forged"))
    assert code != 0
    assert "spec.volumes[mine]" in answer
    assert "create a SharePod in place of this pod" in answer
    operator = server.api_for(server.service_account_token(NAMESPACE, "sharepod-operator"))
    operator.create(PODS, pod_of(server, "made"))


@pytest.mark.promise("security-create-pods")
def test_who_may_not_create_pods_may_not_create_sharepods(server: Cluster) -> None:
    role = ("create", "role", "sharepods-alone", "--verb=*", "--resource=sharepods.sharepod.dev", "--namespace=default")
    server.kubectl(*role)
    server.kubectl(
        "create", "rolebinding", "mallory", "--role=sharepods-alone", "--user=mallory", "--namespace=default"
    )
    mallory = server.user_kubeconfig("mallory")
    code, answer = as_user(
        server, mallory, "create", "--dry-run=server", "-f", "-", body=sharepod("loot", {"request": 0.4})
    )
    assert code != 0
    refused = "mallory may not create pods in namespace default; ask for the right to create pods"
    assert refused in answer

    # The user cannot create a SharePod by an apply either, nor with a name that the API server generates.
    unnamed = sharepod("loot", {"request": 0.4})
    unnamed["metadata"] = {"generateName": "loot-", "namespace": "default"}
    for verb, body in (("apply --server-side", sharepod("loot", {"request": 0.4})), ("create", unnamed)):
        code, answer = as_user(server, mallory, *verb.split(), "--dry-run=server", "-f", "-", body=body)
        assert refused in answer, verb

    # Of an existing SharePod, the user can change nothing that determines the rights of its Pod.
    server.api.create(SHAREPODS, sharepod("present", {"request": 0.4}))
    for field, value in (
        ("serviceAccountName", "admin"),
        ("hostNetwork", True),
        ("priorityClassName", "system-node-critical"),
        ("volumes", [{"name": "host", "hostPath": {"path": "/"}}]),
        ("containers", [{"name": "main", "image": "another"}]),
    ):
        patch = ("patch", "sharepod", "present", "--namespace=default", "--type=merge", "--dry-run=server", "-p")
        code, answer = as_user(server, mallory, *patch, json.dumps({"spec": {field: value}}))
        assert code != 0, field
        assert f"spec.{field}: " in answer
        assert "cannot be changed" in answer

    # Nor can the user change labels and annotations that the next run's Pod gets: an annotation may be an identity, a
    # label may select a network policy.
    for change, allowed in (
        ({"annotations": {"iam.amazonaws.com/role": "admin"}}, False),
        ({"labels": {"role": ""}}, False),
        ({"annotations": {"sharepod.dev/mine": "x"}, "labels": {"sharepod.dev/mine": "x"}}, True),
    ):
        code, answer = as_user(server, mallory, *patch, json.dumps({"metadata": change}))
        explained = "on the Pod of the next run, and mallory may not create pods" in answer
        assert (code == 0, explained) == (allowed, not allowed), answer
    server.api.delete(f"{SHAREPODS}/present")


@pytest.mark.promise("security-user-policies")
def test_a_policy_keyed_to_users_sees_the_user_who_creates_a_sharepod(server: Cluster, alice: Path) -> None:
    name, api = "keyed-to-users", "/apis/admissionregistration.k8s.io/v1"
    rules = [
        {"apiGroups": [group], "apiVersions": ["*"], "operations": ["CREATE"], "resources": [resource]}
        for group, resource in (("", "pods"), ("sharepod.dev", "sharepods"))
    ]
    denied = {
        "expression": "request.userInfo.username != 'alice' || !object.spec.?hostNetwork.orValue(false)",
        "message": "alice has no host network",
    }
    spec = {"matchConstraints": {"resourceRules": rules}, "validations": [denied]}
    binding = {"policyName": name, "validationActions": ["Deny"]}
    for kind, made in (("ValidatingAdmissionPolicy", spec), ("ValidatingAdmissionPolicyBinding", binding)):
        plural = "validatingadmissionpolic" + ("ybindings" if kind.endswith("Binding") else "ies")
        body = {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": kind,
            "metadata": {"name": name},
            "spec": made,
        }
        server.api.create(f"{api}/{plural}", body)
    share = {"request": 0.4}

    def answer(network: bool) -> str:
        body = sharepod("networked", share, hostNetwork=network)
        return as_user(server, alice, "create", "--dry-run=server", "-f", "-", body=body)[1]

    wait_until(lambda: "alice has no host network" in answer(True), what="the policy is enforced", timeout=30)
    assert "created" in answer(False)
    plain = volume_pod("networked")
    plain["spec"] = {"containers": [dict(CONTAINER)], "hostNetwork": True}
    code, text = as_user(server, alice, "create", "--dry-run=server", "-f", "-", body=plain)
    assert code
    assert "alice has no host network" in text
    server.api.create(SHAREPODS, sharepod("networked", share, hostNetwork=True), dryRun="All")
    server.api.delete(f"{api}/validatingadmissionpolicybindings/{name}")
    server.api.delete(f"{api}/validatingadmissionpolicies/{name}")


@pytest.mark.promise("operator-annotation-alone")
def test_a_plain_pod_that_asks_by_annotation_alone_is_refused(server: Cluster, alice: Path) -> None:
    body = volume_pod("asks")
    body["spec"].pop("volumes")
    for key in ("gpu-request", "gpu_request", "sched_affinity", "GPUID"):
        body["metadata"]["annotations"] = {f"sharepod.dev/{key}": "0.4"}
        code, answer = as_user(server, alice, "create", "--dry-run=server", "-f", "-", body=body)
        assert code != 0
        assert f"metadata.annotations[sharepod.dev/{key}]: gives a pod no GPU by itself" in answer
        assert "write resources.limits[sharepod.dev/gpu-milli]" in answer
    body["metadata"]["annotations"] = {"sharepod.dev/note": "no request", "example.com/gpu-request": "0.4"}
    code, answer = as_user(server, alice, "create", "--dry-run=server", "-f", "-", body=body)
    assert code == 0, answer


@pytest.mark.promise("operator-annotation-of-workload")
@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet", "DaemonSet", "Job", "CronJob"])
def test_a_workload_that_asks_by_annotation_alone_is_warned_of(server: Cluster, kind: str) -> None:
    key = "sharepod.dev/gpu-request"
    plain = {"containers": [dict(CONTAINER)]}
    line = {"containers": [{**CONTAINER, "resources": {"limits": {"sharepod.dev/gpu-milli": "400"}}}]}

    def warned(spec: Object, annotations: Object, own: Object) -> str:
        body = workload_of(kind, {"metadata": {"annotations": annotations}, "spec": spec})
        body["metadata"]["annotations"] = own
        return server.kubectl("create", "--dry-run=server", "-f", "-", input=json.dumps(body)).stderr

    alone = warned(plain, {key: "0.4"}, {})
    assert (
        f"the Pods of this {kind} would be refused: metadata.annotations[{key}]: gives a pod no GPU by itself" in alone
    )
    assert len(alone.splitlines()) == 1
    outside = warned(line, {}, {key: "0.4"})
    where = "spec.jobTemplate.spec.template" if kind == "CronJob" else "spec.template"
    assert (
        f"metadata.annotations[{key}]: has no effect on a {kind}; write it in {where}.metadata.annotations" in outside
    )
    for spec, right in ((plain, {}), (plain, {"sharepod.dev/note": "a"}), (line, {key: "0.3"})):
        assert warned(spec, right, {}) == ""


@pytest.mark.promise("security-debug-container")
def test_debug_containers_of_our_pods_get_no_gpu(server: Cluster) -> None:
    server.api.create(PODS, volume_pod("debugged"))
    plain = volume_pod("plain")
    plain["spec"].pop("volumes")
    server.api.create(PODS, plain)

    def debug(pod: str, *env: dict[str, str]) -> None:
        container = {"name": f"debug-{len(env)}", "image": "cuda", "env": list(env)}
        server.api.patch(
            f"{PODS}/{pod}/ephemeralcontainers",
            {"spec": {"ephemeralContainers": [container]}},
            content_type="application/strategic-merge-patch+json",
        )

    debug("plain")
    for env in ((), ({"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},)):
        with pytest.raises(ApiError) as refused:
            debug("debugged", *env)
        assert "--env=NVIDIA_VISIBLE_DEVICES=void" in refused.value.message
    debug("debugged", {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"})
    debug("debugged", {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}, {"name": "A", "value": "b"})


@pytest.mark.promise("security-identity", "security-tenant-label", "security-own-volume")
def test_the_tenant_label_is_the_operators_to_give_and_no_ones_to_change(server: Cluster, alice: Path) -> None:
    body = volume_pod("labelled")
    body["spec"].pop("volumes")
    body["metadata"]["labels"] = {"sharepod.dev/tenant": "someone"}
    code, answer = as_user(server, alice, "apply", "-f", "-", body=body)
    assert code != 0
    assert "metadata.labels[sharepod.dev/tenant]: is put on the pods of SharePods alone" in answer
    server.api.create(PODS, body)
    for value in ("another", None):
        message = refusal(server.api, f"{PODS}/labelled", {"metadata": {"labels": {"sharepod.dev/tenant": value}}})
        assert "cannot be changed; delete the SharePod to end this pod" in message
    server.api.patch(f"{PODS}/labelled", {"metadata": {"labels": {"app": "x"}}})
    code, answer = as_user(server, alice, "run", "unlabelled", "--image=x")
    assert code == 0, answer
    code, answer = as_user(server, alice, "label", "pod", "unlabelled", "sharepod.dev/tenant=someone")
    assert code != 0
    assert "cannot be changed" in answer


def test_a_sharepods_pod_cannot_be_given_to_another_controller(server: Cluster) -> None:
    def owners(uid: str) -> list[dict[str, object]]:
        return [{"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": uid, "controller": True}]

    owner = server.api.create(
        "/api/v1/namespaces/default/configmaps",
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owner"}},
    )
    body = volume_pod("owned")
    body["spec"].pop("volumes")
    body["metadata"] |= {"labels": {"sharepod.dev/tenant": "mine"}, "ownerReferences": owners(owner["metadata"]["uid"])}
    server.api.create(PODS, body)
    merge = {"metadata": {"ownerReferences": owners("victim")}}
    assert "cannot be given to another controller" in refusal(server.api, f"{PODS}/owned", merge)
    server.api.patch(f"{PODS}/owned", {"metadata": {"labels": {"app": "x"}}})
    server.api.patch(f"{PODS}/owned", {"metadata": {"ownerReferences": None}})
    assert "cannot be given to another controller" in refusal(server.api, f"{PODS}/owned", merge)


def test_whoever_has_the_operators_token_changes_neither_tenant_nor_controller_of_a_pod(server: Cluster) -> None:
    operator = server.api_for(server.service_account_token(NAMESPACE, "sharepod-operator"))
    owners = [{"apiVersion": "v1", "kind": "ConfigMap", "name": "taker", "uid": "taker", "controller": True}]
    for name, labels in (("operators", {"sharepod.dev/tenant": "mine"}), ("strangers", {})):
        body = volume_pod(name)
        body["spec"].pop("volumes")
        body["metadata"]["labels"] = labels
        server.api.create(PODS, body)
    merge = {"metadata": {"ownerReferences": owners}}
    for value in ("another", "line"):
        relabelled = {"metadata": {"labels": {"sharepod.dev/tenant": value}}}
        answer = refusal(operator, f"{PODS}/operators", relabelled)
        assert "may neither change the label" in answer or "cannot be changed" in answer
        assert refusal(operator, f"{PODS}/strangers", relabelled)
    assert refusal(operator, f"{PODS}/operators", {"metadata": {"labels": {"sharepod.dev/tenant": None}}})
    assert "nor give a SharePod's pod to another controller" in refusal(operator, f"{PODS}/operators", merge)
    operator.patch(f"{PODS}/operators", {"metadata": {"annotations": {"sharepod.dev/gpus": "void"}}})


@pytest.mark.promise("security-ledger")
def test_the_gate_and_the_gpus_of_a_sharepods_pod_are_the_operators_alone(server: Cluster, alice: Path) -> None:
    operator = server.api_for(server.service_account_token(NAMESPACE, "sharepod-operator"))
    body = volume_pod("gated")
    body["metadata"] |= {"labels": {"sharepod.dev/tenant": "mine"}, "annotations": {"sharepod.dev/gpus": "void"}}
    body["spec"]["schedulingGates"] = [{"name": "sharepod.dev/share"}, {"name": "team.example/approved"}]
    uid = server.api.create(PODS, body)["metadata"]["uid"]
    code, answer = as_user(server, alice, "annotate", "pod", "gated", "sharepod.dev/gpus=all", "--overwrite")
    assert code != 0
    assert "metadata.annotations[sharepod.dev/gpus]: names the GPUs" in answer
    code, answer = as_user(server, alice, "annotate", "pod", "gated", "sharepod.dev/gpus-")
    assert code != 0
    for index, opens in ((0, True), (1, False)):
        patch = f'[{{"op": "remove", "path": "/spec/schedulingGates/{index}"}}]'
        code, answer = as_user(server, alice, "patch", "pod", "gated", "--type=json", "-p", patch)
        assert (code != 0) is opens, answer
        assert ("is removed automatically once the SharePod has a share" in answer) is opens
    opened = operator.patch(
        f"{PODS}/gated",
        open_gate(uid, ["sharepod.dev/share"], None, "node-0", ["GPU-1"]),
        content_type="application/json-patch+json",
    )
    assert "schedulingGates" not in opened["spec"]
    assert opened["metadata"]["annotations"]["sharepod.dev/gpus"] == "GPU-1"
