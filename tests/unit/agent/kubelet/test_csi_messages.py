"""The checked-in messages equal the .proto files, and have the field numbers of the standards."""

from __future__ import annotations

from pathlib import Path

import pytest
from sharepod.agent.kubelet.wire import csi_pb2 as csi
from sharepod.agent.kubelet.wire import podresources_pb2 as podresources
from sharepod.agent.kubelet.wire import registration_pb2 as registration
from sharepod.agent.kubelet.wire.generate import HERE, generate


def test_the_checked_in_messages_are_not_stale(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools generates the messages")
    for fresh in generate(tmp_path):
        assert (HERE / fresh.name).read_text() == fresh.read_text(), (
            "run: python -m sharepod.agent.kubelet.wire.generate"
        )


def test_a_publish_request_is_read_as_the_standard_writes_it() -> None:
    # field numbers of CSI 1.x: volume_id 1, staging_target_path 3, target_path 4, volume_capability 5, readonly 6,
    # volume_context 8
    request = csi.NodePublishVolumeRequest.FromString(
        b"\x0a\x01v" + b"\x1a\x01s" + b"\x22\x02/t" + b"\x2a\x00" + b"\x30\x01" + b"\x42\x06\x0a\x01k\x12\x01x"
    )
    assert (request.volume_id, request.target_path, request.readonly, dict(request.volume_context)) == (
        "v",
        "/t",
        True,
        {"k": "x"},
    )


def test_the_services_have_the_names_that_the_kubelet_calls() -> None:
    methods = {
        f"/{service.full_name}/{method.name}"
        for descriptor in (csi.DESCRIPTOR, registration.DESCRIPTOR, podresources.DESCRIPTOR)
        for service in descriptor.services_by_name.values()
        for method in service.methods
    }
    assert methods == {
        "/csi.v1.Identity/GetPluginInfo",
        "/csi.v1.Identity/GetPluginCapabilities",
        "/csi.v1.Identity/Probe",
        "/csi.v1.Node/NodePublishVolume",
        "/csi.v1.Node/NodeUnpublishVolume",
        "/csi.v1.Node/NodeGetCapabilities",
        "/csi.v1.Node/NodeGetInfo",
        "/pluginregistration.Registration/GetInfo",
        "/pluginregistration.Registration/NotifyRegistrationStatus",
        "/v1.PodResourcesLister/List",
        "/v1.PodResourcesLister/GetAllocatableResources",
    }
