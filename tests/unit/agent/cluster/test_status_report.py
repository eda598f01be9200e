"""The status patch: whole when nothing is known, small when something is, and never over what others wrote."""

from __future__ import annotations

from typing import Any

import jsonpatch
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.agent.cluster.status_report import patch

CONDITION = {"type": "AgentReady", "status": "True", "reason": "Serving", "message": ""}
OTHER = {"type": "AgentAlive", "status": "False", "reason": "LeaseExpired", "message": "help"}


def gpunode(status: dict[str, Any] | None) -> dict[str, Any]:
    found: dict[str, Any] = {"metadata": {"uid": "u", "resourceVersion": "7"}, "spec": {}}
    return found if status is None else {**found, "status": status}


def wanted(**changes: Any) -> dict[str, Any]:
    fields = {
        "gpus": [{"uuid": "GPU-0"}],
        "tenants": [],
        "conditions": [CONDITION],
        "observedGeneration": 3,
        "agentVersion": "1",
        "simulated": False,
    }
    return {**fields, **changes}


def paths(operations: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(each["op"], each["path"]) for each in operations]


def test_a_status_that_is_not_there_yet_is_written_whole() -> None:
    operations = patch(gpunode(None), wanted(), None)
    assert paths(operations) == [("test", "/metadata/uid"), ("test", "/metadata/resourceVersion"), ("add", "/status")]
    assert jsonpatch.apply_patch(gpunode(None), operations)["status"] == wanted()


def test_only_what_changed_is_written() -> None:
    operations = patch(gpunode(wanted()), wanted(tenants=[{"id": "a"}]), wanted())
    assert paths(operations) == [("test", "/metadata/uid"), ("add", "/status/tenants")]
    assert patch(gpunode(wanted()), wanted(), wanted()) == []


def test_another_writers_condition_stays() -> None:
    server = wanted(conditions=[OTHER, {**CONDITION, "status": "Unknown"}])
    operations = patch(gpunode(server), wanted(), wanted(conditions=[{**CONDITION, "status": "Unknown"}]))
    assert ("test", "/metadata/resourceVersion") in paths(operations), "conditions are written by two"
    assert jsonpatch.apply_patch(gpunode(server), operations)["status"]["conditions"] == [OTHER, CONDITION]


def test_another_object_of_that_name_is_not_written() -> None:
    operations = patch(gpunode(wanted()), wanted(observedGeneration=4), wanted())
    other = {**gpunode(wanted()), "metadata": {"uid": "another", "resourceVersion": "9"}}
    with pytest.raises(jsonpatch.JsonPatchTestFailed):
        jsonpatch.apply_patch(other, operations)


_statuses = st.builds(
    wanted,
    tenants=st.lists(st.fixed_dictionaries({"id": st.sampled_from("ab"), "drained": st.booleans()}), max_size=2),
    observedGeneration=st.integers(1, 3),
    conditions=st.just([CONDITION]) | st.just([{**CONDITION, "status": "False"}]),
)


@given(before=_statuses | st.none(), after=_statuses, known=st.booleans(), others=st.booleans())
def test_the_patch_always_leads_to_what_is_wanted(
    before: dict[str, Any] | None, after: dict[str, Any], known: bool, others: bool
) -> None:
    server = before if before is None or not others else {**before, "conditions": [OTHER, *before["conditions"]]}
    operations = patch(gpunode(server), after, before if known else None)
    result = jsonpatch.apply_patch(gpunode(server), operations).get("status")
    kept = [OTHER] if others and before is not None else []
    assert result == {**after, "conditions": [*kept, *after["conditions"]]}
