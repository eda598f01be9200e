"""API server and operator refuse the same objects. An object that only one of them accepts is an error."""

from __future__ import annotations

from typing import Any

import pytest
from cluster.admission import sharepod
from cluster.malformed_case import UUID
from harness.api import ApiError, Object
from harness.cluster import Cluster
from harness.installation import SHAREPODS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sharepod.api.dialects import FIELD_OF, effective
from sharepod.api.sharepod import SpecError

_FRACTIONS = (
    "0",
    "0.0",
    "0.5",
    ".25",
    "1",
    "1.",
    "1.000",
    "0.333",
    "400m",
    "33.3%",
    "0.3334",
    "33.34%",
    "1001m",
    "1.001",
    "-0.1",
    "1e-1",
    "half",
    "",
    " 0.5",
    "0,5",
)
_SIZES = (
    "4Gi",
    "4294967296",
    "1Mi",
    "1048575",
    "4G",
    "1.5Gi",
    "1e9",
    "4GB",
    "-1Gi",
    "0",
    "12345678901234567890",
    "3Ei",
    "",
)
_LABELS = ("red", "a.b-c_d", "-a", "a b", "", "x" * 63, "x" * 64)
_VALUES: dict[str, tuple[str, ...]] = {
    "request": _FRACTIONS,
    "limit": _FRACTIONS,
    "memory": _SIZES,
    "count": ("1", "2", "16", "17", "0", "two", "1.0", ""),
    "mode": ("Shared", "Exclusive", "exclusive", ""),
    "memoryIsolation": ("Enforced", "None", "none"),
    "latency": ("Normal", "Interactive", "interactive"),
    "coRunning": ("Allow", "Deny", "deny"),
    "group": _LABELS,
    "affinity": _LABELS,
    "antiAffinity": _LABELS,
    "exclusion": _LABELS,
    "placement": ("Binpack", "Spread", "Random"),
    "uuids": (UUID, f"{UUID}, {UUID[:-1]}2", "0", "", f"{UUID},", f"{UUID}, {UUID}"),
    "models": ("A100", "A100, H100 80GB", "", "A100,,", "A100,A100"),
}


@st.composite
def annotation_sets(draw: st.DrawFn) -> dict[str, str]:
    """Draw a set of annotations. It is valid more often than a random set."""
    fields = draw(st.lists(st.sampled_from(sorted(_VALUES)), max_size=3, unique=True))
    annotations: dict[str, str] = {}
    for field in {*fields, "request"} if draw(st.integers(0, 3)) else fields:
        names = [name for name, of in FIELD_OF.items() if of == field]
        for name in draw(
            st.lists(st.sampled_from(names), min_size=1, max_size=2 if not draw(st.integers(0, 5)) else 1)
        ):
            values = _VALUES[field]
            annotations[name] = draw(
                st.sampled_from(values[: max(2, len(values) // 2)] if draw(st.booleans()) else values)
            )
    return annotations


@st.composite
def blocks(draw: st.DrawFn) -> dict[str, Any]:
    fraction = st.sampled_from([0, 0.0, 0.001, 0.4, 0.333, 0.3333, 1, 1.0, 1.0001, 1.5, -0.5, 100, 1e300]) | st.floats(
        0, 1
    ).map(lambda value: round(value, 3))
    fields: dict[str, st.SearchStrategy[Any]] = {
        "request": fraction,
        "limit": fraction,
        "memory": st.sampled_from(
            ["4Gi", "1Mi", "1023Ki", "4", 4, 2**30, "4GB", "-1Gi", "1e9", "2Ei", 0, "1500M", "0.5Gi"]
        ),
        "count": st.integers(0, 17),
        "mode": st.sampled_from(["Shared", "Shared", "Exclusive", "exclusive"]),
        "latency": st.sampled_from(["Normal", "Interactive", "interactive"]),
        "coRunning": st.sampled_from(["Allow", "Deny", "deny"]),
        "group": st.sampled_from(_LABELS),
        "affinity": st.sampled_from(_LABELS),
        "uuids": st.lists(st.sampled_from([UUID, UUID[:-1] + "2", "GPU-1"]), max_size=2, unique=True),
    }
    return {name: draw(values) for name, values in fields.items() if draw(st.booleans())}


def _agree(server: Cluster, body: Object) -> None:
    try:
        effective(body)
        by_operator = ""
    except SpecError as error:
        by_operator = str(error)
    try:
        server.api.create(SHAREPODS, body, dryRun="All")
        by_server = ""
    except ApiError as error:
        by_server = error.message
    assert bool(by_operator) == bool(by_server), (
        f"operator: {by_operator or 'accepts'}; API server: {by_server or 'accepts'}"
    )


@pytest.mark.promise("operator-annotations")
@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(annotations=annotation_sets())
def test_api_server_and_operator_refuse_the_same_annotations(server: Cluster, annotations: dict[str, str]) -> None:
    _agree(server, sharepod("agreed", annotations=annotations))


@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(gpu=blocks())
def test_api_server_and_operator_refuse_the_same_gpu_blocks(server: Cluster, gpu: dict[str, Any]) -> None:
    _agree(server, sharepod("agreed", gpu))
