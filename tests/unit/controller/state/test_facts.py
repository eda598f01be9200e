"""Facts of malformed objects: they carry the error, count as the safest case, and affect no other object."""

from __future__ import annotations

import json

import pytest
from sharepod.api.pods.pod import require_node
from sharepod.api.sharepod import Phase
from sharepod.controller.state.facts.node_facts import gpunode_facts, node_facts
from sharepod.controller.state.facts.pod_facts import other_pod, pod_facts
from sharepod.controller.state.facts.sharepod_facts import is_as_read, sharepod_facts, unreadable_sharepod
from sharepod.controller.state.reading.fitting import MAX_LIST, POD
from sharepod.kube import Json, Unreadable
from sharepod.kube.bodies import parsed
from sharepod.kube.json_text import ListText
from unit.controller.objects import PODS, pod_object, sharepod, sharepod_object


@pytest.mark.promise("operator-bounds")
def test_an_oversized_sharepod_gets_an_event_and_is_not_cached() -> None:
    found = sharepod(spec={"nodeSelector": {"a": "x" * 1_000_000}})
    assert str(found.error) == (
        "spec: has more than 524288 characters of text; move large values to a ConfigMap, a volume or the image"
    )
    assert (found.raw, found.digest) == ({}, None)


_LARGE: list[Json] = [
    {"containers": [{"name": "c", "args": ["x" * 20_000, "\ud800"]}]},
    {"containers": [{"name": "c", "env": [{"name": f"V{number}"} for number in range(200)]}]},
]
"""Specs of SharePods that are larger than the specs of most users."""


@pytest.mark.promise("operator-large-sharepods")
@pytest.mark.parametrize("spec", _LARGE)
def test_little_is_kept_of_a_large_sharepod_and_a_change_of_it_is_noticed(spec: Json) -> None:
    raw = sharepod_object(spec=spec)
    found = sharepod_facts(raw, PODS)
    assert found.error is None
    assert found.gpu is not None
    assert (found.raw, is_as_read(raw, found)) == ({}, True)
    later = sharepod_object(spec=spec, version=7, status={"phase": "Running"})
    assert is_as_read(later, found)
    assert sharepod_facts(later, PODS, found).needs is found.needs, "it is not read again"
    for other in (
        sharepod_object(spec={**spec, "gpu": {"request": 0.5}}, version=7),
        sharepod_object(spec=spec, metadata={"annotations": {"a": "b"}}, version=7),
        sharepod_object(version=7),
    ):
        assert not is_as_read(other, found)
        assert sharepod_facts(other, PODS, found).needs is not found.needs
    assert not is_as_read(later, sharepod_facts(sharepod_object(), PODS)), "it was kept"


@pytest.mark.promise("operator-one-object-one-owner")
@pytest.mark.parametrize("number", [18446744073709552000, -9223372036854777856, 2.5e300, 1e-300, -0.0])
def test_a_large_sharepod_is_as_read_whichever_way_its_numbers_were_read(number: float) -> None:
    text = json.dumps({"items": [sharepod_object(spec={**_LARGE[1], "number": number})]})
    (listed,) = ListText().feed(text)
    assert not isinstance(listed, Unreadable)
    got = parsed("GET", 200, text.encode())["items"][0]
    assert is_as_read(got, sharepod_facts(listed, PODS))


@pytest.mark.parametrize(("one", "other"), [(1, True), (0, False), (1, 1.0), (True, 1.0), (2**53, 2.0**53)])
def test_a_change_between_values_that_are_equal_for_python_is_noticed(one: object, other: object) -> None:
    before = sharepod(spec={"hostIPC": one})
    after = sharepod_facts(sharepod_object(spec={"hostIPC": other}, version=7), PODS, before)
    assert repr(after.raw["spec"]["hostIPC"]) == repr(other)


def nested(levels: int) -> Json:
    """Return maps nested this many levels deep."""
    deep: Json = {}
    for _ in range(levels):
        deep = {"a": deep}
    return deep


def test_managed_fields_count_for_nothing_however_deep_they_are() -> None:
    deep: Json = {}
    for _ in range(5_000):
        deep = {"f:a": deep}
    found = sharepod(metadata={"managedFields": [{"fieldsV1": deep}]})
    assert found.error is None
    assert "managedFields" not in found.raw["metadata"]


def test_pods_of_a_sharepod_that_ask_for_more_than_64_bits_hold_are_refused_together() -> None:
    asks = {"name": "c", "resources": {"requests": {"memory": "5Ei"}}}
    error = sharepod(spec={"containers": [asks, asks]}).error
    assert str(error) == "spec.containers: ask for more memory together than any node has; lower their requests"


def test_what_decides_whether_work_runs_again_is_read_from_a_status_that_cannot_be_read_otherwise() -> None:
    many = [{"type": f"T{number}", "status": "True", "reason": "R"} for number in range(40)]
    unreadable: list[Json] = [{"conditions": many}, {"conditions": "none"}, {"usage": 7}, {"future": {}}]
    for status in unreadable:
        found = sharepod(status={"phase": "Failed", "podUID": "p", **status})
        assert found.ended
        assert found.status.pod_uid == "p"
    assert sharepod(status={"phase": "Baffled", "podUID": "p"}).status.pod_uid == "p"
    many_runs = {"podUID": "p", "cause": "Drained", "attempts": 10**9}
    for status in ({"endTime": "2027"}, {"endTime": 7}, {"endTime": {}}, {"endTime": "2027", "lastEnd": many_runs}):
        for unread in unreadable:
            assert sharepod(status={"phase": "Resting", **status, **unread}).ended, (status, unread)
    between = sharepod(status={"lastEnd": {"podUID": "p", "cause": "Drained", "attempts": "many"}, "replicas": 7})
    assert (between.status.former_pod, between.ended) == ("p", False)


def test_half_a_pair_in_a_status_hides_nothing_of_what_decides() -> None:
    found = sharepod(status={"podUID": "p\ud800", "endTime": "\udfff", "lastEnd": {"podUID": "\ud800"}})
    assert (found.status.pod_uid, found.status.former_pod, found.ended) == ("p?", "?", True)


@pytest.mark.promise("operator-phase-shown")
@pytest.mark.parametrize("phase", [*Phase, "Resting", "", 7])
def test_the_phase_is_shown_and_decides_nothing(phase: object) -> None:
    ready = {"type": "Ready", "status": "False", "reason": "Waiting"}
    assert not sharepod(status={"phase": phase, "podUID": "p", "conditions": [ready]}).ended
    assert sharepod(status={"phase": phase, "endTime": "2026-01-01T00:00:00Z", "conditions": [ready]}).ended
    assert sharepod(status={"phase": phase, "endTime": "2026-01-01T00:00:00Z"}).ended


def test_a_status_of_before_there_was_an_end_time_has_ended_by_its_phase() -> None:
    former = [{"type": "PodReady", "status": "False", "reason": "Evicted"}]
    for phase in Phase:
        found = sharepod(status={"phase": phase, "podUID": "p", "conditions": former})
        assert found.ended == (phase in ("Succeeded", "Failed"))
        assert not found.ended or found.status.succeeded == (phase == "Succeeded")


@pytest.mark.parametrize(
    ("odd", "kept"),
    [
        ({}, True),
        ({"a": ["x" * 600_000]}, False),
        ({str(number): number for number in range(10_001)}, False),
        ({str(number): number for number in range(5_000)}, True),
        ({"a": [[]] * 40}, True),
        (nested(30), True),
        (nested(33), False),
        (nested(300), False),
        (nested(50_000), False),
        ({"half a pair": "\ud800", "long": 1 << 70}, True),
    ],
    ids=range(10),
)
def test_a_status_is_kept_as_it_is_unless_it_is_beyond_the_bounds(odd: Json, kept: bool) -> None:
    status = {"podUID": "p", "odd": odd}
    found = sharepod(status=status)
    assert found.status.pod_uid == "p"
    assert found.raw_status == (status if kept else {})


def test_a_pod_with_lists_beyond_what_is_looked_at_is_still_read() -> None:
    raw = pod_object(node="node-a", phase="Running", deleting=True, conditions=[{"type": "x"}] * 1_000)
    raw["spec"]["containers"] = [{"name": "c", "resources": {"requests": {"cpu": "1"}}}] * 1_000
    found = pod_facts(raw)
    assert (found.tenant, found.node, found.pin, found.phase, found.deleting) == (
        "tenant-1",
        "node-a",
        "node-a",
        "Running",
        True,
    )
    assert found.needs.cpu_milli == MAX_LIST * 1000


def _named(*names: str) -> Json:
    """Return a term of node affinity that names nodes, each in a requirement of its own, as the API server demands."""
    return {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]} for name in names]}


_ZONE = {"matchExpressions": [{"key": "zone", "operator": "Exists"}]}
_NOT_A = {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["node-a"]}]}


@pytest.mark.parametrize(
    "own",
    [
        [],
        [_ZONE],
        [_NOT_A],
        [_named("node-b")],
        [_named("node-a"), _named("node-b")],
        [_named("node-b"), _named("node-c"), _ZONE, {}],
        [_named("node-a", "node-c"), _named("node-b") | _ZONE],
    ],
)
def test_a_pod_is_pinned_to_its_node_whatever_nodes_its_owner_has_named(own: list[Json]) -> None:
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": own}}}
    spec: Json = {"affinity": affinity} if own else {}
    require_node(spec, "node-b")
    raw = pod_object()
    raw["spec"]["affinity"] = spec["affinity"]
    assert pod_facts(raw).pin == "node-b"


def test_fitting_loses_nothing_of_a_pod_that_is_well() -> None:
    raw = pod_object(node="node-a", phase="Running", conditions=[{"type": "Ready", "status": "True"}])
    raw["spec"]["containers"] = [{"name": "c", "resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}]
    raw["spec"]["tolerations"] = [{"key": "k", "operator": "Exists"}]
    raw["spec"]["nodeSelector"] = {"a": "b"}
    raw["status"]["containerStatuses"] = [{"name": "c", "state": {"waiting": {"reason": "X", "message": "y"}}}]
    assert pod_facts(POD(raw)) == pod_facts(raw)


@pytest.mark.parametrize("bad", ["1" * 500_000, "1e999", "9223372036854775808", "four", None])
def test_of_a_foreign_pod_counts_what_can_be_read(bad: str | None) -> None:
    containers: list[Json] = [
        {"resources": {"requests": {"cpu": "2", "memory": bad}}},
        {"resources": {"requests": {"cpu": "1", "memory": "1Gi"}}},
    ]
    node, needs = other_pod({"spec": {"nodeName": "node-a", "containers": containers}})
    assert (node, needs.cpu_milli, needs.memory) == ("node-a", 3000, 1 << 30)


def test_an_unreadable_node_is_reported() -> None:
    metadata = {"name": "node-a", "uid": "u", "labels": {"sharepod.dev/pool": "dedicated"}}
    for spec, status in (
        ({"taints": [{"key": "k"}] * 1_000}, {}),
        ({"taints": "many"}, {}),
        ({}, {"allocatable": {"memory": "1" * 500_000}}),
        ({}, {"conditions": [{"type": []}, None]}),
    ):
        found = node_facts({"metadata": metadata, "spec": spec, "status": status})
        assert found.pool == "dedicated"
        if "conditions" not in status:
            assert found.error is not None
            assert found.error.startswith("cannot be read: ")
            assert len(found.error) < 1_025
        assert not found.ready


def test_a_ledger_with_more_rows_than_are_read_is_not_written_and_decides_nothing_for_the_rest() -> None:
    rows = [{"id": f"t{number}"} for number in range(300)]
    found = gpunode_facts({"metadata": {"name": "n", "uid": "u"}, "spec": {"tenants": rows}})
    assert found.ledger_error is not None
    assert found.unreadable == {f"t{number}" for number in range(300)}


def test_a_sharepod_of_which_nothing_else_is_known_is_deleting_if_its_metadata_says_so() -> None:
    metadata = sharepod_object(metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"})["metadata"]
    assert unreadable_sharepod(metadata, "is larger than 4 MiB").deleting


def _ledger(*ids: str, **fields: object) -> Json:
    rows = [
        {"id": one, "namespace": "ns", "podName": one, "gpus": ["g"], "requestMilli": 1, "limitMilli": 1, "memory": 1}
        for one in ids
    ]
    return {"metadata": {"name": "n", "uid": "u"}, "spec": {"tenants": rows}, "status": fields}


def test_of_a_gpunode_what_has_not_changed_is_taken_over() -> None:
    gpu = {"uuid": "g", "index": 0, "model": "m", "memory": 1}
    before = gpunode_facts(_ledger("a", "b", "c", gpus=[gpu], tenants=[{"id": "a"}, {"id": "b"}]))
    later = _ledger("c", "a", gpus=[gpu], tenants=[{"id": "a"}, {"id": "b", "processes": 1}])
    found = gpunode_facts(later, before)
    assert found == gpunode_facts(later)
    assert found.rows["a"] is before.rows["a"]
    assert found.rows["c"] is before.rows["c"]
    assert found.status.gpus[0] is before.status.gpus[0]
    assert found.status.tenants[0] is before.status.tenants[0]
    assert found.status.tenants[1].processes == 1


def test_an_entry_that_cannot_be_read_any_more_is_not_taken_over() -> None:
    before, later = gpunode_facts(_ledger("a", "b")), _ledger("a", "b")
    later["spec"]["tenants"][1]["memory"] = "much"
    found = gpunode_facts(later, before)
    assert list(found.rows) == ["a"]
    assert found.unreadable == {"b"}
    assert found.ledger_error is not None


def test_a_sharepod_that_asks_for_the_same_is_not_read_again() -> None:
    before = sharepod_facts(sharepod_object(), PODS)
    later = sharepod_object(status={"phase": "Placed"}, metadata={"resourceVersion": "77"})
    found = sharepod_facts(later, PODS, before)
    assert found == sharepod_facts(later, PODS)
    assert found.needs is before.needs
    assert found.raw_text is before.raw_text
    assert found.version == 77


def test_a_sharepod_is_kept_as_text_without_what_changes_while_it_runs() -> None:
    raw = sharepod_object(status={"phase": "Running"}, metadata={"annotations": {"half": "\ud800"}})
    found = sharepod_facts(raw, PODS)
    del raw["status"], raw["metadata"]["resourceVersion"]
    assert type(found.raw_text) is bytes
    assert found.raw == raw


@pytest.mark.parametrize(
    "changed",
    [
        {"metadata": {"labels": {"a": "b"}}},
        {"metadata": {"annotations": {"note": "new"}}},
        {"metadata": {"generation": 9}},
        {"spec": {"restartPolicy": "Never"}},
    ],
)
def test_a_sharepod_with_a_changed_request_is_read_again(changed: dict[str, Json]) -> None:
    before, later = sharepod_facts(sharepod_object(), PODS), sharepod_object()
    for part, fields in changed.items():
        later[part] = {**later[part], **fields}
    assert sharepod_facts(later, PODS, before) == sharepod_facts(later, PODS)


def test_a_sharepod_that_was_too_large_is_read_once_it_is_not() -> None:
    large, small = sharepod_object(), sharepod_object()
    large["spec"] = {**large["spec"], "many": list(range(20_000))}
    before = sharepod_facts(large, PODS)
    assert before.error is not None
    assert sharepod_facts(small, PODS, before) == sharepod_facts(small, PODS)


@pytest.mark.promise("operator-open-enums")
def test_what_a_newer_agent_reports_costs_nothing_but_itself() -> None:
    status = {
        "gpus": [
            {"uuid": "GPU-0", "index": 0, "model": "T", "memory": 1, "health": "Degraded"},
            {"uuid": "GPU-1", "index": 1, "model": "T", "memory": 1, "health": "Healthy"},
        ],
        "tenants": [
            {"id": "t", "drained": True, "findings": [{"reason": "SomethingNewer", "message": "m"}], "later": 1},
        ],
    }
    facts = gpunode_facts({"metadata": {"uid": "u", "name": "n", "resourceVersion": "1"}, "status": status})
    assert facts.error is None
    strange, known = facts.status.gpus
    assert not strange.shareable
    assert "Degraded" in strange.reason
    assert known.shareable
    seen = facts.seen("t")
    assert seen is not None
    assert seen.drained
    assert [finding.reason for finding in seen.findings] == ["SomethingNewer"]


def test_consumption_that_cannot_be_read_costs_its_own_series_and_not_the_node() -> None:
    series = {"series": "a", "namespace": "team", "model": "T", "since": "2026-01-01T00:00:00.000Z"}
    status = {
        "consumption": [
            {**series, "heldMilliseconds": 7, "later": 1},
            {**series, "series": "b", "heldMilliseconds": -1},
        ],
        "consumptionAt": "yesterday",
    }
    facts = gpunode_facts({"metadata": {"uid": "u", "name": "n", "resourceVersion": "1"}, "status": status})
    assert facts.error is None
    assert [(one.series, one.held_milliseconds) for one in facts.status.consumption] == [("a", 7)]
    assert facts.status.consumption_at is None


@pytest.mark.parametrize("later", [1, 0])
def test_a_pod_fails_by_the_container_that_failed_first_and_not_by_a_sidecar_that_was_ended_for_it(later: int) -> None:
    def ended(name: str, code: int, second: int) -> Json:
        finished = f"2026-01-01T00:00:0{second}Z"
        return {"name": name, "state": {"terminated": {"exitCode": code, "reason": "Error", "finishedAt": finished}}}

    containers = [ended("other", 137, 5 + later), ended("main", 3, 5 - later)]
    status = {"initContainerStatuses": [ended("sidecar", 143, 5)], "containerStatuses": containers[later - 1 :]}
    found = pod_facts(pod_object(phase="Failed", status=status))
    assert found.message == "container main ended with exit code 3 (Error)"


@pytest.mark.promise("operator-gpu-gone")
def test_only_a_serving_agents_report_makes_a_gpu_lost() -> None:
    gpu: Json = {"uuid": "GPU-0", "index": 0, "model": "T", "memory": 1}

    def missing_gpus(ready: str | None, **status: object) -> tuple[str, ...]:
        agent_ready = [{"type": "AgentReady", "status": ready, "reason": "R"}] if ready is not None else []
        raw = {"metadata": {"name": "n", "uid": "u"}, "spec": {}, "status": {"conditions": agent_ready, **status}}
        return gpunode_facts(raw).missing_gpus(("GPU-0", "GPU-1"))

    assert missing_gpus("True", gpus=[gpu]) == ("GPU-1",)
    assert missing_gpus("True") == ("GPU-0", "GPU-1")
    assert [missing_gpus(ready, gpus=[gpu]) for ready in ("False", "Unknown", None)] == [(), (), ()]
    assert missing_gpus("True", gpus=[{**gpu, "memory": "much"}]) == (), "an unreadable GPU is not missing"
