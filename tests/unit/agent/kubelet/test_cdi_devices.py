"""CDI devices of GPUs: found as a container runtime resolves them. Broken files of other vendors have no effect."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sharepod.agent.kubelet.dra import cdi_watch
from sharepod.agent.kubelet.dra.cdi_watch import CdiWatch
from sharepod.agent.kubelet.dra.generation import CdiGenerator
from sharepod.agent.kubelet.dra.gpu_devices import GpuDevices
from sharepod.api.gpunode import Gpu

GPUS = tuple(
    Gpu(uuid=f"GPU-1111111{n}-1111-1111-1111-111111111111", index=n, model="A100", memory=40 << 30) for n in range(2)
)
# Specification as nvidia-ctk writes it, with names by index and by UUID; shortened.
GENERATED = f"""
cdiVersion: 0.5.0
kind: nvidia.com/gpu
containerEdits:
  env: [NVIDIA_VISIBLE_DEVICES=void]
devices:
  - name: "0"
    containerEdits: {{deviceNodes: [{{path: /dev/nvidia0}}]}}
  - name: {GPUS[0].uuid}
    containerEdits: {{deviceNodes: [{{path: /dev/nvidia0}}]}}
  - name: "1"
    containerEdits: {{deviceNodes: [{{path: /dev/nvidia1}}]}}
  - name: all
    containerEdits: {{deviceNodes: [{{path: /dev/nvidia0}}, {{path: /dev/nvidia1}}]}}
"""


def specification(*names: Any, kind: Any = "nvidia.com/gpu") -> str:
    return json.dumps({"cdiVersion": "0.6.0", "kind": kind, "devices": [{"name": name} for name in names]})


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("etc", "run"):
        (tmp_path / name).mkdir()
    return tmp_path / "etc", tmp_path / "run"


def find(folders: tuple[Path, Path]) -> Mapping[str, str]:
    return GpuDevices(folders).find(GPUS)


def test_a_gpu_is_found_by_uuid_else_by_index(folders: tuple[Path, Path]) -> None:
    assert find((folders[0] / "absent", folders[1])) == {}
    (folders[0] / "nvidia.yaml").write_text(GENERATED)
    assert find(folders) == {GPUS[0].uuid: f"nvidia.com/gpu={GPUS[0].uuid}", GPUS[1].uuid: "nvidia.com/gpu=1"}


@pytest.mark.promise("node-cdi-toolkit")
def test_what_nvidia_ctk_writes_is_found_by_uuid(folders: tuple[Path, Path]) -> None:
    """nvidia-ctk 1.20.1 wrote this file for two GPUs of NVML's double, with a folder as the driver's root."""
    shutil.copy(Path(__file__).with_name("nvidia-ctk-1.20.1.yaml"), folders[0] / "nvidia.yaml")
    uuids = [f"GPU-5a9e000{n}-0000-4000-8000-00000000000{n}" for n in (1, 2)]
    gpus = tuple(Gpu(uuid=uuid, index=n, model="Simulated", memory=16 << 30) for n, uuid in enumerate(uuids))
    assert GpuDevices(folders).find(gpus) == {uuid: f"nvidia.com/gpu={uuid}" for uuid in uuids}


def test_names_with_a_type_and_kinds_of_nvidias_other_programs_are_known(folders: tuple[Path, Path]) -> None:
    (folders[1] / "plugin.json").write_text(specification(GPUS[1].uuid, kind="k8s.device-plugin.nvidia.com/gpu"))
    (folders[1] / "typed.json").write_text(specification("gpu0"))
    (folders[1] / "others.json").write_text(specification("0", "1", kind="nvidia.com/mig"))
    (folders[1] / "feigned.json").write_text(specification("0", "1", kind="evilnvidia.com/gpu"))
    assert find(folders) == {
        GPUS[0].uuid: "nvidia.com/gpu=gpu0",
        GPUS[1].uuid: f"k8s.device-plugin.nvidia.com/gpu={GPUS[1].uuid}",
    }


def test_a_device_that_a_runtime_cannot_resolve_is_none(folders: tuple[Path, Path]) -> None:
    for name in ("a.json", "b.json"):
        (folders[0] / name).write_text(specification("0", "1"))
    assert find(folders) == {}
    (folders[1] / "later.json").write_text(specification("0"))
    assert find(folders) == {GPUS[0].uuid: "nvidia.com/gpu=0"}
    (folders[1] / "again.json").write_text(specification("0"))
    assert find(folders) == {}


@pytest.mark.promise("node-cdi-broken")
def test_a_broken_cdi_file_affects_only_itself(folders: tuple[Path, Path]) -> None:
    (folders[0] / "nvidia.yaml").write_text(GENERATED)
    found = find(folders)
    (folders[0] / "a.json").write_text("[" * 100_000)
    (folders[0] / "b.yaml").write_text("a: &a [*a]\n? {}")
    (folders[0] / "c.yaml").write_bytes(b"\xff\xfe\x00")
    (folders[0] / "d.json").write_text(specification("0", 7))
    (folders[0] / "e.json").write_text(specification("0", kind=["nvidia.com/gpu"]))
    (folders[0] / "f.json").write_text('{"kind": "nvidia.com/gpu", "devices": {"name": "0"}}')
    (folders[0] / "g.json").write_text('{"kind": "nvidia.com/gpu", "devices": [7]}')
    (folders[0] / "h.yaml").write_text("- 1")
    (folders[0] / "i.json").symlink_to("/nowhere")
    (folders[0] / "j.yaml").mkdir()
    os.mkfifo(folders[0] / "k.yaml")
    with (folders[0] / "l.json").open("w") as huge:
        huge.truncate(1 << 30)
    (folders[0] / "m.txt").write_text(specification("0"))
    (folders[0] / "n.yaml").write_text("kind: 2024-13-45\ndevices: !!python/object:os.system x")
    (folders[0] / "o.yaml").write_text("{[a]: b, ? [c] : d}")
    (folders[0] / "p.yaml").write_text("[" * 100_000)
    assert find(folders) == found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.just("nvidia.com/gpu"),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.sampled_from(["kind", "devices", "name", "x"]), inner, max_size=4)
        ),
        max_leaves=12,
    )
)
def test_no_document_breaks_the_search(folders: tuple[Path, Path], document: Any) -> None:
    (folders[0] / "any.json").write_text(json.dumps(document))
    (folders[1] / "nvidia.json").write_text(specification("0"))
    assert find(folders)[GPUS[0].uuid] == "nvidia.com/gpu=0"


def test_a_changed_file_is_read_again_and_a_deleted_one_is_dropped(folders: tuple[Path, Path]) -> None:
    devices = GpuDevices(folders)
    file = folders[0] / "nvidia.json"
    file.write_text(specification("0"))
    assert devices.find(GPUS) == {GPUS[0].uuid: "nvidia.com/gpu=0"}
    fresh = folders[0] / "fresh"
    fresh.write_text(specification("1"))
    fresh.rename(file)
    assert devices.find(GPUS) == {GPUS[1].uuid: "nvidia.com/gpu=1"}
    file.unlink()
    assert devices.find(GPUS) == {}


def program(folder: Path, script: str) -> Path:
    """Write an executable script in place of nvidia-ctk."""
    path = folder / "nvidia-ctk"
    path.write_text("#!/bin/sh\n" + textwrap.dedent(script))
    path.chmod(0o755)
    return path


@pytest.mark.promise("node-cdi-missing")
async def test_the_nodes_own_program_writes_missing_devices(folders: tuple[Path, Path], tmp_path: Path) -> None:
    script = f"""\
        [ "$1 $2" = "cdi generate" ] || exit 9
        echo '{specification("0", "1")}' >"${{3#--output=}}"
    """
    installed = program(tmp_path, script)
    assert (
        await CdiGenerator(folders[1], programs=[tmp_path / "absent", installed], node=Path("/proc/self")).generate()
        is None
    )
    assert (folders[1] / "nvidia.yaml").exists()
    assert len(find(folders)) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace needs root")
async def test_the_program_runs_in_the_nodes_mount_namespace(folders: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    (tmp_path / "agent").mkdir()
    program(tmp_path / "node", 'echo "cannot find a driver" >&2; exit 1')
    mounted = f"mount --bind {tmp_path}/node {tmp_path}/agent && echo ready && exec sleep 600"
    node = await asyncio.create_subprocess_exec(
        "unshare", "--mount", "sh", "-c", mounted, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert node.stdout is not None
        assert await node.stdout.readline() == b"ready\n"
        seen_there = tmp_path / "agent/nvidia-ctk"
        assert not seen_there.exists()
        made = CdiGenerator(folders[1], programs=[seen_there], node=Path(f"/proc/{node.pid}"))
        assert await made.generate() == f"{seen_there} cdi generate failed: cannot find a driver"
    finally:
        node.kill()
        await node.wait()


async def test_a_program_that_is_absent_or_hangs_is_reported(folders: tuple[Path, Path], tmp_path: Path) -> None:
    here = Path("/proc/self")
    absent = CdiGenerator(folders[1], programs=[tmp_path / "absent"], node=here)
    assert await absent.generate() == "nvidia-ctk is not installed"
    hangs = program(tmp_path, "sleep 600 & sleep 600")
    assert "no end after 0 s" in str(
        await CdiGenerator(folders[1], programs=[hangs], node=here, timeout_s=0.1).generate()
    )
    hangs.write_text("no program")
    assert "Exec format error" in str(await CdiGenerator(folders[1], programs=[hangs], node=here).generate())


async def test_devices_are_generated_only_after_a_while_and_not_again_at_once(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    class Generator(CdiGenerator):
        async def generate(self) -> str | None:
            calls.append("asked")
            return "no driver"

    monkeypatch.setattr(cdi_watch, "INTERVAL_S", 0.0)
    monkeypatch.setattr(cdi_watch, "GENERATE_AFTER_S", 0.0)
    changes: list[None] = []
    watch = CdiWatch(GpuDevices(folders), lambda: GPUS, Generator(folders[1]), changed=lambda: changes.append(None))
    await watch.look()
    assert watch.problem is not None
    running = asyncio.create_task(watch.run())
    while not calls:  # noqa: ASYNC110 - no event to await
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    assert calls == ["asked"]
    assert "(no driver)" in (watch.problem or "")
    (folders[1] / "nvidia.json").write_text(specification("0", "1"))
    while watch.problem is not None:  # noqa: ASYNC110 - no event to await
        await asyncio.sleep(0.001)
    running.cancel()
    assert watch.devices([GPUS[1].uuid, "GPU-unknown"]) == {GPUS[1].uuid: "nvidia.com/gpu=1"}
    assert len(changes) >= 2
