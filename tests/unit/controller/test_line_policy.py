"""The operator reads from the policy and its binding whether resource lines are in use, and guesses nothing."""

from __future__ import annotations

from typing import Any

import pytest
from sharepod.controller.apiserver.client import POLICY_BINDINGS
from sharepod.controller.line_policy import LinePolicy
from sharepod.kube import ApiError, Json, NotFoundError

DENIES: Json = {"spec": {"validationActions": ["Deny", "Audit"]}}
DELETED = NotFoundError("GET policy", 404, "Refused", "none")
AWAY = ApiError("GET policy", 503, "Refused", "away")


class _Policies:
    """API server that has the policy and its binding, lacks one of them, or does not answer."""

    def __init__(self) -> None:
        self.binding: Json | ApiError = DENIES
        self.policy: Json | ApiError = {}

    async def get(self, resource: Any, name: str) -> Json:
        assert name == "sharepod-plain-pods"
        answer = self.binding if resource is POLICY_BINDINGS else self.policy
        if isinstance(answer, ApiError):
            raise answer
        return answer


@pytest.mark.promise("operator-line-never-unclaimed")
async def test_lines_are_in_use_while_policy_and_binding_are_there_and_an_absent_server_changes_nothing() -> None:
    server, changes = _Policies(), []
    client: Any = server
    policy = LinePolicy(client, lambda: True, lambda: changes.append(policy.in_force))
    server.binding = AWAY
    await policy.look()
    assert (policy.in_force, changes) == (None, [])
    server.binding = DENIES
    await policy.look()
    await policy.look()
    server.binding = AWAY
    await policy.look()
    assert (policy.in_force, changes) == (True, [True])
    server.binding = DELETED
    await policy.look()
    assert changes == [True, False]


@pytest.mark.promise("operator-line-never-unclaimed")
@pytest.mark.parametrize(
    ("binding", "policy", "in_use"),
    [(DENIES, DELETED, False), (DENIES, AWAY, None), ({"spec": {"validationActions": ["Warn"]}}, {}, False)],
)
async def test_a_binding_without_its_policy_or_that_denies_nothing_refuses_no_pod(
    binding: Json, policy: Json | ApiError, in_use: bool | None
) -> None:
    server = _Policies()
    server.binding, server.policy = binding, policy
    client: Any = server
    found = LinePolicy(client, lambda: True, lambda: None)
    await found.look()
    assert found.in_force is in_use
