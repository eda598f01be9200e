"""Warnings at apply about Pod templates whose Pods would be refused, with the message of the refusal."""

from __future__ import annotations

import json

import pytest
from cluster.plain_world import MILLI, answer, container, install_plain, line_pod, need_mutating_policies
from cluster.test_admission_plain_pods import REFUSED, TAKEN
from harness.api import Object
from harness.cluster import Cluster, wait_until

_DENIED = "denied request: "
_LABELS = {"app": "probe"}


@pytest.fixture(scope="module")
def cluster(server: Cluster) -> Cluster:
    need_mutating_policies(server.api)
    install_plain(server)
    wait_until(
        lambda: warnings(server, job_of(line_pod(container(milli="0")))) != "",
        what="the policy is enforced",
        timeout=30,
    )
    return server


def template_of(pod: Object, restart: str = "Never") -> Object:
    metadata = {"labels": _LABELS, "annotations": pod["metadata"]["annotations"]}
    return {"metadata": metadata, "spec": pod["spec"] | {"restartPolicy": restart}}


def job_of(pod: Object, name: str = "probe") -> Object:
    spec = {"template": template_of(pod)}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}


def workload_of(kind: str, pod: Object) -> Object:
    """Return an object of this kind with the Pod as its template."""
    body: Object = {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": "probe"}}
    match kind:
        case "Job":
            return job_of(pod)
        case "CronJob":
            body |= {"apiVersion": "batch/v1"}
            body["spec"] = {"schedule": "@daily", "jobTemplate": {"spec": job_of(pod)["spec"]}}
        case _:
            body["spec"] = {"selector": {"matchLabels": _LABELS}, "template": template_of(pod, "Always")}
    return body


def warnings(cluster: Cluster, *objects: Object) -> str:
    """Apply objects that the API server accepts; return the warnings that kubectl prints."""
    documents = "\n---\n".join(json.dumps(each) for each in objects)
    ran = cluster.kubectl("create", "--dry-run=server", "-f", "-", input=documents, timeout=60)
    assert ran.stdout.count("created") == len(objects)
    return "\n".join(line for line in ran.stderr.splitlines() if "sharepod-templates" in line)


@pytest.mark.promise("operator-template-warnings")
def test_templates_get_the_refusals_of_their_pods_as_warnings(cluster: Cluster) -> None:
    bodies = [body for name, (body, _field) in REFUSED.items() if name != "one field twice"]  # names either of two
    shown = warnings(cluster, *(job_of(body, f"job-{number}") for number, body in enumerate(bodies)))
    refusals = [answer(cluster.api, body).partition(_DENIED)[2] for body in bodies]
    assert all(refusals)
    assert [text for text in refusals if f"the Pods of this Job would be refused: {text}" not in shown] == []


def test_one_fault_is_one_warning(cluster: Cluster) -> None:
    counts = {name: len(warnings(cluster, job_of(body)).splitlines()) for name, (body, _field) in REFUSED.items()}
    assert {name: count for name, count in counts.items() if count != 1} == {}


def test_templates_of_pods_that_are_taken_get_none(cluster: Cluster) -> None:
    jobs = (job_of(body, f"job-{number}") for number, body in enumerate(TAKEN.values()))
    assert warnings(cluster, *jobs) == ""


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet", "DaemonSet", "Job", "CronJob"])
def test_each_kind_is_warned_of_a_misspelt_line_and_made(cluster: Cluster, kind: str) -> None:
    shown = warnings(cluster, workload_of(kind, line_pod(container(milli="1500"))))
    assert f"the Pods of this {kind} would be refused: spec.containers[main].resources.limits[{MILLI}]" in shown


def test_an_update_of_anything_but_the_spec_gets_none(cluster: Cluster) -> None:
    cluster.kubectl("create", "-f", "-", input=json.dumps(job_of(line_pod(container(milli="1500")), "kept")))
    try:
        assert cluster.kubectl("label", "job", "kept", "a=b").stderr == ""
    finally:
        cluster.kubectl("delete", "job", "kept", "--wait=false")
