"""Claims that kube-scheduler allocates: the share in their results, and results that are refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.api.claims.scheduled_claims import ScheduledShare, fault, hold_entry, is_hold, is_scheduled, share
from sharepod.api.sharepod import SpecError
from sharepod.api.units import Bytes, Milli

CONSUMED = {"timeMilli": "400", "limitMilli": "1k", "memory": "4Gi", "tenants": "1"}


def result(device: str = "gpu-0", **fields: Any) -> dict[str, Any]:
    return {
        "request": "gpu",
        "driver": "scheduler.sharepod.dev",
        "pool": "node-a",
        "device": device,
        "consumedCapacity": CONSUMED,
        **fields,
    }


def claim(*requests: Any, **annotations: str) -> dict[str, Any]:
    named = {f"sharepod.dev/gpu-{name}": value for name, value in annotations.items()}
    return {"metadata": {"annotations": named}, "spec": {"devices": {"requests": list(requests)}}}


def asks(name: str = "gpu", **exactly: Any) -> dict[str, Any]:
    return {"name": name, "exactly": {"deviceClassName": "scheduler.sharepod.dev", **exactly}}


def test_a_share_is_what_the_results_consume() -> None:
    nic = {"request": "nic", "driver": "nic.example", "pool": "x", "device": "nic-0"}
    assert share([nic, result("gpu-0"), result("gpu-1")]) == ScheduledShare(
        "node-a", ("gpu-0", "gpu-1"), request_milli=Milli(400), limit_milli=Milli(1000), memory=Bytes(4 << 30)
    )
    assert share([nic]) is None
    assert share([]) is None


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([result(consumedCapacity=None)], "turn on the feature gate DRAConsumableCapacity"),
        ([result(consumedCapacity={**CONSUMED, "memory": None})], "have no memory"),
        ([result(consumedCapacity={**CONSUMED, "timeMilli": "0.5"})], "timeMilli"),
        ([result(consumedCapacity={**CONSUMED, "timeMilli": "1001"})], "consume timeMilli 1001"),
        ([result(consumedCapacity={**CONSUMED, "limitMilli": "300"})], "write limitMilli no less than timeMilli"),
        ([result(consumedCapacity={**CONSUMED, "timeMilli": "0", "limitMilli": "0"})], "limitMilli 0"),
        ([result(), result()], "name one GPU twice"),
        ([result(), result("gpu-1", pool="node-b")], "differ in node or size"),
        ([result(), result("gpu-1", consumedCapacity={**CONSUMED, "memory": "1Gi"})], "differ in node or size"),
        ([result(f"gpu-{number}") for number in range(17)], "a node has 16 at most"),
        ([result(adminAccess=True)], "goes past every share"),
    ],
)
def test_results_that_no_row_can_say_give_no_share(results: list[dict[str, Any]], message: str) -> None:
    found = share(results)
    assert isinstance(found, SpecError)
    assert message in str(found)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["memory", "timeMilli"]), inner),
    max_leaves=8,
)


@given(
    results=st.lists(
        st.fixed_dictionaries(
            {"driver": st.just("scheduler.sharepod.dev")},
            optional={"pool": _json, "device": _json, "consumedCapacity": _json, "adminAccess": _json},
        ),
        min_size=1,
        max_size=3,
    )
)
def test_whatever_results_say_they_are_a_share_or_refused(results: list[dict[str, Any]]) -> None:
    assert isinstance(share(results), ScheduledShare | SpecError)


def test_a_claim_of_the_class_is_known_by_any_of_its_requests() -> None:
    assert is_scheduled(claim({"name": "a", "exactly": {"deviceClassName": "nic"}}, asks()))
    alternative = {"name": "gpu", "firstAvailable": [{"name": "x", "deviceClassName": "scheduler.sharepod.dev"}]}
    assert is_scheduled(claim(alternative))
    assert not is_scheduled(claim({"name": "a", "exactly": {"deviceClassName": "sharepod.dev"}}))
    assert not is_scheduled({"spec": {"devices": {"requests": None}}})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (claim(asks(), affinity="a"), "metadata.annotations[sharepod.dev/gpu-affinity]: is not for claims of class"),
        (claim(asks(), mode="Exclusive"), "kube-scheduler allocates only by size"),
        (claim(asks(adminAccess=True)), "adminAccess goes past every share"),
        (claim(asks("one"), asks("two")), "write one request with count"),
    ],
)
def test_what_the_operator_offers_beyond_sizes_is_refused(body: dict[str, Any], message: str) -> None:
    assert message in str(fault(body))


def test_other_requests_beside_it_are_fine() -> None:
    assert fault(claim({"name": "nic", "exactly": {"deviceClassName": "nic", "adminAccess": True}}, asks())) is None


def test_the_operators_entry_is_known_from_those_of_pods() -> None:
    assert is_hold(hold_entry("node-a", "uid"))
    assert not is_hold({"resource": "pods", "name": "p", "uid": "u"})
