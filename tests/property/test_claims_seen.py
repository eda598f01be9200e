"""Claims and Pods as watches report them, in any order: the cache equals their content, and contains nothing of deleted
objects.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.controller.state.claims_seen import ClaimsSeen
from sharepod.controller.state.facts.claim_facts import MADE_FOR

Json = dict[str, Any]
_NAMES, _ENTRIES = st.sampled_from("xyz"), st.sampled_from(["sharepod", "one", "two"])
_CLAIMS, _PODS = st.sampled_from(["c0", "c1", "c2"]), st.sampled_from(["p0", "p1", "p2"])
_NAMESPACES = st.sampled_from("ab")

_CLAIM = st.fixed_dictionaries(
    {
        "uid": _CLAIMS,
        "name": _NAMES,
        "namespace": _NAMESPACES,
        "owner": st.none() | _PODS,
        "entry": _ENTRIES,
        "of_line": st.booleans(),
        "deleting": st.booleans(),
        "given": st.lists(_PODS, max_size=2, unique=True),
    }
)
_POD = st.fixed_dictionaries(
    {
        "uid": _PODS,
        "namespace": _NAMESPACES,
        "entries": st.dictionaries(_ENTRIES, st.none() | _NAMES, max_size=3),
        "made": st.dictionaries(_ENTRIES, _NAMES, max_size=2),
        "node": st.sampled_from([None, None, "node-a", "node-b"]),
        "line": st.booleans(),
    }
)
_STEPS = st.lists(_CLAIM | _POD | _CLAIMS | _PODS, max_size=14)
"""Steps: each is a created or changed claim or Pod, or the uid of a deleted object."""
_FIXED = ("name", "namespace", "of_line", "entries", "line")
"""Drawn fields that a step must not change while the object exists."""


def claim(item: Json, version: int) -> Json:
    metadata: Json = {"uid": item["uid"], "name": item["name"], "namespace": item["namespace"]}
    metadata |= {"resourceVersion": str(version), "annotations": {MADE_FOR: item["entry"]}}
    if item["owner"] is not None:
        metadata["ownerReferences"] = [{"kind": "Pod", "uid": item["owner"], "name": "any", "controller": True}]
    if item["deleting"]:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    exactly: Json = {"deviceClassName": "sharepod.dev", "allocationMode": "ExactCount", "count": 1}
    if not item["of_line"]:
        exactly["capacity"] = {"requests": {"timeMilli": "400"}}
    given_to = [{"resource": "pods", "name": uid, "uid": uid} for uid in item["given"]]
    return {
        "metadata": metadata,
        "spec": {"devices": {"requests": [{"name": "line" if item["of_line"] else "gpu", "exactly": exactly}]}},
        "status": {"reservedFor": given_to},
    }


def pod(item: Json, version: int) -> Json:
    entries = [
        {"name": entry, **({"resourceClaimTemplateName": "sharepod"} if name is None else {"resourceClaimName": name})}
        for entry, name in item["entries"].items()
    ]
    limits = {"sharepod.dev/gpu-milli": "100"} if item["line"] else {}
    return {
        "metadata": {
            "uid": item["uid"],
            "name": item["uid"],
            "namespace": item["namespace"],
            "resourceVersion": str(version),
        },
        "spec": {
            "nodeName": item["node"],
            "resourceClaims": entries,
            "containers": [{"name": "main", "resources": {"limits": limits}}],
        },
        "status": {
            "resourceClaimStatuses": [
                {"name": entry, "resourceClaimName": name} for entry, name in item["made"].items()
            ],
        },
    }


class Known:
    """The objects that exist by the events so far, and the cache `ClaimsSeen` that has recorded these events."""

    def __init__(self) -> None:
        self.seen = ClaimsSeen(lambda uid: None)
        self.there: dict[str, Json] = {}
        """For each uid: the drawn fields of each existing object."""
        self.lives: Counter[str] = Counter()
        self.version = 0

    def uid(self, of: str) -> str:
        """Return the uid of the object of this name that exists now. No uid is used twice."""
        return f"{of}-{self.lives[of]}"

    def show(self, step: Json | str) -> None:
        self.version += 1
        if isinstance(step, str):
            self._gone(self.uid(step))
            return
        item = {**step, "uid": self.uid(step["uid"])}
        before = self.there.get(item["uid"], {})
        item |= {field: before[field] for field in _FIXED if field in before}
        if "owner" in item:
            item |= {"owner": item["owner"] and self.uid(item["owner"]), "given": [*map(self.uid, item["given"])]}
            for uid, other in list(self.there.items()):
                same = (other.get("name"), other["namespace"]) == (item["name"], item["namespace"])
                if same and uid != item["uid"]:
                    self._gone(uid)
        elif before.get("node"):
            item["node"] = before["node"]
        self.there[item["uid"]] = item
        self._put(self.seen, item)

    def _put(self, seen: ClaimsSeen, item: Json) -> None:
        if "owner" in item:
            seen.put_claim(claim(item, self.version))
        else:
            seen.put_pod(pod(item, self.version))

    def _gone(self, uid: str) -> None:
        self.lives[uid.partition("-")[0]] += 1
        if self.there.pop(uid, {"owner": None}).keys() >= {"owner"}:
            self.seen.drop_claim(uid, deleted=True)
        else:
            self.seen.drop_pod(uid)

    def again(self) -> ClaimsSeen:
        """Return the cache of a new process, which lists the existing Pods first, then the claims."""
        seen = ClaimsSeen(lambda uid: None)
        for item in sorted(self.there.values(), key=lambda item: "owner" in item):
            self._put(seen, item)
        return seen

    def end(self) -> None:
        for uid in list(self.there):
            self._gone(uid)


def content(seen: ClaimsSeen, there: dict[str, Json]) -> dict[str, object]:
    """Return all values that the cache derives from the objects, to compare two caches. The size of a resource line's
    claim is left out while its Pod is unknown."""
    sized = [one for one in seen.claims if one.made_for is None or one.made_for in there]
    return {
        "sizes": {one.uid: (one.request, str(one.error)) for one in sized},
        "users": {one.uid: [user.uid for user in seen.users(one)] for one in seen.claims},
        "claims": {one.uid: {claim.uid for claim in seen.of_pod(one)} for one in seen.pods},
        "complete": {one.uid: seen.complete(one) for one in seen.pods},
        "lacking": set(seen.lacking()),
        "lines": {node: {one.uid for one in seen.bound_lines(node)} for node in ("node-a", "node-b")},
    }


@pytest.mark.promise("operator-line-bound", "operator-claim-no-over-commit")
@given(_STEPS)
def test_the_view_of_claims_and_pods_does_not_depend_on_the_order_of_events(steps: list[Json | str]) -> None:
    known = Known()
    for step in steps:
        known.show(step)
        assert content(known.seen, known.there) == content(known.again(), known.there)
    known.end()
    seen = known.seen
    left = (seen._users, seen._made, seen._sorted, seen.turns, seen._lacking)
    assert not any(left), "deleted objects are dropped"
    assert not any(seen._bound_lines.values())
