"""Reading a claim with any content raises only the refusal that is reported to its owner."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property.any_place import assert_fits_an_event, with_value
from sharepod.api.claims.claims import is_ours, lower
from sharepod.api.objects import MAX_GPUS
from sharepod.api.sharepod import SpecError
from sharepod.controller.state.facts.claim_facts import claim_facts, claim_pod_facts

_TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["sharepod.dev", "gpu.sharepod.dev", "400", "1k", "4Gi", "-1", "1e99", "All", "Exclusive", "0.4"]),
)
_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), _TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_TEXTS, inner, max_size=3)),
    max_leaves=8,
)
_EXPRESSION = 'device.attributes["gpu.sharepod.dev"].uuid in ["GPU-5a9e0001-0000-4000-8000-000000000001"]'
_CLAIM = {
    "metadata": {
        "name": "share",
        "annotations": {"sharepod.dev/gpu-mode": "Shared", "sharepod.dev/gpu-request": "0.3", "a": "b"},
    },
    "spec": {
        "devices": {
            "requests": [
                {
                    "name": "gpu",
                    "exactly": {
                        "deviceClassName": "sharepod.dev",
                        "allocationMode": "ExactCount",
                        "count": 1,
                        "capacity": {"requests": {"timeMilli": "400", "limitMilli": "700", "memory": "4Gi"}},
                        "selectors": [{"cel": {"expression": _EXPRESSION}}],
                    },
                }
            ],
            "constraints": [],
            "config": [],
        }
    },
}


def _read(raw: Any) -> None:
    """Read a claim. Only a refusal may be raised, and its text must not be longer than an Event allows."""
    is_ours(raw)
    try:
        gpu = lower(raw).gpu
    except SpecError as refused:
        error = refused
    else:
        assert 0 <= gpu.request_milli <= gpu.limit_milli <= 1000
        assert 1 <= gpu.count <= MAX_GPUS
        return
    assert_fits_an_event(error)


@pytest.mark.promise("operator-claim-hostile")
@given(value=_VALUES, place=st.integers(min_value=0))
def test_a_claim_with_anything_in_any_place_is_read_or_refused(value: Any, place: int) -> None:
    _read(with_value(_CLAIM, value, place))


_FIELDS = st.sampled_from(
    [
        ("spec",),
        ("spec", "devices"),
        ("spec", "resourceClaims"),
        ("spec", "containers"),
        ("spec", "schedulingGates"),
        ("status",),
        ("status", "allocation"),
        ("status", "reservedFor"),
        ("status", "devices"),
        ("status", "resourceClaimStatuses"),
        ("status", "conditions"),
        ("metadata", "annotations"),
        ("metadata", "finalizers"),
        ("metadata", "ownerReferences"),
    ]
)


@given(value=_VALUES, path=_FIELDS)
def test_facts_of_a_claim_and_its_pod_are_read_from_any_field_value(value: Any, path: tuple[str, ...]) -> None:
    raw: Any = copy.deepcopy(_CLAIM) | {"status": {}}
    raw["metadata"] |= {"uid": "u", "namespace": "n", "resourceVersion": "7"}
    inner = raw
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    claim, pod = claim_facts(raw), claim_pod_facts(raw)
    assert (claim.uid, claim.name, claim.version) == ("u", "share", 7)
    assert (pod.uid, pod.version) == ("u", 7)
    assert not claim.ours or claim.by_line or (claim.request is None) != (claim.error is None)


@given(value=st.dictionaries(_TEXTS, _VALUES, max_size=4))
def test_any_document_is_read_or_refused(value: dict[str, Any]) -> None:
    _read(value)


@given(seed=st.integers(min_value=0))
def test_an_expression_with_any_change_is_read_or_refused(seed: int) -> None:
    chance = random.Random(seed)
    letters = list(_EXPRESSION)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(letters))
        letters[place : place + chance.randint(0, 3)] = chance.choice(
            ['"', "'", "\\", "&&", "]", "(", "\n", "é", " ", ""]
        )
    claim: Any = copy.deepcopy(_CLAIM)
    claim["spec"]["devices"]["requests"][0]["exactly"]["selectors"] = [{"cel": {"expression": "".join(letters)}}]
    _read(claim)


def test_the_claim_that_is_changed_is_read_unchanged() -> None:
    assert lower(_CLAIM).gpu.request_milli == 300
