"""Templates of resource lines: created where a Pod waits for one, created again after deletion, and corrected."""

from __future__ import annotations

from typing import Any

import pytest
from sharepod.controller.apiserver.client import CLAIM_TEMPLATES, CLAIMS, Resource
from sharepod.controller.state.claims_seen import ClaimsSeen
from sharepod.controller.state.facts.object_facts import ObjectFacts
from sharepod.controller.state.namespaces import NamespaceLabels
from sharepod.controller.tenants.line_templates import LineTemplates
from sharepod.kube import AlreadyExistsError, ApiError, ForbiddenError, Json, NotFoundError
from unit.controller.state.test_claims_seen import line_claim, line_pod


class _Templates:
    """API server that has at most one template."""

    def __init__(self) -> None:
        self.there: Json | None = None
        self.claims: dict[str, Json] = {}
        self.calls: list[str] = []
        self.refusal: ApiError | None = None
        self.notes: list[tuple[str, str]] = []

    def warning(self, _kind: str, about: ObjectFacts, _reason: str, _action: str, note: str) -> None:
        self.notes.append((about.name, note))

    async def create(self, resource: Resource, body: Json, namespace: str) -> Json:
        if resource is CLAIMS:
            return self._claim(body, namespace)
        assert resource is CLAIM_TEMPLATES
        self.calls.append("create")
        if self.refusal is not None:
            raise self.refusal
        if self.there is not None:
            raise AlreadyExistsError("POST templates", 409, "Refused", "exists")
        self.there = body | {"metadata": {"name": body["metadata"]["name"], "uid": f"u{len(self.calls)}"}}
        return self.there

    def _claim(self, body: Json, namespace: str) -> Json:
        name = body["metadata"]["name"]
        self.calls.append(f"claim {name}")
        if self.refusal is not None:
            raise self.refusal
        if name in self.claims:
            raise AlreadyExistsError("POST claims", 409, "Refused", "exists")
        metadata = {**body["metadata"], "namespace": namespace, "uid": f"claim-{len(self.calls)}"}
        self.claims[name] = {**body, "metadata": metadata | {"resourceVersion": "9"}}
        return self.claims[name]

    async def get(self, _resource: Resource, _name: str, _namespace: str) -> Json:
        self.calls.append("get")
        assert self.there is not None
        return self.there

    async def delete(self, _resource: Resource, _name: str, _namespace: str, *, uid: str) -> None:
        self.calls.append("delete")
        assert self.there is not None
        assert self.there["metadata"]["uid"] == uid
        self.there = None


def made() -> tuple[LineTemplates, _Templates, ClaimsSeen]:
    """Return the reconciler, its API server, and a state with a Pod in namespace `a` that waits for its claim."""
    seen, server = ClaimsSeen(lambda _: None), _Templates()
    seen.put_pod(line_pod("p", None))
    client: Any = server
    events: Any = server
    return LineTemplates(seen, client, events, 1), server, seen


async def test_a_namespace_whose_pod_waits_gets_a_template_once() -> None:
    templates, server, seen = made()
    await templates.reconcile("a")
    assert server.there is not None
    assert server.there["metadata"]["name"] == "sharepod"
    seen.put_claim(line_claim("l", "p"))
    seen.put_pod(line_pod("p", "l"))
    await templates.reconcile("a")
    assert server.calls == ["create"]


@pytest.mark.promise("operator-line-template")
async def test_a_deleted_template_is_created_again() -> None:
    templates, server, _ = made()
    await templates.reconcile("a")
    server.there = None
    await templates.reconcile("a")
    assert server.there is not None
    await templates.reconcile("a")
    assert server.calls == ["create", "create", "create", "get"], "the last one was there"


async def test_a_template_of_another_shape_is_replaced() -> None:
    templates, server, _ = made()
    server.there = {"metadata": {"name": "sharepod", "uid": "old"}, "spec": {"spec": {"devices": {"requests": []}}}}
    await templates.reconcile("a")
    assert server.calls == ["create", "get", "delete", "create"]
    assert server.there is not None
    assert server.there["metadata"]["uid"] != "old"


@pytest.mark.promise("operator-line-template")
@pytest.mark.parametrize("device_class", ["sharepod.dev", "network.example.org"])
async def test_a_template_of_another_shape_is_replaced_also_where_the_claim_from_it_was_made_at_once(
    device_class: str,
) -> None:
    templates, server, seen = made()
    wanted: list[str] = []
    seen.on_claim_lacking = wanted.append
    server.there = {"metadata": {"name": "sharepod", "uid": "old"}, "spec": {"spec": {"devices": {"requests": []}}}}
    foreign = line_claim("l", "p")
    foreign["spec"]["devices"]["requests"][0]["exactly"] |= {"deviceClassName": device_class, "count": 2}
    seen.put_pod(line_pod("p", "l"))
    seen.put_claim(foreign)
    assert wanted == ["a"]
    await templates.reconcile("a")
    assert server.calls == ["create", "get", "delete", "create"]
    ((name, note),) = server.notes
    assert (name, "delete the claim" in note) == ("p", True)
    wanted.clear()
    seen.drop_claim("l", deleted=True)
    assert wanted == ["a"]
    await templates.reconcile("a")
    assert server.calls[4:] == ["claim l"], "again, from the one without sizes"


@pytest.mark.parametrize(
    "refusal",
    [
        NotFoundError("POST templates", 404, "Refused", "deleted"),
        ForbiddenError("POST templates", 403, "Refused", "namespace ends"),
    ],
)
async def test_a_namespace_that_ends_gets_none(refusal: ApiError) -> None:
    templates, server, _ = made()
    server.refusal = refusal
    await templates.reconcile("a")
    assert server.calls == ["create"]


def looks_after(templates: LineTemplates, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the delays with which a namespace is scheduled again, in order."""
    pauses: list[float] = []
    monkeypatch.setattr(templates.queue, "add_after", lambda _namespace, seconds: pauses.append(seconds))
    return pauses


async def test_a_pod_forbidden_by_a_quota_is_reported_and_created_once_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    templates, server, seen = made()
    pauses = looks_after(templates, monkeypatch)
    server.refusal = ForbiddenError("POST", 403, "Forbidden", "exceeded quota: few")
    await templates.reconcile("a")
    assert server.notes == [("p", "template sharepod of its claim cannot be made: exceeded quota: few")]
    seen.put_pod(line_pod("p", "l"))
    await templates.reconcile("a")
    assert server.notes[1:] == [
        ("p", "claim l of its line was deleted and cannot be created again: exceeded quota: few")
    ]
    assert pauses == [1, 2]
    server.refusal = None
    await templates.reconcile("a")
    assert list(server.claims) == ["l"]
    assert pauses == [1, 2], "nothing is left to do"


async def test_a_namespace_whose_claims_another_keeps_from_being_made_is_looked_at_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    templates, server, seen = made()
    pauses = looks_after(templates, monkeypatch)
    for _ in range(8):
        await templates.reconcile("a")
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    templates.want("a")
    assert pauses.pop() == 1, "another Pod waits: the template may be deleted"
    seen.put_claim(line_claim("l", "p"))
    seen.put_pod(line_pod("p", "l"))
    server.calls.clear()
    await templates.reconcile("a")
    templates.want("a")
    assert (server.calls, len(templates.queue)) == ([], 0), "the next Pod's claim is given a moment"
    seen.put_pod(line_pod("q", None))
    await templates.reconcile("a")
    assert pauses[8:] == [1, 1]


async def test_an_api_server_that_is_away_is_asked_again() -> None:
    templates, server, _ = made()
    server.refusal = ApiError("POST templates", 503, "Refused", "away")
    with pytest.raises(ApiError):
        await templates.reconcile("a")


@pytest.mark.promise("operator-line-claim-again")
async def test_a_claim_that_is_deleted_while_its_pod_waits_is_made_again_under_its_name_and_for_it() -> None:
    templates, server, seen = made()
    lacking: list[str] = []
    seen.put_claim(line_claim("l", "p"))
    seen.put_pod(line_pod("p", "l"))
    (uid,) = [claim.uid for claim in seen.claims]
    seen.on_claim_lacking = lacking.append
    seen.drop_claim(uid, deleted=True)
    assert lacking == ["a"]
    assert [pod.uid for pod in seen.without_claim()] == ["p"]
    await templates.reconcile("a")
    claim = server.claims["l"]
    (owner,) = claim["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("Pod", "p", True)
    (known,) = seen.claims
    assert known.by_line
    assert known.request is not None
    assert known.request.gpu.request_milli == 400
    await templates.reconcile("a")
    assert server.calls == ["claim l"]


async def test_one_that_the_watch_has_not_shown_yet_is_left_as_it_is() -> None:
    templates, server, seen = made()
    server.claims["l"] = {}
    seen.put_pod(line_pod("p", "l"))
    await templates.reconcile("a")
    assert server.claims == {"l": {}}
    seen.put_pod(line_pod("p", "l", node="n"))
    server.calls.clear()
    await templates.reconcile("a")
    assert server.calls == [], "a Pod on a node has its claim, or is to end"


async def test_a_deleted_namespace_leaves_nothing_in_the_cache() -> None:
    templates, _, seen = made()
    labels = NamespaceLabels()
    labels.on_gone = templates.forget
    labels.put({"metadata": {"name": "a", "uid": "namespace-a"}})
    await templates.reconcile("a")
    seen.drop_pod("p")
    await templates.reconcile("a")
    labels.drop("namespace-a")
    templates.queue.clear()
    templates.want("a")
    assert len(templates.queue) == 1, "as if it had never been looked at"
