"""Claim of a node's self-test: a ResourceClaim without a share, whose container is set up like a tenant's. Pure.

A Pod of the DaemonSet `sharepod-self-test-claim` has one. The operator allocates it without a row in a ledger, and the
agent attaches the directory of the self-test by it.

Guarantees:
- Only claims of the system's own namespace count: a user who may create Pods there has greater rights anyway.
- The allocation names no node: the Pod's own affinity does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sharepod.api.objects import CLAIM_DRIVER, SELF_TEST_CLAIM, SELF_TEST_CLASS, SELF_TEST_POOL, only_request


def has_name_of_self_test(name: str) -> bool:
    """Return whether a claim in SharePod's own namespace has the name of a self-test's claim."""
    return name.startswith(f"{SELF_TEST_CLAIM}-")


def request_of_self_test(claim: Mapping[str, Any]) -> str | None:
    """Return the name of the single request of a self-test's claim. None for any other claim."""
    request = only_request(claim)
    if request is None:
        return None
    exactly = request.get("exactly")
    if not isinstance(exactly, Mapping) or exactly.get("deviceClassName") != SELF_TEST_CLASS:
        return None
    name = request.get("name")
    return name if isinstance(name, str) else None


def self_test_allocation(request: str, now: str) -> dict[str, Any]:
    """Return the content for `status.allocation` of a self-test's claim. `now`: RFC 3339, in whole seconds."""
    result = {"device": SELF_TEST_POOL, "driver": CLAIM_DRIVER, "pool": SELF_TEST_POOL, "request": request}
    return {"allocationTimestamp": now, "devices": {"results": [result]}}
