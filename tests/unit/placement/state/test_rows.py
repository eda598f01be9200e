"""Rows of the ledger, and the reservations from which they are made."""

from __future__ import annotations

import re
from dataclasses import replace

from sharepod.api.gpunode import ClaimReference, SchedulingLabels, Tenant
from sharepod.api.objects import CLAIM_DRIVER, DEVICE_CLASS, device_name
from sharepod.api.units import Bytes, GpuUuid, Milli, TenantId
from sharepod.placement.state.types import Reservation

OF_A_CLAIM = Reservation(
    tenant=TenantId("claim-uid"),
    namespace="team-a",
    pod_name="",
    gpus=(GpuUuid("GPU-0"),),
    request_milli=Milli(400),
    limit_milli=Milli(1000),
    memory=Bytes(1 << 32),
    claim=ClaimReference(name="share", uid="claim-uid"),
    labels=SchedulingLabels(exclusion="a"),
)


def test_a_row_of_a_claim_names_the_claim_and_no_pod() -> None:
    written = OF_A_CLAIM.row().dump()
    assert (written["id"], written["claim"]) == ("claim-uid", {"name": "share", "uid": "claim-uid"})
    assert "podUID" not in written
    assert Reservation.of_row(Tenant.model_validate(written)) == OF_A_CLAIM


def test_a_row_without_a_claim_is_written_as_it_was_before_there_were_claims() -> None:
    of_a_sharepod = replace(OF_A_CLAIM, pod_name="one", pod_uid="pod-uid", claim=None)
    assert "claim" not in of_a_sharepod.row().dump()


def test_a_row_that_names_no_pod_can_be_read() -> None:
    written = OF_A_CLAIM.row().dump()
    del written["podName"]
    assert Tenant.model_validate(written).pod_name == ""


def test_messages_name_the_claim_where_there_is_no_pod() -> None:
    assert OF_A_CLAIM.title == "team-a/share"
    assert replace(OF_A_CLAIM, pod_name="one").title == "team-a/one"


def test_names_in_claims_are_names_that_the_api_server_takes() -> None:
    device = device_name("GPU-5A9E0001-0000-4000-8000-000000000001")
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", device)
    assert (DEVICE_CLASS, CLAIM_DRIVER) == ("sharepod.dev", "gpu.sharepod.dev")
