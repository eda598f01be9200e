"""Reasons for which a node of pool `scheduler` takes no tenants, so that its agent publishes no GPU."""

from __future__ import annotations

import pytest
from sharepod.agent.cluster.run import unfit
from sharepod.agent.cluster.status_report import Readiness, ReadyReason
from sharepod.agent.kubelet.claim_self_test import ClaimsAttachReason
from sharepod.agent.kubelet.self_test import EnvInjectionReason, HookLoadsReason

WELL = {
    "AgentReady": Readiness(ReadyReason.SERVING),
    "HookLoads": Readiness(HookLoadsReason.LOADED),
    "ClaimsAttach": Readiness(ClaimsAttachReason.ATTACHED),
    "EnvInjection": Readiness(EnvInjectionReason.NOT_INJECTED),
}


def test_a_node_that_serves_takes_tenants() -> None:
    assert unfit(WELL, None, plugin_offers=False) is None


@pytest.mark.parametrize(
    ("kind", "readiness"),
    [
        ("AgentReady", Readiness(ReadyReason.DRA_DRIVER_PRESENT, "a rival")),
        ("HookLoads", Readiness(HookLoadsReason.NOT_LOADED, "a rival")),
        ("ClaimsAttach", Readiness(ClaimsAttachReason.NOT_ATTACHED, "a rival")),
        ("EnvInjection", Readiness(EnvInjectionReason.INJECTED, "a rival")),
    ],
)
def test_a_condition_under_which_shares_are_not_enforced_is_named(kind: str, readiness: Readiness) -> None:
    assert "a rival" in (unfit({**WELL, kind: readiness}, None, plugin_offers=False) or "")


@pytest.mark.promise("operator-scheduler-pool-device-plugin")
def test_a_node_whose_gpus_nvidias_device_plugin_offers_takes_none() -> None:
    assert "assigned twice: keep it off the node" in (unfit(WELL, None, plugin_offers=True) or "")
    assert "not registered; claims need" in (unfit(WELL, "not registered", plugin_offers=False) or "")
