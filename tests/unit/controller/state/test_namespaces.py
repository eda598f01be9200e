"""Namespaces as their watch shows them: namespaces in deletion, and the labels of all."""

from __future__ import annotations

from typing import Any

from sharepod.controller.state.namespaces import EndingNamespaces, NamespaceLabels


def namespace(
    name: str, uid: str, version: int = 1, phase: str = "Terminating", labels: dict[str, str] | None = None
) -> dict[str, Any]:
    metadata = {"name": name, "uid": uid, "resourceVersion": str(version), "labels": labels or {}}
    return {"metadata": metadata, "status": {"phase": phase}}


def test_a_namespace_ends_from_its_first_event_until_it_is_gone_and_each_change_is_told_once() -> None:
    ending = EndingNamespaces()
    changed: list[str] = []
    ending.on_changed = changed.append
    ending.put(namespace("a", "u-1"))
    ending.put(namespace("a", "u-1", 2))
    assert ("a" in ending, "b" in ending, changed) == (True, False, ["a"])
    ending.put(namespace("b", "u-2", 3, "Active"))
    assert "b" not in ending
    ending.drop("u-1")
    ending.drop("u-1")
    assert ("a" in ending, changed) == (False, ["a", "a"])


def test_a_namespace_of_the_same_name_that_came_later_is_another_one() -> None:
    ending = EndingNamespaces()
    ending.put(namespace("a", "u-1", 5))
    ending.put(namespace("a", "u-2", 9))
    ending.drop("u-1")
    assert "a" in ending


def test_a_namespace_whose_deletion_is_undone_by_a_restored_etcd_ends_no_longer() -> None:
    ending = EndingNamespaces()
    changed: list[str] = []
    ending.on_changed = changed.append
    ending.put(namespace("a", "u-1", 5))
    ending.put(namespace("a", "u-1", 3, "Active"))
    assert "a" in ending  # an older version has no effect
    ending.invalidate()
    ending.put(namespace("a", "u-1", 3, "Active"))
    assert ("a" in ending, changed) == (False, ["a", "a"])


def test_labels_are_those_of_the_newest_version_and_each_change_is_told_once() -> None:
    known = NamespaceLabels()
    changed: list[int] = []
    known.on_changed = lambda: changed.append(1)
    known.put(namespace("a", "u-1", 5, "Active", {"team": "x"}))
    known.put(namespace("a", "u-1", 6, "Active", {"team": "x"}))
    known.put(namespace("a", "u-1", 3, "Active", {"team": "old"}))
    assert (known.by_name(), known.versions(), len(changed)) == ({"a": {"team": "x"}}, {"u-1": 6}, 1)
    known.invalidate()
    known.put(namespace("a", "u-1", 3, "Active", {"team": "restored"}))
    assert (known.by_name(), len(changed)) == ({"a": {"team": "restored"}}, 2)
    known.drop("u-1")
    known.drop("u-1")
    assert (known.by_name(), known.versions(), len(changed)) == ({}, {}, 3)


class Compared(str):
    """Name that counts how often it is compared."""

    __slots__ = ("times",)
    __hash__ = str.__hash__

    def __init__(self, _text: str) -> None:
        self.times = 0

    def __eq__(self, other: object) -> bool:
        self.times += 1
        return str.__eq__(self, other)


def test_to_look_for_a_namespace_costs_the_same_however_many_are_stuck_in_their_deletion() -> None:
    ending = EndingNamespaces()
    for number in range(1000):
        ending.put(namespace(f"stuck-{number}", f"u-{number}"))
    name = Compared("another")
    assert name not in ending
    assert name.times < 10
