"""Conditions under which a policy is evaluated: they are true for each object that a rule of the policy refuses."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.api.admission.pod_fields import SUSPECT
from sharepod.api.pods.pod import DEVICE_MOUNTS, GPU_RESOURCE_PATTERN, INJECTION_PATTERN, RESERVED_MOUNT_PATTERN
from sharepod.api.resource_line import PREFIX


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ("annotations", INJECTION_PATTERN),
        ("resources", GPU_RESOURCE_PATTERN),
        ("resources", "^" + re.escape(PREFIX)),
        ("mounts", RESERVED_MOUNT_PATTERN),
        ("mounts", re.escape(DEVICE_MOUNTS)),
    ],
)
@given(data=st.data())
def test_whatever_a_rule_refuses_is_suspect(kind: str, pattern: str, data: st.DataObject) -> None:
    refused = data.draw(st.from_regex(pattern))
    assert any(part in refused for part in SUSPECT[kind])
