"""GPUs that NVIDIA's device plugin assigns on a node of SharePod: no GPU is assigned twice."""

from __future__ import annotations

import pytest
from cluster.operator_world import GPUNODES, World, condition_of, wait


def advertise(world: World, node: str, count: str | None) -> None:
    """Set the Node's number of GPUs from a device plugin; None: the node has no device plugin."""
    resources = {"nvidia.com/gpu": count}
    world.api.patch(f"/api/v1/nodes/{node}/status", {"status": {"capacity": resources, "allocatable": resources}})


@pytest.mark.promise("install-device-plugin")
def test_a_node_with_a_device_plugin_gets_no_sharepod_until_the_plugin_is_removed(world: World) -> None:
    (node,) = world.nodes("plugin")
    namespace = world.cluster.namespace("plugin")
    world.apply(namespace, "first", {"request": 0.2}, on="plugin")
    world.phase(namespace, "first", "Running")
    advertise(world, node, "2")

    def present(status: str) -> None:
        world.cluster.wait_for(
            f"{GPUNODES}/{node}",
            lambda seen: condition_of(seen or {}, "DevicePluginPresent").get("status") == status,
            what=f"DevicePluginPresent {status}",
        )

    present("True")
    seen = world.api.get(f"{GPUNODES}/{node}")
    message = condition_of(seen, "DevicePluginPresent")["message"]
    assert f"kubectl label node {node} nvidia.com/gpu.deploy.device-plugin=false" in message
    world.event("default", node, "DevicePluginPresent")
    world.apply(namespace, "second", {"request": 0.2}, on="plugin")

    def waits() -> bool:
        message = condition_of(world.sharepod(namespace, "second"), "Placed").get("message", "")
        return "advertises nvidia.com/gpu" in message

    wait(waits, what="the reason that it waits")
    assert [row["podName"] for row in world.rows(node)] == ["first"], "the running tenant stays"
    advertise(world, node, None)
    present("False")
    world.phase(namespace, "second", "Running")
    wait(lambda: len(world.rows(node)) == 2, what="both rows")
