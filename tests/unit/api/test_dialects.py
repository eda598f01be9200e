"""Annotations have the same meaning as the gpu block. Invalid values are refused with the annotation's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cluster.malformed import CASES
from cluster.malformed_case import Case
from hypothesis import given
from hypothesis import strategies as st
from sharepod.api.bounds import beyond
from sharepod.api.dialects import FIELD_OF, FOREIGN_PREFIXES, KEYS, NATIVE_PREFIX, PREFIXES, annotations_of, effective
from sharepod.api.gpunode import MemoryIsolation, Mode
from sharepod.api.pods.pod import PodSettings, check_pod_fields
from sharepod.api.sharepod import GpuRequest, GpuSpec, PlacementPolicy, SpecError
from sharepod.placement.state.needs import NeedsError, parse_needs

UUIDS = ("GPU-0a1b2c3d-0000-0000-0000-000000000001", "GPU-0a1b2c3d-0000-0000-0000-000000000002")

SCHEMA_ONLY = {
    "count as text",
    "fraction as text",
    "movable that is no boolean",
    "misspelt field",
    "no containers",
    "a field of a Deployment",
    "a misspelt field of a container",
}
"""Names of the cases that only the CRD's schema refuses, by a type or a strict check."""


def annotated(**annotations: str) -> dict[str, Any]:
    return {"metadata": {"name": "x", "annotations": annotations}, "spec": {"containers": []}}


def request_of(**annotations: str) -> GpuRequest:
    return effective(annotated(**annotations))


def refusal(check: Callable[[dict[str, Any]], object], sharepod: dict[str, Any]) -> str:
    """Return the field of the SpecError that `check` raises. Any other exception fails the test."""
    try:
        check(sharepod)
    except SpecError as error:
        return error.field
    return ""


def check_size(sharepod: dict[str, Any]) -> None:
    if (why := beyond(sharepod)) is not None:
        raise SpecError("spec", why)


def check_needs(sharepod: dict[str, Any]) -> None:
    try:
        parse_needs(sharepod["spec"])
    except NeedsError as error:
        raise SpecError(error.field, error.message) from None


@pytest.mark.promise("operator-annotations")
@pytest.mark.parametrize("case", [case for case in CASES if case.title not in SCHEMA_ONLY], ids=lambda case: case.title)
def test_the_operator_refuses_what_admission_refuses(case: Case) -> None:
    sharepod = case.manifest()
    checks = (effective, lambda given: check_pod_fields(given, PodSettings()), check_size, check_needs)
    assert any(refusal(check, sharepod) for check in checks)


def test_every_field_of_the_block_has_an_annotation_and_every_prefix_carries_every_key() -> None:
    aliases = {field.alias for field in GpuSpec.model_fields.values()}
    assert {key.field for key in KEYS} == aliases
    carried = [{name.removeprefix(prefix) for name in FIELD_OF if name.startswith(prefix)} for prefix in PREFIXES]
    assert carried[0] == carried[1] == carried[2] == {name for key in KEYS for name in (key.native, *key.foreign)}


def test_native_annotations_express_every_field_of_the_block() -> None:
    block = {
        "request": 0.25,
        "limit": 0.5,
        "memory": "4Gi",
        "count": 2,
        "mode": "Shared",
        "memoryIsolation": "None",
        "latency": "Interactive",
        "coRunning": "Deny",
        "group": "train",
        "affinity": "a",
        "antiAffinity": "b",
        "exclusion": "c",
        "placement": "Spread",
        "uuids": list(UUIDS),
        "models": ["A100", "H100 80GB"],
    }
    by_annotations = request_of(
        **{
            f"{NATIVE_PREFIX}request": "0.25",
            f"{NATIVE_PREFIX}limit": "0.50",
            f"{NATIVE_PREFIX}memory": "4Gi",
            f"{NATIVE_PREFIX}count": "2",
            f"{NATIVE_PREFIX}mode": "Shared",
            f"{NATIVE_PREFIX}memory-isolation": "None",
            f"{NATIVE_PREFIX}latency": "Interactive",
            f"{NATIVE_PREFIX}co-running": "Deny",
            f"{NATIVE_PREFIX}group": "train",
            f"{NATIVE_PREFIX}affinity": "a",
            f"{NATIVE_PREFIX}anti-affinity": "b",
            f"{NATIVE_PREFIX}exclusion": "c",
            f"{NATIVE_PREFIX}placement": "Spread",
            f"{NATIVE_PREFIX}uuids": ", ".join(UUIDS),
            f"{NATIVE_PREFIX}models": "A100,H100 80GB",
        }
    )
    assert by_annotations == effective({"metadata": {}, "spec": {"gpu": block}})
    assert by_annotations.memory_isolation is MemoryIsolation.NONE
    assert by_annotations.placement is PlacementPolicy.SPREAD


@pytest.mark.parametrize("prefix", FOREIGN_PREFIXES)
def test_foreign_manifests_mean_what_they_meant(prefix: str) -> None:
    request = request_of(
        **{
            f"{prefix}gpu_request": "0.5",
            f"{prefix}gpu_limit": "1.0",
            f"{prefix}gpu_mem": "1073741824",
            f"{prefix}sched_anti-affinity": "red",
            f"{prefix}sched_exclusion": "blue",
            f"{prefix}GPUID": "abcde",
        }
    )
    assert (request.request_milli, request.limit_milli, request.memory, request.count) == (500, 1000, 1 << 30, 1)
    assert (request.labels.affinity, request.labels.anti_affinity, request.labels.exclusion) == ("abcde", "red", "blue")
    assert request.mode is Mode.SHARED


def test_dialects_may_be_mixed_as_long_as_each_field_is_said_once() -> None:
    request = request_of(**{"gemini/gpu_request": "0.5", f"{NATIVE_PREFIX}count": "2"})
    assert (request.request_milli, request.count) == (500, 2)


@pytest.mark.parametrize(("field", "name"), [("uuids", UUIDS[0]), ("models", "A100")])
def test_a_list_that_names_one_twice_is_refused(field: str, name: str) -> None:
    with pytest.raises(SpecError, match="more than once; write each name once") as refused:
        request_of(**{f"{NATIVE_PREFIX}request": "0.4", f"{NATIVE_PREFIX}{field}": f"{name}, {name}"})
    assert name in refused.value.message


def test_other_annotations_are_none_of_ours() -> None:
    request = request_of(
        **{"gemini/gpu_request": "0.5", "sharepod.dev/note": "x", "kubesharing/gpu_request": "9", "a": "b"}
    )
    assert request.request_milli == 500
    assert annotations_of(annotated(a="b")) == {}


def test_node_name_is_taken_beside_a_gpuid_only() -> None:
    sharepod = annotated(**{"kubeshare/gpu_request": "0.5", "kubeshare/GPUID": "a"})
    sharepod["spec"]["nodeName"] = "node-0"
    assert effective(sharepod).labels.affinity == "a"
    del sharepod["metadata"]["annotations"]["kubeshare/GPUID"]
    with pytest.raises(SpecError, match="remove it and use a nodeSelector") as refused:
        effective(sharepod)
    assert refused.value.field == "spec.nodeName"


def test_an_error_about_what_is_missing_names_the_annotation_of_the_dialect_in_use() -> None:
    for given_, missing in (
        ({"gemini/gpu_limit": "0.5"}, "gemini/gpu_request"),
        ({f"{NATIVE_PREFIX}count": "2"}, f"{NATIVE_PREFIX}request"),
        ({"kubeshare/gpu_request": "0"}, "kubeshare/gpu_mem"),
        ({f"{NATIVE_PREFIX}request": "0"}, f"{NATIVE_PREFIX}memory"),
    ):
        with pytest.raises(SpecError) as refused:
            request_of(**given_)
        assert refused.value.field == f"metadata.annotations[{missing}]"


@given(
    st.integers(0, 1000), st.sampled_from(["gemini/gpu_request", "kubeshare/gpu_request", f"{NATIVE_PREFIX}request"])
)
def test_every_thousandth_is_read_exactly(milli: int, name: str) -> None:
    memory = {"gemini/gpu_mem": "1073741824"}
    assert request_of(**{name: f"{milli / 1000:.3f}"}, **memory).request_milli == milli
    assert request_of(**{name: f"{milli // 1000}.{milli % 1000:03d}000"}, **memory).request_milli == milli


@given(st.dictionaries(st.sampled_from(sorted(FIELD_OF)), st.text(max_size=20), max_size=4))
def test_whatever_annotations_say_the_answer_is_a_request_or_a_spec_error(annotations: dict[str, str]) -> None:
    try:
        request = request_of(**annotations)
    except SpecError:
        return
    assert 0 <= request.request_milli <= request.limit_milli <= 1000


@pytest.mark.promise("install-older-operator")
def test_a_field_of_a_newer_crd_is_passed_over() -> None:
    asked = {"request": 0.4, "memory": "4Gi"}
    newer = {**asked, "isolation": "Hardware", "since": {"version": 2}}
    assert effective({"spec": {"gpu": newer}}) == effective({"spec": {"gpu": asked}})
