"""Forged labels: Pods of a team with the labels and parts of SharePod's own Pods. They would get a share without the
hook.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster.admission import PODS, as_user
from harness.api import Object
from harness.cluster import Cluster
from sharepod.api.pods.line_volume import with_volume

HOOK, SOCKET = "/etc/ld.so.preload", "/run/sharepod"
MODE = "sharepod.dev/gpu-mode"
LINE = {"sharepod.dev/gpu-milli": "1000"}
Forge = Callable[[Object], object]


def line_pod(name: str = "line", *, annotations: dict[str, str] | None = None) -> Object:
    """Return a Pod with a resource line, in the form that the webhook of `manifests/plain-volume` gives it. The test
    does not call a webhook."""
    pod: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "annotations": annotations or {}},
        "spec": {"containers": [{"name": "main", "image": "cuda", "resources": {"limits": LINE}}]},
    }
    made = with_volume(copy.deepcopy(pod), "")
    pod["metadata"]["annotations"].update(made["metadata"].pop("annotations"))
    pod["metadata"].update(made["metadata"])
    pod["spec"].update(made["spec"])
    return pod


def mount(path: str, **changed: Any) -> Forge:
    """Return a function that changes the mount at a path."""

    def change(pod: Object) -> None:
        (one,) = [each for each in pod["spec"]["containers"][0]["volumeMounts"] if each["mountPath"] == path]
        one.update(changed)

    return change


def without(path: str) -> Forge:
    """Return a function that removes the mount at a path."""

    def change(pod: Object) -> None:
        container = pod["spec"]["containers"][0]
        container["volumeMounts"] = [each for each in container["volumeMounts"] if each["mountPath"] != path]

    return change


def add_mount(**added: Any) -> Forge:
    """Return a function that adds a volume to a Pod and mounts it. `added`: fields of the mount."""

    def change(pod: Object) -> None:
        pod["spec"]["containers"][0]["volumeMounts"].append(added)
        pod["spec"]["volumes"].append({"name": "mine", "emptyDir": {}})

    return change


HOOK_PATHS = "leads to where SharePod mounts its hook"
"""Part of the message of the policy sharepod-hook-paths. It may replace another expected message, because the API
server shows only one of several policies that refuse a Pod."""
FORGED: dict[str, tuple[Forge, str]] = {
    "no hook": (without(HOOK), f"volumeMounts[{HOOK}]"),
    "another file for the hook": (mount(HOOK, subPath="limits"), "remove your own mounts"),
    "the directory for the hook": (mount(HOOK, subPath=""), "remove your own mounts"),
    "the hook elsewhere": (mount(HOOK, mountPath="/etc/preload"), f"volumeMounts[{HOOK}]"),
    "the hook of a volume of its own": (mount(HOOK, name="empty"), f"volumeMounts[{HOOK}]"),
    "a part of the directory": (mount(SOCKET, subPath="more"), "remove your own mounts"),
    "a part by a variable": (mount(SOCKET, subPathExpr="$(A)"), "remove your own mounts"),
    "a file over the hook's library": (
        add_mount(name="mine", mountPath=f"{SOCKET}/libsharepod.so"),
        "remove your own mounts",
    ),
    **{
        f"a file at {path}": (add_mount(name="mine", mountPath=path), "remove your own mounts")
        for path in (
            "/etc//ld.so.preload",
            "/etc/./ld.so.preload",
            "/etc/ld.so.preload/",
            "etc/ld.so.preload",
            "/etc/x/../ld.so.preload",
            "//run/sharepod",
        )
    },
    "the volume over itself": (
        add_mount(name="sharepod-gpu", mountPath=f"{SOCKET}/libsharepod.so", subPath="limits", readOnly=True),
        "remove your own mounts",
    ),
}


def tried(server: Cluster, user: Path, body: Object) -> tuple[int, str]:
    return as_user(server, user, "create", "--dry-run=server", "-f", "-", body=body)


@pytest.mark.promise("operator-line-volume-forged", "security-share")
@pytest.mark.parametrize("forged", FORGED)
def test_a_pod_gets_no_share_by_its_label_without_the_hook(forged: str, server: Cluster, alice: Path) -> None:
    body = line_pod()
    body["spec"]["volumes"].append({"name": "empty", "emptyDir": {}})
    assert tried(server, alice, body)[0] == 0, "as the webhook makes it"
    change, words = FORGED[forged]
    change(body)
    code, output = tried(server, alice, body)
    assert (code != 0, words in output or HOOK_PATHS in output) == (True, True), output


@pytest.mark.promise("operator-line-volume-forged", "security-share")
def test_a_sharepod_with_whole_gpus_has_no_hook_and_cannot_become_shared(server: Cluster, alice: Path) -> None:
    code, output = as_user(server, alice, "create", "-f", "-", body=line_pod("whole", annotations={MODE: "Exclusive"}))
    assert code == 0, output
    for change in (f"{MODE}-", f"{MODE}=Shared"):
        code, output = as_user(server, alice, "annotate", "--overwrite", "pod", "whole", change)
        assert (code != 0, "cannot be changed" in output) == (True, True), output
    code, output = as_user(server, alice, "annotate", "pod", "whole", "mine=x")
    assert code == 0, output


@pytest.mark.promise("security-placeholders", "security-identity")
@pytest.mark.parametrize("value", ["", "x"])
def test_no_pod_gets_a_label_of_sharepod_from_a_user_with_or_without_a_value(
    value: str, server: Cluster, alice: Path
) -> None:
    """A Pod with a line and the label of a placeholder would get no claim, and use up the line's resources of its
    node."""
    plain: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"labelled-{value or 'empty'}", "namespace": "default"},
        "spec": {"containers": [{"name": "main", "image": "x", "resources": {"limits": LINE}}]},
    }
    server.api.create(PODS, plain)
    name = plain["metadata"]["name"]
    for label in ("placeholder", "tenant", "holder"):
        labels = {f"sharepod.dev/{label}": value}
        code, output = tried(
            server, alice, {**plain, "metadata": {"name": "a", "namespace": "default", "labels": labels}}
        )
        assert (code != 0, f"metadata.labels[sharepod.dev/{label}]" in output) == (True, True), output
        code, output = as_user(server, alice, "label", "pod", name, f"sharepod.dev/{label}={value}")
        assert (code != 0, f"metadata.labels[sharepod.dev/{label}]" in output) == (True, True), output
