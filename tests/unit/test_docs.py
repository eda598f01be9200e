"""The reference names every field, annotation and condition that there is."""

from __future__ import annotations

from pathlib import Path

import pytest
from sharepod.api import sharepod as api
from sharepod.api.dialects import KEYS
from sharepod.api.gpunode import Gpu, GPUNodeSpec, GPUNodeStatus, Tenant, TenantStatus
from sharepod.api.objects import Model
from sharepod.api.sharepod import GpuSpec, SharePodStatus

REFERENCE = (Path(__file__).resolve().parents[2] / "docs" / "reference.md").read_text()


@pytest.mark.parametrize("model", [GpuSpec, SharePodStatus, GPUNodeSpec, GPUNodeStatus, Gpu, Tenant, TenantStatus])
def test_every_field_is_in_the_reference(model: type[Model]) -> None:
    missing = [field.alias for field in model.model_fields.values() if f"{field.alias}" not in REFERENCE]
    assert not missing


def test_every_annotation_is_in_the_reference() -> None:
    names = {name for key in KEYS for name in (key.native, *key.foreign)}
    assert not {name for name in names if f"`{name}`" not in REFERENCE}


def test_every_condition_and_phase_is_in_the_reference() -> None:
    conditions = {value for name, value in vars(api).items() if name.startswith("CONDITION_")}
    assert not {name for name in conditions | {phase.value for phase in api.Phase} if f"`{name}`" not in REFERENCE}
