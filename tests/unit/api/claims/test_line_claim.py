"""Claims that admission adds to plain Pods with a line: nothing else changes, and a second call changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.api.claims.line_claim import with_claim

LINE = {"limits": {"sharepod.dev/gpu-milli": "400"}}
ENTRY = {"name": "sharepod", "resourceClaimTemplateName": "sharepod"}


def patched(pod: dict[str, Any]) -> dict[str, Any]:
    """Return the Pod with its patch applied."""
    return merged(pod, with_claim(pod))


def merged(pod: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Return the Pod after a merge patch."""

    def merge(old: Any, change: Any) -> Any:
        if not isinstance(change, dict):
            return change
        return {
            **(old if isinstance(old, dict) else {}),
            **{key: merge((old or {}).get(key), value) for key, value in change.items()},
        }

    made: dict[str, Any] = merge(copy.deepcopy(pod), patch)
    return made


@pytest.mark.promise("operator-line-webhook")
def test_each_container_with_a_line_names_the_one_claim_and_nothing_else_changes() -> None:
    bare = {"name": "sidecar", "image": "i", "resources": {"limits": {"cpu": "1"}}}
    other = {"name": "net", "resourceClaimName": "n"}
    pod = {
        "metadata": {"name": "p", "labels": {"app": "x"}},
        "spec": {
            "containers": [{"name": "main", "resources": {**LINE, "claims": [{"name": "net"}]}}, bare],
            "initContainers": [{"name": "first", "resources": LINE}],
            "resourceClaims": [other],
            "nodeSelector": {"a": "b"},
        },
    }
    found = patched(pod)
    assert found["metadata"] == {"name": "p", "labels": {"app": "x", "sharepod.dev/line": "true"}}
    assert found["spec"] == {
        "containers": [
            {"name": "main", "resources": {**LINE, "claims": [{"name": "net"}, {"name": "sharepod"}]}},
            bare,
        ],
        "initContainers": [{"name": "first", "resources": {**LINE, "claims": [{"name": "sharepod"}]}}],
        "resourceClaims": [other, ENTRY],
        "nodeSelector": {"a": "b"},
    }
    assert with_claim(found) == {}, "asked again"


def test_a_pod_without_a_line_is_left_alone() -> None:
    assert with_claim({"spec": {"containers": [{"name": "main", "resources": {"limits": {"cpu": "1"}}}]}}) == {}
    assert with_claim({}) == {}


ANYTHING = st.recursive(
    st.none() | st.text(max_size=3) | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "containers",
                    "initContainers",
                    "resourceClaims",
                    "resources",
                    "limits",
                    "claims",
                    "name",
                    "sharepod.dev/gpu-milli",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@pytest.mark.promise("operator-line-webhook")
@given(ANYTHING, ANYTHING)
def test_no_pod_makes_it_raise_and_asking_twice_is_asking_once(metadata: Any, spec: Any) -> None:
    pod = {"metadata": metadata if isinstance(metadata, dict) else {}, "spec": spec}
    assert with_claim(patched(pod)) == {}
