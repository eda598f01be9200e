"""Shares by each door: SharePods, plain Pods with a claim from a template, and plain Pods with a resource line.

Guarantees:
- Objects of all doors have one form for the test: name, uid of the ledger's row, phase, uid of the Pod.
- Plain Pods of these doors carry `DOOR_LABEL`, which distinguishes them from Pods without a share.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from enum import Enum

from cluster.claims_world import claim_path, make_template, pod_body
from cluster.operator_world import World
from cluster.plain_world import container, line_pod
from harness.api import Object

DOOR_LABEL = "test.sharepod.dev/door"


class Door(Enum):
    """Way to request a share."""

    SHAREPOD = "SharePod"
    CLAIM = "claim"
    LINE = "line"


def thirds(names: Iterable[str], seed: int) -> dict[str, Door]:
    """Return the door of each name, by name. Each door has a third of the names, in an order drawn from the seed."""
    chance, found = random.Random(f"doors {seed}"), dict[str, Door]()
    for number, name in enumerate(names):
        if number % 3 == 0:
            turn = chance.sample(list(Door), 3)
        found[name] = turn[number % 3]
    return found


def open_doors(world: World, namespace: str, requests: Iterable[int]) -> None:
    """Create a claim template in a namespace for each requested part of a GPU's time, in thousandths."""
    for milli in sorted(set(requests)):
        make_template(world, namespace, f"t{milli}", time_milli=milli, memory=None)


def ask(world: World, namespace: str, name: str, milli: int, door: Door, *, on: str) -> Object:
    """Request a share of one GPU on nodes labelled `test=ON`."""
    if door is Door.SHAREPOD:
        return world.apply(namespace, name, {"request": milli / 1000}, on=on)
    if door is Door.CLAIM:
        body = pod_body(name, template=f"t{milli}", nodeSelector={"test": on})
    else:
        body = line_pod(container(milli=str(milli), mib=None), name=name, nodeSelector={"test": on})
    body["metadata"]["labels"] = {DOOR_LABEL: door.value}
    return world.api.create(f"/api/v1/namespaces/{namespace}/pods", body)


def end(world: World, namespace: str, name: str, door: Door) -> None:
    """Delete the object that requested a share."""
    if door is Door.SHAREPOD:
        world.delete(namespace, name)
    else:
        world.api.delete(f"/api/v1/namespaces/{namespace}/pods/{name}")


def asked_for(world: World, namespace: str) -> list[Object]:
    """Return the stored SharePods, and the plain Pods of the doors in the form of SharePods."""
    sharepods: list[Object] = world.api.get(world.path(namespace))["items"]
    pods = world.cluster.pods(namespace, selector=DOOR_LABEL)
    if not pods:
        return sharepods
    uids = {
        claim["metadata"]["name"]: claim["metadata"]["uid"] for claim in world.api.get(claim_path(namespace))["items"]
    }
    return sharepods + [_as_sharepod(pod, uids) for pod in pods]


def _as_sharepod(pod: Object, uids: dict[str, str]) -> Object:
    """Return a plain Pod in the form of a SharePod. `uids`: uids of the namespace's claims, by name.

    The Pod's claim is the claim in its status. After a lost answer kube-controller-manager creates a second claim; the
    first one stays unused until the Pod is deleted.
    """
    metadata, status = pod["metadata"], pod.get("status") or {}
    named = [uids.get(one.get("resourceClaimName", "")) for one in status.get("resourceClaimStatuses") or ()]
    uid = next((found for found in named if found), f"no claim of {metadata['name']}")
    return {
        "metadata": {**metadata, "uid": uid},
        "status": {
            "phase": status.get("phase"),
            "podUID": metadata["uid"],
            "conditions": [{"reason": "", **one} for one in status.get("conditions") or ()],
        },
    }
