"""`top` with workloads that wait by a resource line or a claim, on a cluster in memory."""

from __future__ import annotations

import io
import json
import re
from dataclasses import dataclass, field

import pytest
import yaml
from kubectl_sharepod import commands, reading
from kubectl_sharepod.kubectl import Json
from kubectl_sharepod.output import Format, Screen, show
from kubectl_sharepod.reading import Scope, workloads
from kubectl_sharepod.views import milli, now
from kubectl_sharepod.wanted import of_claim, of_line

from .fleet import CLAIMS, GI, PODS, TEAM_CLAIMS, TEAM_PODS, Memory, claim, pending_pod, waiting_cluster

GPUNODES = "/apis/sharepod.dev/v1alpha1/gpunodes"
AT_160 = """\
3 GPUs on 2 nodes, 1.3 requested; 4 workloads wait
KIND      NAME      STATE          NODE    GPU  REQUEST  LIMIT  USED  PROGRESS  MEMORY  IN-USE  WAITS
Claim     job-gpu   Unschedulable  -       -       0.25      1     -         -     6Gi       - 9d
SharePod  large     NoRoom         -       -        0.9      1     -         -     8Gi       - 9d
Pod       late      Unschedulable  -       -          1      1     -         -     2Gi       - 9d
Pod       web       Unschedulable  -       -        0.4      1     -         -     4Gi       - 9d
Pod       notebook  Running        node-a  0        0.2      1  0.22      0.93     8Gi     1Gi      -
SharePod  train     Running        node-a  0        0.5      1  0.22      0.93     8Gi     1Gi      -
Claim     eval      Running        node-a  1        0.6      1  0.22      0.93    60Gi     1Gi      -"""
AT_80 = """\
3 GPUs on 2 nodes, 1.3 requested; 4 workloads wait
KIND      NAME      STATE          NODE    GPU  REQUEST  LIMIT  USED  PROGRESS
Claim     job-gpu   Unschedulable  -       -       0.25      1     -         -
SharePod  large     NoRoom         -       -        0.9      1     -         -
Pod       late      Unschedulable  -       -          1      1     -         -
Pod       web       Unschedulable  -       -        0.4      1     -         -
Pod       notebook  Running        node-a  0        0.2      1  0.22      0.93
SharePod  train     Running        node-a  0        0.5      1  0.22      0.93
Claim     eval      Running        node-a  1        0.6      1  0.22      0.93"""


@dataclass(frozen=True)
class Recorded(Memory):
    """Cluster that keeps the paths of its requests."""

    paths: list[str] = field(default_factory=list)

    def get(self, path: str) -> Json:
        self.paths.append(path)
        return super().get(path)


def printed(kubectl: Memory, namespace: str | None = "team", how: Format = Format.TABLE, width: int = 160) -> str:
    """Return the output of `top`, without blanks at the ends of lines. An age of some days is `9d`."""
    file = io.StringIO()
    show(commands.top(Scope(kubectl, namespace)), how, Screen(file, width, colours=False))
    return re.sub(
        r" +\d+d$", " 9d", "\n".join(line.rstrip() for line in file.getvalue().splitlines()), flags=re.MULTILINE
    )


@pytest.mark.parametrize("namespace", ["team", None])
def test_every_waiting_workload_is_listed_once_whatever_its_door(namespace: str | None) -> None:
    seen = workloads(Scope(waiting_cluster(), namespace))
    waits = {f"{one.kind}/{one.name}": one for one in seen.found if one.waiting_s is not None}
    assert sorted(waits) == ["Claim/job-gpu", "Pod/late", "Pod/web", "SharePod/large"]
    assert len(seen.found) == 7, "and the three tenants"
    web, late, job = waits["Pod/web"], waits["Pod/late"], waits["Claim/job-gpu"]
    assert (web.share.request_milli, web.share.limit_milli, web.share.memory) == (400, 1000, 4 * GI)
    assert (late.share.request_milli, late.share.memory) == (1000, 2 * GI), "on each of two GPUs"
    assert (job.share.request_milli, job.share.memory) == (250, 6 * GI)
    assert {one.state for one in (web, late, job)} == {"Unschedulable"}
    assert web.message == "no GPU has room"
    assert seen.notes == ()


def test_a_pod_without_a_reason_waits() -> None:
    kubectl = waiting_cluster()
    kubectl.objects[TEAM_PODS] = {"items": [pending_pod("web", 400) | {"status": {"phase": "Pending"}}]}
    (web,) = [one for one in workloads(Scope(kubectl, "team")).found if one.kind == "Pod" and one.name == "web"]
    assert (web.state, web.message) == ("Waits", "")


def test_the_table_at_both_widths() -> None:
    assert printed(waiting_cluster(), width=160) == AT_160
    assert printed(waiting_cluster(), width=80) == AT_80
    assert printed(waiting_cluster(), None, width=160).splitlines()[1].split()[0] == "NAMESPACE"


def test_formats_for_programs_have_the_waiting_workloads(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = now()
    monkeypatch.setattr(reading, "now", lambda: moment)  # ages are whole seconds, which may change between two reads
    names = printed(waiting_cluster(), how=Format.NAME).split()
    assert names == [
        "claim/job-gpu",
        "sharepod/large",
        "pod/late",
        "pod/web",
        "pod/notebook",
        "sharepod/train",
        "claim/eval",
    ]
    items = json.loads(printed(waiting_cluster(), how=Format.JSON))["items"]
    assert [f"{one['kind'].lower()}/{one['name']}" for one in items] == names
    assert yaml.safe_load(printed(waiting_cluster(), how=Format.YAML))["items"] == items
    wide = printed(waiting_cluster(), how=Format.WIDE, width=400)
    assert wide.count("no GPU has room") == 3


def test_a_missing_right_is_named_with_what_is_hidden() -> None:
    no_pods = workloads(Scope(waiting_cluster(denied=(TEAM_PODS,)), "team"))
    assert [one.name for one in no_pods.found if one.waiting_s is not None] == ["large"]
    assert "You may not list Pods, so waiting plain Pods and claims are missing here." in no_pods.notes[0]
    no_claims = workloads(Scope(waiting_cluster(denied=(TEAM_CLAIMS,)), "team"))
    assert [one.name for one in no_claims.found if one.waiting_s is not None] == ["large", "late", "web"]
    assert "You may not list ResourceClaims" in no_claims.notes[0]


def test_without_the_ledgers_a_pod_waits_until_its_annotation_names_gpus() -> None:
    kubectl = waiting_cluster(denied=(GPUNODES,))
    pods = kubectl.objects[TEAM_PODS]["items"]
    pods.append(pending_pod("bound", 300, annotations={"sharepod.dev/gpus": "GPU-1"}))
    pods.append(pending_pod("gated", 300, annotations={"sharepod.dev/gpus": "void"}))
    kubectl.objects[TEAM_CLAIMS]["items"][1]["status"] = {"allocation": {"devices": {}}}
    seen = workloads(Scope(kubectl, "team"))
    waits = {one.name for one in seen.found if one.waiting_s is not None}
    assert waits == {"large", "web", "late", "placed", "notebook", "gated"}


def test_claims_are_listed_only_where_a_pending_pod_names_one() -> None:
    base = waiting_cluster()
    kubectl = Recorded(objects=base.objects)
    commands.top(Scope(kubectl, None))
    assert sorted(path.partition("?")[0] for path in kubectl.paths) == sorted(
        ["/apis/sharepod.dev/v1alpha1/sharepods", GPUNODES, f"{PODS}/pods", TEAM_CLAIMS]
    )
    pods = base.objects[f"{PODS}/pods"]["items"]
    pods += [pending_pod(f"job-{n}", None, {"gpu": f"own-{n}"}, namespace=f"team-{n}") for n in range(8)]
    every = [claim(f"own-{n}", 100, namespace=f"team-{n}") for n in range(8)]
    base.objects[f"{CLAIMS}/resourceclaims"] = {"items": every}
    kubectl.paths.clear()
    found = workloads(Scope(kubectl, None)).found
    assert [path for path in kubectl.paths if "claims" in path] == [f"{CLAIMS}/resourceclaims?resourceVersion=0"]
    assert sum(one.name.startswith("own-") for one in found) == 8
    base.objects[f"{PODS}/pods"]["items"] = [pending_pod("web", 400, {"sharepod": "web-sharepod"})]
    kubectl.paths.clear()
    commands.top(Scope(kubectl, None))
    assert not [path for path in kubectl.paths if "claims" in path]


@pytest.mark.parametrize(
    ("status", "spec"), [({"allocation": {"devices": {}}}, None), ({}, {"devices": {"requests": [{"exactly": {}}]}})]
)
def test_allocated_claims_and_claims_of_other_classes_do_not_wait(status: Json, spec: Json | None) -> None:
    kubectl = waiting_cluster()
    job = kubectl.objects[TEAM_CLAIMS]["items"][1]
    job |= {"status": status} | ({"spec": spec} if spec else {})
    assert "job-gpu" not in printed(kubectl)


def test_odd_pods_and_claims_cost_no_other_object_its_line() -> None:
    kubectl = waiting_cluster()
    odd: list[Json] = [
        {},
        {"metadata": [], "spec": {"resourceClaims": [3, {}]}, "status": {"resourceClaimStatuses": 1}},
    ]
    labels = {"labels": {"sharepod.dev/line": "true"}, "annotations": {"sharepod.dev/gpu-count": "-3"}}
    odd.append({"metadata": labels, "spec": {"containers": [{"resources": {"limits": {"sharepod.dev/gpu-milli": 5}}}]}})
    kubectl.objects[TEAM_PODS]["items"] += odd
    kubectl.objects[TEAM_CLAIMS]["items"] += [{}, {"metadata": {"namespace": "team", "name": "x"}, "spec": 5}]
    assert {"pod/web", "claim/job-gpu"} <= set(printed(kubectl, how=Format.NAME).split())


def test_annotations_refine_the_request() -> None:
    pod = pending_pod("web", 400, annotations={"sharepod.dev/gpu-request": "20%", "sharepod.dev/gpu-limit": "0.8"})
    line = of_line(pod, "team")
    assert line is not None
    assert (line.request_milli, line.limit_milli) == (200, 800)
    own = claim("own", 400)
    own["metadata"]["annotations"] = {"sharepod.dev/gpu-request": "100m"}
    own["spec"]["devices"]["requests"][0]["exactly"]["capacity"]["requests"]["limitMilli"] = "500"
    asked = of_claim(own, "team")
    assert asked is not None
    assert (asked.request_milli, asked.limit_milli) == (100, 500)
    assert of_claim(claim("line", request="line"), "team") is None
    assert [milli(value) for value in ("0.4", "400m", "40%", 0.4, 1, "", "m", "nan", "inf", True, None)] == [
        *([400] * 4),
        1000,
        *([None] * 6),
    ]
