"""Plain Pods with a resource line in a cluster without claims. The operator's webhook adds a gate and a CSI volume. The
operator places the Pod, writes its row and opens the gate. The real kube-scheduler binds it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from cluster.admission import as_user
from cluster.audit import Audit
from cluster.claims_world import runs
from cluster.fake_agents import FakeAgents
from cluster.operator_world import AGENT_LEASE, GIB, TIMES, World, gpu_uuid, wait
from cluster.plain_webhook_world import start_with_webhook
from cluster.plain_world import answer, container, line_pod
from cluster.test_admission_plain_pods import FORGED as FORGED_LINES
from cluster.test_admission_plain_pods import REFUSED, TAKEN
from harness.api import ApiError, Object
from harness.cluster import Cluster
from harness.fakes import FakeKubelets

GATE = {"name": "sharepod.dev/share"}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with (
        Cluster() as cluster,
        FakeKubelets(cluster.api) as kubelets,
        FakeAgents(cluster.api, duration=AGENT_LEASE, renew=0.5) as agents,
    ):
        world = World(cluster, kubelets, agents, {**TIMES, "SHAREPOD_ATTACH": "csi"})
        start_with_webhook(world, "plain-volume")
        yield world
        assert not kubelets.failures, kubelets.failures[:3]
        assert not agents.failures


def start(world: World, namespace: str, name: str, *containers: Object, on: str, **options: object) -> Object:
    """Create a Pod with a line, on nodes with the label `test=ON`."""
    body = line_pod(*containers, name=name, nodeSelector={"test": on}, **options)  # type: ignore[arg-type]
    made: Object = world.api.create(f"/api/v1/namespaces/{namespace}/pods", body)
    return made


@pytest.mark.promise("operator-line-volume")
def test_a_line_becomes_a_gate_and_a_volume_and_gets_its_share(world: World) -> None:
    (node,) = world.nodes("vol")
    namespace = world.cluster.namespace("vol")
    sidecar = {"name": "sidecar", "image": "test"}
    made = start(
        world,
        namespace,
        "one",
        container(milli="400", mib="4096"),
        sidecar,
        on="vol",
        annotations={"sharepod.dev/gpu-limit": "0.8"},
    )
    assert made["metadata"]["labels"]["sharepod.dev/tenant"] == "line"
    assert made["spec"]["schedulingGates"] == [GATE]
    assert made["spec"]["runtimeClassName"] == "nvidia"
    first, second = made["spec"]["containers"]
    ours = [mount for mount in first["volumeMounts"] if mount["name"] == "sharepod-gpu"]
    assert [mount["mountPath"] for mount in ours] == ["/run/sharepod", "/etc/ld.so.preload"]
    assert [entry["name"] for entry in first["env"]] == ["NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"]
    assert second["env"] == [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]
    pod = runs(world, namespace, "one")
    assert (pod["spec"]["nodeName"], pod["metadata"]["annotations"]["sharepod.dev/gpus"]) == (node, gpu_uuid(node, 0))
    row = world.row(node, "one")
    assert row is not None
    assert (row["id"], row["podUID"]) == (pod["metadata"]["uid"], pod["metadata"]["uid"])
    assert (row["requestMilli"], row["limitMilli"], row["memory"]) == (400, 800, 4 * GIB)
    assert row.get("claim") is None


@pytest.mark.promise("operator-line-volume-end")
def test_the_share_ends_with_its_pod_and_the_next_one_gets_it(world: World) -> None:
    (node,) = world.nodes("vnext")
    namespace = world.cluster.namespace("vnext")
    names = ("one", "two", "three")
    for name in names:
        start(world, namespace, name, container(milli="900"), on="vnext")

    def bound() -> list[str]:
        return [name for name in names if (world.pod(namespace, name) or {})["spec"].get("nodeName")]

    wait(lambda: len(bound()) == 2, what="one on each of two GPUs")
    (waiting,) = set(names) - set(bound())
    note = world.event(namespace, waiting, "NoRoom")
    assert "sharepod.dev/gpu-milli: 100 would fit now" in note
    assert not [word for word in ("timeMilli", "spec.gpu", "claim ") if word in note]
    assert (world.pod(namespace, waiting) or {})["spec"]["schedulingGates"] == [GATE]
    assert len(world.rows(node)) == 2
    world.api.delete(f"/api/v1/namespaces/{namespace}/pods/{bound()[0]}")
    runs(world, namespace, waiting)
    assert len(world.rows(node)) == 2


@pytest.mark.promise("operator-line-volume-end")
def test_one_deleted_behind_its_gate_leaves_nothing(world: World) -> None:
    world.nodes("vgate")
    namespace = world.cluster.namespace("vgate")
    start(world, namespace, "unplaced", on="nowhere")
    world.event(namespace, "unplaced")
    world.api.delete(f"/api/v1/namespaces/{namespace}/pods/unplaced")
    wait(lambda: world.pod(namespace, "unplaced") is None, what="the Pod is deleted")


@pytest.mark.promise("operator-line-volume-refused")
def test_what_cannot_be_meant_is_refused_as_ever(world: World) -> None:
    for name, body in TAKEN.items():
        assert answer(world.api, body) == "", name
    for name, (body, field) in REFUSED.items():
        assert field in answer(world.api, body), name
    for name in ("a node of its choice", "a plugin's GPU next to the line", "a mount over the socket", "a fraction"):
        body, field = FORGED_LINES[name]
        assert field in answer(world.api, body), name
    over_the_hook, _ = FORGED_LINES["a mount over the hook"]
    assert "volumeMounts[3].mountPath" in answer(world.api, over_the_hook), "there would be two"
    left_out = world.cluster.namespace("v-left-out", labels={"sharepod.dev/plain-pods": "disabled"})
    assert "was not turned into a share" in answer(world.api, line_pod(), left_out)
    assert "gives no share in namespace v-left-out" in answer(world.api, translated(world), left_out)


def translated(world: World, **options: object) -> Object:
    """Return a Pod as the webhook changes it, without the fields that would prevent creating it again."""
    body = line_pod(**options)  # type: ignore[arg-type]
    made: Object = world.api.create("/api/v1/namespaces/default/pods", body, dryRun="All")
    metadata = made["metadata"]
    kept = {"name": metadata["name"], "labels": metadata["labels"], "annotations": metadata["annotations"]}
    dropped = ("tolerations", "serviceAccountName", "serviceAccount")
    spec = {key: value for key, value in made["spec"].items() if key not in dropped}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": kept, "spec": spec}


def main(body: Object) -> Object:
    found: Object = body["spec"]["containers"][0]
    return found


def _gate(body: Object) -> None:
    body["spec"]["schedulingGates"] = []


def _gpus(body: Object) -> None:
    body["metadata"]["annotations"]["sharepod.dev/gpus"] = "GPU-1"


def _all_gpus(body: Object) -> None:
    main(body)["env"][0] = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}


def _gpus_twice(body: Object) -> None:
    main(body)["env"].append({"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"})


def _other_field(body: Object) -> None:
    main(body)["env"][0]["valueFrom"]["fieldRef"]["fieldPath"] = "metadata.annotations['mine']"


def _gpus_beside(body: Object) -> None:
    env = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]
    body["spec"]["containers"].append({"name": "sidecar", "image": "test", "env": env})


def _volume_beside(body: Object) -> None:
    mount = {"name": "sharepod-gpu", "mountPath": "/mine"}
    env = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]
    body["spec"]["containers"].append({"name": "sidecar", "image": "test", "env": env, "volumeMounts": [mount]})


def _volume(body: Object) -> None:
    volumes = [volume for volume in body["spec"]["volumes"] if volume["name"] != "sharepod-gpu"]
    body["spec"]["volumes"] = [*volumes, {"name": "sharepod-gpu", "emptyDir": {}}]


def _second_volume(body: Object) -> None:
    body["spec"]["volumes"].append({"name": "more", "csi": {"driver": "gpu.sharepod.dev", "readOnly": True}})


def _attributes(body: Object) -> None:
    volume = next(volume for volume in body["spec"]["volumes"] if volume["name"] == "sharepod-gpu")
    volume["csi"]["volumeAttributes"] = {"tenant": "another"}


def _mounts(body: Object) -> None:
    main(body)["volumeMounts"] = [
        {**mount, "mountPath": "/elsewhere"} if mount["mountPath"] == "/run/sharepod" else mount
        for mount in main(body)["volumeMounts"]
    ]


def _no_line(body: Object) -> None:
    main(body)["resources"] = {}


FORGED = {
    "gate removed": (_gate, "spec.schedulingGates[sharepod.dev/share]"),
    "GPUs named": (_gpus, "sharepod.dev/gpus]"),
    "all GPUs": (_all_gpus, "spec.containers[main].env[NVIDIA_VISIBLE_DEVICES]"),
    "all GPUs behind ours": (_gpus_twice, "spec.containers[main].env[NVIDIA_VISIBLE_DEVICES]"),
    "GPUs of another annotation": (_other_field, "spec.containers[main].env[NVIDIA_VISIBLE_DEVICES]"),
    "GPUs for another container": (_gpus_beside, "spec.containers[sidecar].env[NVIDIA_VISIBLE_DEVICES]"),
    "volume in another container": (_volume_beside, "spec.containers[sidecar].volumeMounts[sharepod-gpu]"),
    "volume of its own": (_volume, "spec.volumes[sharepod-gpu]"),
    "a second volume": (_second_volume, "spec.volumes[sharepod-gpu]"),
    "attributes": (_attributes, "spec.volumes[sharepod-gpu]"),
    "mounted elsewhere": (_mounts, "spec.containers[main].volumeMounts[/run/sharepod]"),
    "no line": (_no_line, "metadata.labels[sharepod.dev/tenant]"),
}


@pytest.mark.promise("operator-line-volume-forged")
def test_a_pod_that_calls_itself_one_and_is_made_otherwise_is_refused(world: World) -> None:
    assert answer(world.api, translated(world)) == "", "as the webhook makes it"
    for what, (forge, field) in FORGED.items():
        body = translated(world)
        forge(body)
        assert field in answer(world.api, body), what


@pytest.mark.promise("operator-line-volume-forged")
def test_nobody_opens_its_gate_or_writes_its_gpus(world: World) -> None:
    namespace = world.cluster.namespace("vopen")
    start(world, namespace, "waits", on="nowhere")
    world.cluster.kubectl(
        "create", "rolebinding", "alice", "--clusterrole=edit", "--user=alice", f"--namespace={namespace}"
    )
    alice = world.cluster.user_kubeconfig("alice")
    for change, field in (
        ({"spec": {"schedulingGates": []}}, "spec.schedulingGates[sharepod.dev/share]"),
        ({"metadata": {"annotations": {"sharepod.dev/gpus": "GPU-1"}}}, "metadata.annotations[sharepod.dev/gpus]"),
        ({"metadata": {"labels": {"sharepod.dev/tenant": None}}}, "metadata.labels[sharepod.dev/tenant]"),
    ):
        arguments = ("patch", "pod", "waits", "-n", namespace, "--type=merge", "-p", json.dumps(change))
        code, text = as_user(world.cluster, alice, *arguments)
        assert (code != 0, field in text) == (True, True), text


@pytest.mark.promise("operator-line-volume-preempted")
def test_it_is_preempted_and_its_controller_brings_another_that_waits(world: World) -> None:
    world.api.create("/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": "vhigh"}, "value": 1000})
    (node,) = world.nodes("vpre")
    namespace = world.cluster.namespace("vpre")
    body = line_pod(container(milli="800", mib="12288"), nodeSelector={"test": "vpre"}, restartPolicy="Always")
    template = {"metadata": {"labels": {"app": "low"}}, "spec": body["spec"]}
    spec = {"replicas": 2, "selector": {"matchLabels": {"app": "low"}}, "template": template}
    made = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "low"}, "spec": spec}
    world.api.create(f"/apis/apps/v1/namespaces/{namespace}/deployments", made)

    def pods() -> list[Object]:
        found: list[Object] = world.api.get(f"/api/v1/namespaces/{namespace}/pods", labelSelector="app=low")["items"]
        return found

    wait(lambda: sum(bool(pod["spec"].get("nodeName")) for pod in pods()) == 2, what="both run")
    start(world, namespace, "high", container(milli="800", mib="12288"), on="vpre", priorityClassName="vhigh")
    runs(world, namespace, "high")

    def one_waits() -> bool:
        gated = [pod for pod in pods() if pod["spec"].get("schedulingGates")]
        return len(gated) == 1 and len(pods()) == 2

    wait(one_waits, what="the next one waits behind its gate")
    assert sum(row["requestMilli"] for row in world.rows(node)) <= 2000
    world.api.delete(f"/api/v1/namespaces/{namespace}/pods/high")
    wait(lambda: sum(bool(pod["spec"].get("nodeName")) for pod in pods()) == 2, what="it gets the room")


@pytest.mark.promise("operator-line-volume")
def test_an_operator_that_dies_between_row_and_gate_leaves_one_row_and_the_next_opens_the_gate(world: World) -> None:
    (node,) = world.nodes("vkill")
    namespace = world.cluster.namespace("vkill")
    for number in range(4):
        start(world, namespace, f"p{number}", container(milli="500"), on="vkill")
    wait(lambda: len(world.rows(node)) >= 1, what="a row")
    assert world.operator is not None
    world.operator.stop(grace=0)
    world.start_operator("second")
    for number in range(4):
        runs(world, namespace, f"p{number}")
    rows = world.rows(node)
    assert sorted(row["podName"] for row in rows) == [f"p{number}" for number in range(4)]


@pytest.mark.promise("operator-line-volume-resize")
def test_its_annotation_lowers_and_raises_its_share_at_once_and_never_above_the_line(world: World) -> None:
    (node,) = world.nodes("vsize")
    namespace = world.cluster.namespace("vsize")
    start(world, namespace, "one", container(milli="600"), on="vsize")
    runs(world, namespace, "one")
    path = f"/api/v1/namespaces/{namespace}/pods/one"
    for request in (0.2, 0.5):
        world.api.patch(path, {"metadata": {"annotations": {"sharepod.dev/gpu-request": str(request)}}})
        wait(
            lambda request=request: (world.row(node, "one") or {})["requestMilli"] == round(1000 * request),
            what=f"{request}",
            timeout=10,
        )
    with pytest.raises(ApiError, match="more than the line has"):
        world.api.patch(path, {"metadata": {"annotations": {"sharepod.dev/gpu-request": "0.7"}}})


@pytest.mark.promise("operator-line-volume-quota")
def test_a_quota_counts_it_as_it_is_made(world: World) -> None:
    namespace = world.cluster.namespace("vquota")
    hard = {"requests.sharepod.dev/gpu-milli": "500", "requests.sharepod.dev/gpu-memory-mib": "4096"}
    quota = {"metadata": {"name": "gpu"}, "spec": {"hard": hard}}
    world.api.create(f"/api/v1/namespaces/{namespace}/resourcequotas", quota)
    start(world, namespace, "first", container(milli="400"), on="nowhere")
    wait(
        lambda: "exceeded quota" in answer(world.api, line_pod(container(milli="200")), namespace), what="it is counted"
    )
    without = answer(world.api, line_pod(container(milli="50", mib=None)), namespace)
    assert "QuotaCannotCount" in without
    assert "resources.limits[sharepod.dev/gpu-memory-mib]" in without


def test_one_that_was_orphaned_is_adopted_by_the_next_controller(world: World) -> None:
    world.nodes("vadopt")
    namespace = world.cluster.namespace("vadopt")
    start(world, namespace, "orphan", container(), on="vadopt", restartPolicy="Always")
    runs(world, namespace, "orphan")
    path = f"/api/v1/namespaces/{namespace}/pods/orphan"
    world.api.patch(path, {"metadata": {"labels": {"app": "adopts"}}})
    spec = line_pod(container(), nodeSelector={"test": "vadopt"}, restartPolicy="Always")["spec"]
    template = {"metadata": {"labels": {"app": "adopts"}}, "spec": spec}
    body = {"replicas": 1, "selector": {"matchLabels": {"app": "adopts"}}, "template": template}
    made = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": "adopts"}, "spec": body}
    world.api.create(f"/apis/apps/v1/namespaces/{namespace}/replicasets", made)
    wait(lambda: world.api.get(path)["metadata"].get("ownerReferences"), what="it is adopted")


@pytest.mark.promise("operator-line-volume-others")
def test_an_ephemeral_container_has_its_volume_and_no_gpu(world: World) -> None:
    namespace = world.cluster.namespace("vdebug")
    start(world, namespace, "debugged", on="nowhere")
    path = f"/api/v1/namespaces/{namespace}/pods/debugged/ephemeralcontainers"
    mounts = [{"name": "sharepod-gpu", "mountPath": "/run/sharepod"}]
    debug = {"name": "debug", "image": "test", "volumeMounts": mounts}
    with pytest.raises(ApiError, match=r"kubectl debug --env=NVIDIA_VISIBLE_DEVICES=void"):
        world.api.patch(path, {"spec": {"ephemeralContainers": [debug]}})
    debug["env"] = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]
    world.api.patch(path, {"spec": {"ephemeralContainers": [debug]}})


@pytest.mark.promise("operator-line-volume-burst")
def test_a_burst_beside_sharepods_over_kills_gives_no_gpu_away_twice_and_loses_nobody(world: World) -> None:
    nodes = world.nodes("vburst", 2)
    namespace = world.cluster.namespace("vburst")
    ends = {"test.sharepod.dev/run-seconds": "0.5"}
    lines = [f"line{number}" for number in range(16)]
    sharepods = [f"share{number}" for number in range(8)]
    with Audit(world.api, memory=16 * GIB) as audit:
        for number, name in enumerate(lines):
            start(world, namespace, name, container(milli="500", mib=None), on="vburst", annotations=ends)
            if number < len(sharepods):
                world.apply(namespace, sharepods[number], {"request": 0.5}, on="vburst", annotations=ends)
        for number in range(2):
            before = len(audit.reserved)
            wait(lambda before=before: len(audit.reserved) > before, what="some more have a row")
            assert world.operator is not None
            world.operator.stop(grace=0)
            world.start_operator(f"burst{number}")
        for name in lines:
            wait(
                lambda name=name: (world.pod(namespace, name) or {}).get("status", {}).get("phase") == "Succeeded",
                what=f"{name} ends",
                timeout=90,
            )
        for name in sharepods:
            world.phase(namespace, name, "Succeeded")
        wait(lambda: not any(world.rows(node) for node in nodes), what="nothing is left")
        assert audit.over_committed == {}
        assert audit.doubled == []
