"""Reading a Pod's resource line with any content raises only the refusal that is reported to its owner."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property.any_place import assert_fits_an_event, with_value
from sharepod.api.objects import MAX_GPUS
from sharepod.api.pods.plain_pods import asks, lower
from sharepod.api.resource_line import MEMORY, MILLI
from sharepod.api.sharepod import SpecError

_KEYS = st.sampled_from([MILLI, MEMORY, "sharepod.dev/gpu", "sharepod.dev/gpu-count", "kubeshare/GPUID", "limits"])
_TEXTS = st.one_of(
    st.text(max_size=12),
    _KEYS,
    st.sampled_from(["400", "1k", "2000", "1500", "4Ki", "-1", "1e99", "0.4", "Always", "Exclusive", "2"]),
)
_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), _TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_TEXTS, inner, max_size=3)),
    max_leaves=8,
)
_LINE = {"limits": {MILLI: "400", MEMORY: "4096"}, "requests": {MILLI: "400", MEMORY: "4096"}}
_POD = {
    "metadata": {
        "name": "plain",
        "annotations": {"sharepod.dev/gpu-mode": "Shared", "sharepod.dev/gpu-request": "0.3", "a": "b"},
    },
    "spec": {
        "initContainers": [{"name": "side", "restartPolicy": "Always", "resources": _LINE}],
        "containers": [{"name": "main", "resources": _LINE}, {"name": "silent"}],
    },
}


def _read(raw: Any) -> None:
    """Read a Pod. It may raise only its refusal, no longer than an Event allows."""
    asks(raw)
    try:
        request = lower(raw)
    except SpecError as refused:
        error = refused
    else:
        gpu = request.gpu
        assert 0 <= gpu.request_milli <= request.most_milli <= 1000
        assert gpu.request_milli <= gpu.limit_milli <= 1000
        assert 1 <= gpu.count <= MAX_GPUS
        assert request.devices == (("line", gpu.count),)
        return
    assert_fits_an_event(error)


@pytest.mark.promise("operator-line-hostile")
@given(value=_VALUES, place=st.integers(min_value=0))
def test_a_pod_with_anything_in_any_place_is_read_or_refused(value: Any, place: int) -> None:
    _read(with_value(_POD, value, place))


@given(value=st.dictionaries(_TEXTS, _VALUES, max_size=4))
def test_any_document_is_read_or_refused(value: dict[str, Any]) -> None:
    _read(value)


@given(limits=st.dictionaries(_KEYS, _TEXTS, max_size=3), annotations=st.dictionaries(_KEYS, _TEXTS, max_size=3))
def test_any_line_with_any_annotations_is_read_or_refused(limits: Any, annotations: Any) -> None:
    container = {"name": "main", "resources": {"limits": limits}}
    _read({"metadata": {"annotations": annotations}, "spec": {"containers": [container]}})


def test_the_pod_that_is_changed_is_read_unchanged() -> None:
    assert lower(_POD).gpu.request_milli == 300
