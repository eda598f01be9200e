"""Use of resource lines, known by the binding of their policy and never guessed."""

from __future__ import annotations

from typing import Any

import pytest
from sharepod.controller.line_policy import LinePolicy
from sharepod.kube import ApiError, Json, NotFoundError


class _Bindings:
    """API server that has the binding, has it not, or is away."""

    def __init__(self) -> None:
        self.answer: Json | ApiError = {}

    async def get(self, _resource: Any, name: str) -> Json:
        assert name == "sharepod-plain-pods"
        if isinstance(self.answer, ApiError):
            raise self.answer
        return self.answer


@pytest.mark.promise("operator-line-never-unclaimed")
async def test_lines_are_in_use_while_the_binding_is_there_and_an_absent_server_changes_nothing() -> None:
    server, told = _Bindings(), []
    client: Any = server
    policy = LinePolicy(client, lambda: True, lambda: told.append(policy.in_force))
    server.answer = ApiError("POST templates", 503, "Refused", "away")
    await policy.look()
    assert (policy.in_force, told) == (None, [])
    server.answer = {}
    await policy.look()
    await policy.look()
    server.answer = ApiError("POST templates", 503, "Refused", "away")
    await policy.look()
    assert (policy.in_force, told) == (True, [True])
    server.answer = NotFoundError("POST templates", 404, "Refused", "none")
    await policy.look()
    assert told == [True, False]
