"""`kubectl sharepod cordon`, `uncordon` and `drain`, on a cluster in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from kubectl_sharepod import commands
from kubectl_sharepod.cordon import cordon, drain, may_move
from kubectl_sharepod.doctor import doctor
from kubectl_sharepod.kubectl import ConflictError, Json, KubectlError
from kubectl_sharepod.reading import Scope, gpus
from kubectl_sharepod.views import CORDONED
from kubectl_sharepod.why import why
from sharepod.api.sharepod import RestartPolicy
from sharepod.controller.placing.making_room.movers_seen import most_above

from .fleet import UUIDS, Memory, cluster
from .test_commands import printed

NODE = "/apis/sharepod.dev/v1alpha1/gpunodes/node-a"
MOVABLE = {"sharepod.dev/gpu-movable": "true"}
OWNED = [{"kind": "ReplicaSet", "controller": True}]


@dataclass(frozen=True)
class Evicting(Memory):
    """kubectl of a cluster in memory that can evict Pods. `conflicts`: number of first writes that fail."""

    evicted: list[tuple[str, str]] = field(default_factory=list)
    conflicts: list[int] = field(default_factory=list)
    protected: tuple[str, ...] = ()

    def evict(self, namespace: str, pod: str) -> None:
        if pod in self.protected:
            raise KubectlError("Cannot evict pod as it would violate the pod's disruption budget.")
        self.evicted.append((namespace, pod))

    def merge(self, resource: str, namespace: str, name: str, patch: Json) -> None:
        if self.conflicts:
            self.conflicts.pop()
            raise ConflictError("the object has been modified")
        super().merge(resource, namespace, name, patch)


def node_with(value: str | None, objects: dict[str, Any] | None = None, *, full: bool = False) -> Evicting:
    """Return the cluster, whose node-a is cordoned by this annotation. `full`: False: the GPU of node-b is free."""
    known = cluster().objects
    items = known["/apis/sharepod.dev/v1alpha1/gpunodes"]["items"]
    if not full:
        items[1]["status"]["conditions"] = []
    items[0]["metadata"] |= {"resourceVersion": "7", "annotations": {CORDONED: value} if value else {}}
    return Evicting(objects=known | {NODE: items[0]} | (objects or {}))


def written(kubectl: Evicting) -> Any:
    [(resource, _, name, patch)] = kubectl.patches
    assert (resource, name, patch["metadata"]["resourceVersion"]) == ("gpunodes.sharepod.dev", "node-a", "7")
    return patch["metadata"]["annotations"][CORDONED]


def test_cordon_adds_a_gpu_and_uncordon_takes_it_away_by_uuid_or_index() -> None:
    for value, undo, expected in (
        (None, False, UUIDS[0]),
        (UUIDS[1], False, f"{UUIDS[1]},{UUIDS[0]}"),
        (f"0,{UUIDS[1]}", False, f"{UUIDS[1]},{UUIDS[0]}"),
        (f"0 , {UUIDS[0]},1", True, "1"),
        (UUIDS[0], True, None),
    ):
        kubectl = node_with(value)
        page = cordon(kubectl, UUIDS[0], undo=undo)
        assert written(kubectl) == expected
        assert f"node-a:0 ({UUIDS[0]}) {'un' if undo else ''}cordoned" in printed(page)
    assert "; 2 tenants stay; `kubectl sharepod drain node-a:0` evicts" in printed(cordon(node_with(None), "node-a:0"))


@pytest.mark.promise("node-cordon-unknown")
def test_an_entry_that_names_no_gpu_is_reported_with_the_known_indexes() -> None:
    fault = "annotation sharepod.dev/cordoned: '7' is no GPU of the node, so it cordons none; write an index (0, 1)"
    for value, reported in (("7", True), (f"0,7,{UUIDS[1].upper()}", True), (f"0,{UUIDS[1].upper()}", False)):
        scope = Scope(node_with(value), None)
        assert (f"node-a: {fault}" in printed(commands.all_gpus(scope))) is reported
        assert (fault in printed(doctor(scope.kubectl), 400)) is reported
    objects = node_with("7").objects
    objects["/apis/sharepod.dev/v1alpha1/gpunodes"]["items"][0]["status"]["gpus"] = []
    assert "is no GPU" not in printed(commands.all_gpus(Scope(cluster(objects=objects), None))), (
        "its GPUs are not known"
    )


def test_a_conflict_is_tried_again_and_a_lasting_one_is_an_error() -> None:
    kubectl = node_with(None)
    kubectl.conflicts.extend(range(4))
    cordon(kubectl, "node-a:0")
    assert written(kubectl) == UUIDS[0]
    kubectl.conflicts.extend(range(5))
    with pytest.raises(ConflictError):
        cordon(kubectl, "node-a:0")


@pytest.mark.parametrize("value", [UUIDS[0], "0"])
def test_a_cordoned_gpu_is_no_room_and_no_problem(value: str) -> None:
    kubectl = node_with(value)
    first, second, _ = gpus(kubectl).gpus
    assert (first.why, first.free, second.why) == ("cordoned", None, "")
    assert "cordoned" in printed(commands.all_gpus(Scope(kubectl, None)))
    assert "cordoned" not in printed(doctor(kubectl))


@pytest.mark.parametrize("movable", [None, False, True])
@pytest.mark.parametrize("policy", [*RestartPolicy])
@pytest.mark.parametrize("request_milli", [0, 400])
def test_plugin_and_operator_decide_alike_whether_a_sharepod_may_be_moved(
    movable: bool | None, policy: RestartPolicy, request_milli: int
) -> None:
    by_operator = most_above(movable, policy, request_milli) is not None
    assert may_move(movable, policy.value, request_milli) is by_operator


def test_drain_evicts_what_may_be_moved_and_names_what_stays() -> None:
    train = cluster().objects["/apis/sharepod.dev/v1alpha1/namespaces/team/sharepods/train"]
    train["spec"]["gpu"]["movable"] = True
    notebook = {"metadata": {"annotations": {}, "ownerReferences": OWNED}}
    kubectl = node_with(
        None,
        {
            "/apis/sharepod.dev/v1alpha1/namespaces/team/sharepods/train": train,
            "/api/v1/namespaces/team/pods/notebook": notebook,
        },
    )
    page = drain(kubectl, "node-a:0")
    assert written(kubectl) == UUIDS[0]
    assert (kubectl.evicted, page.status) == ([("team", "train")], 1)
    answers = {row[2]: row[3] for row in page.rows}
    assert answers["train"] == "evicted"
    assert answers["notebook"].startswith("stays: it may not be moved")


TRAIN = "/apis/sharepod.dev/v1alpha1/namespaces/team/sharepods/train"
NOTEBOOK = "/api/v1/namespaces/team/pods/notebook"


def movable(**gpu: Any) -> dict[str, Any]:
    """Return train and notebook, the tenants of node-a:0, which may both be moved. `gpu`: fields of train's request."""
    train = cluster().objects[TRAIN]
    train["spec"]["gpu"] |= {"movable": True, "memory": "40Gi"} | gpu
    return {TRAIN: train, NOTEBOOK: {"metadata": {"annotations": MOVABLE, "ownerReferences": OWNED}}}


@pytest.mark.parametrize(
    ("full", "gpu", "evicted"),
    [
        (False, {}, [("team", "train"), ("team", "notebook")]),
        (True, {}, [("team", "notebook")]),
        (True, {"memory": "1Gi"}, [("team", "notebook")]),
        (False, {"models": ["NVIDIA H200"]}, [("team", "notebook")]),
        (False, {"uuids": [UUIDS[0]]}, [("team", "notebook")]),
    ],
)
def test_drain_lets_a_tenant_stay_that_has_no_room_elsewhere(
    full: bool, gpu: dict[str, Any], evicted: list[tuple[str, str]]
) -> None:
    kubectl = node_with(None, movable(**gpu), full=full)
    page = drain(kubectl, "node-a:0")
    assert (kubectl.evicted, page.status) == (evicted, 0 if len(evicted) == 2 else 1)
    stay = {row[2]: row[3] for row in page.rows if (row[0], row[2]) not in evicted}
    assert stay in ({}, {"train": "stays: no room elsewhere"})


def test_drain_counts_the_room_that_evicted_tenants_take() -> None:
    kubectl = node_with(None, movable(memory="2Gi"), full=True)
    rows = kubectl.objects["/apis/sharepod.dev/v1alpha1/gpunodes"]["items"][0]["spec"]["tenants"]
    rows[0].update(requestMilli=300, memory=2 << 30)
    drain(kubectl, "node-a:0")
    assert kubectl.evicted == [("team", "train")], "0.4 is free on the other GPU, for 0.3 and 0.2"


@pytest.mark.parametrize(
    ("annotations", "owners", "users", "evicted"),
    [
        (MOVABLE, OWNED, ["web"], [("team", "web")]),
        ({}, OWNED, ["web"], []),
        (MOVABLE, [], ["web"], []),
        (MOVABLE, OWNED, ["web", "other"], []),
        (MOVABLE, OWNED, [], []),
    ],
)
def test_a_claim_moves_with_its_only_pod_if_it_says_so_and_a_controller_makes_the_next(
    annotations: dict[str, str], owners: list[Json], users: list[str], evicted: list[tuple[str, str]]
) -> None:
    claim = {"metadata": {"annotations": annotations}, "status": {"reservedFor": [{"name": name} for name in users]}}
    kubectl = node_with(
        None,
        {
            "/apis/resource.k8s.io/v1/namespaces/team/resourceclaims/eval": claim,
            "/api/v1/namespaces/team/pods/web": {"metadata": {"ownerReferences": owners}},
        },
    )
    page = drain(kubectl, "node-a:1")
    assert kubectl.evicted == evicted
    assert page.status == (0 if evicted else 1)


def test_what_a_budget_protects_or_cannot_be_read_stays_with_the_reason() -> None:
    pod = {"metadata": {"annotations": MOVABLE, "ownerReferences": OWNED}}
    kubectl = node_with(None, {"/api/v1/namespaces/team/pods/notebook": pod})
    protected = Evicting(objects=kubectl.objects, protected=("notebook",))
    answers = {row[2]: row[3] for row in drain(protected, "node-a:0").rows}
    assert "disruption budget" in answers["notebook"]
    del protected.objects["/apis/sharepod.dev/v1alpha1/namespaces/team/sharepods/train"]
    answers = {row[2]: row[3] for row in drain(protected, "node-a:0").rows}
    assert answers["train"].startswith("stays: Error from server (NotFound)")


def test_gpus_of_a_cordoned_node_are_not_free_in_any_command() -> None:
    kubectl = node_with(None, full=True)
    assert "node cordoned" not in printed(commands.all_gpus(Scope(kubectl, None)))
    nodes = [{"metadata": {"name": "node-a"}, "spec": {"unschedulable": True}}, {"metadata": {"name": "node-b"}}]
    kubectl.objects["/api/v1/nodes"] = {"items": nodes}
    assert [gpu.why for gpu in gpus(kubectl).gpus][:2] == ["node cordoned"] * 2
    assert printed(commands.all_gpus(Scope(kubectl, None))).count("node cordoned") == 2
    assert commands.free(Scope(kubectl, None)).rows[0][2:5] == ["3", "0", "0"]
    answer = printed(why(kubectl, "team", "sharepod", "large"))
    assert answer.count("node cordoned") == 2
    assert "Smallest change" not in answer
    assert "node cordoned" not in printed(doctor(kubectl), 400)


def test_a_user_who_may_not_list_nodes_is_told_that_cordons_are_not_seen() -> None:
    kubectl = cluster(denied=("/api/v1/nodes",))
    for page in (
        commands.all_gpus(Scope(kubectl, None)),
        commands.free(Scope(kubectl, None)),
        why(kubectl, "team", "sharepod", "large"),
    ):
        assert list(page.notes) == ["You may not list Nodes, so GPUs of cordoned nodes count as free here."]
