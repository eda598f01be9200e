"""Leftovers of a cluster that several test files use: deleted without the objects that it had before."""

from __future__ import annotations

from typing import Any, cast

import pytest
from harness.api import Api, Object
from harness.errors import HarnessError
from harness.leftovers import Leftovers


def _kind(name: str, *verbs: str) -> Object:
    return {"name": name, "verbs": verbs or ("list", "delete")}


class Server:
    """API server with a set of objects. A deleted namespace ends with its objects, unless the server is `stuck`."""

    def __init__(self, *paths: str) -> None:
        self.paths = set(paths)
        self.stuck = False

    def get(self, path: str) -> Any:
        known = {
            "/apis": {"groups": [{"preferredVersion": {"groupVersion": "g/v1"}}]},
            "/api/v1": {
                "resources": [_kind("namespaces"), _kind("pods"), _kind("events"), _kind("bindings", "create")]
            },
            "/apis/g/v1": {"resources": [_kind("rules"), _kind("rules/status", "get")]},
        }
        return known.get(path) or {"items": [self._item(one) for one in sorted(self.paths) if self._is_of(one, path)]}

    @staticmethod
    def _is_of(path: str, collection: str) -> bool:
        version, _, kind = collection.rpartition("/")
        return path.startswith(version) and path.split("/")[-2] == kind

    @staticmethod
    def _item(path: str) -> Object:
        parts = path.split("/")
        spaces = {"namespace": parts[-3]} if parts[-4:-3] == ["namespaces"] else {}
        return {"metadata": {"name": parts[-1], **spaces}}

    def delete(self, path: str, *, grace: int) -> None:
        assert grace == 0
        if not self.stuck:
            self.paths = {one for one in self.paths if one != path and not one.startswith(f"{path}/")}


def test_only_later_objects_are_deleted_and_cluster_scoped_ones_last() -> None:
    before = {"/api/v1/namespaces/default", "/api/v1/namespaces/default/pods/kept", "/apis/g/v1/rules/kept"}
    server = Server(*before)
    leftovers = Leftovers(cast(Api, server))
    event, rule = "/api/v1/namespaces/default/events/seen", "/apis/g/v1/rules/later"
    server.paths |= {"/api/v1/namespaces/a", "/api/v1/namespaces/a/pods/p", "/api/v1/namespaces/default/pods/p"}
    server.paths |= {event, rule}
    leftovers.delete_contents()
    assert server.paths == before | {event, rule}
    leftovers.delete_rest()
    assert server.paths == before | {event}


def test_a_namespace_that_does_not_end_is_an_error() -> None:
    server = Server()
    leftovers = Leftovers(cast(Api, server))
    server.paths.add("/api/v1/namespaces/a")
    server.stuck = True
    with pytest.raises(HarnessError, match="namespaces/a"):
        leftovers.delete_contents(timeout=0.0)
