"""Namespaces that are being deleted, as their watch brings them."""

from __future__ import annotations

from typing import Any

from sharepod.controller.state.namespaces import EndingNamespaces


def namespace(name: str, uid: str, version: int = 1) -> dict[str, Any]:
    return {"metadata": {"name": name, "uid": uid, "resourceVersion": str(version)}}


def test_a_namespace_ends_from_its_first_event_until_it_is_gone_and_each_change_is_told_once() -> None:
    ending = EndingNamespaces()
    told: list[str] = []
    ending.on_changed = told.append
    ending.put(namespace("a", "u-1"))
    ending.put(namespace("a", "u-1", 2))
    assert ("a" in ending, "b" in ending, told) == (True, False, ["a"])
    assert ending.versions() == {"u-1": 2}
    ending.drop("u-1")
    ending.drop("u-1")
    assert ("a" in ending, told) == (False, ["a", "a"])


def test_a_namespace_of_the_same_name_that_came_later_is_another_one() -> None:
    ending = EndingNamespaces()
    ending.put(namespace("a", "u-1", 5))
    ending.put(namespace("a", "u-2", 9))
    ending.drop("u-1")
    assert "a" in ending


def test_an_older_version_changes_nothing_unless_the_versions_have_gone_back() -> None:
    ending = EndingNamespaces()
    ending.put(namespace("a", "u-1", 5))
    ending.put(namespace("a", "u-1", 3))
    assert ending.versions() == {"u-1": 5}
    ending.distrust()
    ending.put(namespace("a", "u-1", 3))
    assert ending.versions() == {"u-1": 3}
