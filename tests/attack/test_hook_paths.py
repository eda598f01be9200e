"""Paths in containers that lead to the hook although they have another name: links of the kernel or of a runtime, and
`..`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster.admission import as_user, sharepod
from harness.api import Object
from harness.cluster import Cluster

HOOK = "etc/ld.so.preload"
LEADING = (
    f"/proc/self/root/{HOOK}",
    "/proc/self/root/run/sharepod",
    "/proc/self/root/run",
    "/proc/thread-self/root/etc",
    f"/proc/1/root/{HOOK}",
    "/proc/self/cwd/run",
    "/proc/self/task/1/root/run",
    "/proc",
    f"//./proc//self/root/{HOOK}",
    "proc/self/root/run",
    f"/x/../proc/self/root/{HOOK}",
    "/x/../run",
    "/data/..",
    f"/dev/fd/5/{HOOK}",
    "/dev/./fd/5/run",
    f"/dev/stdin/{HOOK}",
    "/dev/core",
    f"/{HOOK}",
)
"""Paths by every link in a container's root that does not come from its image: in /proc, and from /dev to /proc. No
link in /sys leads out of /sys."""
OTHER = ("/data", "/dev/shm", "/dev/termination-log", "/run", "/etc", "/process", "/dev/fdx", "/a..b", "/x/...")
FIELDS = ("volumeMounts", "volumeDevices", "terminationMessagePath")


def container(field: str, path: str) -> Object:
    """Return a container that has a volume mounted at a path. `field`: the kind of mount."""
    made: Object = {"name": "main", "image": "cuda", "command": ["x"]}
    if field == "volumeMounts":
        made[field] = [{"name": "v", "mountPath": path}]
    elif field == "volumeDevices":
        made[field] = [{"name": "v", "devicePath": path}]
    else:
        made[field] = path
    return made


def spec_of(field: str, path: str) -> Object:
    volume: Object = {"name": "v", "emptyDir": {}}
    if field == "volumeDevices":
        volume = {"name": "v", "persistentVolumeClaim": {"claimName": "c"}}
    return {"containers": [container(field, path)], "volumes": [volume]}


def with_claim(field: str, path: str) -> Object:
    """Return a plain Pod that has a mount at a path, and a claim of its namespace, of any class."""
    spec = spec_of(field, path)
    spec["resourceClaims"] = [{"name": "gpu", "resourceClaimName": "mine"}]
    spec["containers"][0]["resources"] = {"claims": [{"name": "gpu"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "namespace": "default"}, "spec": spec}


def a_sharepod(field: str, path: str) -> Object:
    return sharepod("a", {"request": 0.25, "memory": "1Gi"}, **spec_of(field, path))


DOORS = {"a SharePod": a_sharepod, "a Pod with a claim": with_claim}


def refused(server: Cluster, alice: Path, body: Object) -> str:
    """Apply an object as the admin of a namespace; return the refusal. Empty if the API server accepts it."""
    status, output = as_user(server, alice, "create", "--dry-run=server", "-f", "-", body=body)
    return output if status else ""


@pytest.mark.promise("security-hook-paths")
@pytest.mark.parametrize("door", DOORS)
def test_a_path_to_the_hook_in_any_image_is_refused_at_each_door(server: Cluster, alice: Path, door: str) -> None:
    for path in LEADING:
        for field in FIELDS:
            output = refused(server, alice, DOORS[door](field, path))
            if field == "volumeDevices" and ".." in path:
                assert output, "Kubernetes refuses it for a Pod by itself"
            else:
                assert "spec.containers[main]." + field in output, (field, path, output)
                assert "choose another path" in output


@pytest.mark.parametrize("door", DOORS)
def test_other_paths_are_taken_at_each_door(server: Cluster, alice: Path, door: str) -> None:
    for path in OTHER:
        assert refused(server, alice, DOORS[door]("volumeMounts", path)) == ""
        assert refused(server, alice, DOORS[door]("terminationMessagePath", path)) == ""


def test_a_pod_without_a_share_may_use_any_path(server: Cluster, alice: Path) -> None:
    body = with_claim("volumeMounts", LEADING[0])
    del body["spec"]["resourceClaims"]
    del body["spec"]["containers"][0]["resources"]
    assert refused(server, alice, body) == ""


def test_no_link_of_this_machines_devices_leads_out_of_them_by_another_name() -> None:
    """The links of this machine's /dev are checked, because a runtime makes the same links in a container's /dev."""
    leading = {
        str(link)
        for link in Path("/dev").rglob("*")
        if link.is_symlink() and not (link.parent / link.readlink()).is_relative_to("/dev")
    }
    assert leading <= {"/dev/fd", "/dev/stdin", "/dev/stdout", "/dev/stderr", "/dev/core"}
