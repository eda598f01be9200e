"""Self-test of a node: which processes count, and the verdicts on them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from sharepod.agent.kubelet import mounts, self_test
from sharepod.agent.kubelet.self_test import SelfTest, SelfTestVerdict

OF_A_TENANT = "/tenants/a"
OF_THE_TEST = "/self-test"
HOOK = "7f00-7f01 r-xp 00000000 08:01 42 /run/sharepod/libsharepod.so\n"


class Node:
    """Folder in place of /proc, and the self-test that reads it."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        self.state = root / "state"
        self.state.mkdir(parents=True)
        self.proc.mkdir()
        (self.proc / "version").write_text("no process")
        self.changes = 0
        self.test = self.restart()

    def restart(self, *, accept_injection: bool = False) -> SelfTest:
        self.test = SelfTest(self.state, accept_injection=accept_injection, changed=self._count, proc=self.proc)
        return self.test

    def _count(self) -> None:
        self.changes += 1

    def run(
        self,
        pid: int,
        *,
        directory: str = OF_THE_TEST,
        at: str = "/run/sharepod",
        name: str = "sleep",
        maps: str = HOOK,
        also_mounted: str = "",
        devices: tuple[str, ...] = ("null",),
    ) -> None:
        on = mounts.mount_of(self.state)
        assert on is not None
        root = Path(on.root) / self.state.resolve().relative_to(on.point)
        folder = self.proc / str(pid)
        (folder / "root" / "dev").mkdir(parents=True)
        for device in devices:
            (folder / "root" / "dev" / device).touch()
        (folder / "comm").write_text(f"{name}\n")
        (folder / "maps").write_text(maps)
        lines = [f"1 0 {on.device} {root}{directory} {at} ro - ext4 /dev/sda ro"]
        if also_mounted:
            lines.append(f"2 0 0:5 / {also_mounted} ro - devtmpfs none ro")
        (folder / "mountinfo").write_text("\n".join(lines) + "\n")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_process_of_the_self_test_shows_that_the_hook_loads(node: Node) -> None:
    node.run(7)
    assert node.test.look() == SelfTestVerdict(hook_loads=True, injected=False)


@pytest.mark.promise("node-hook-loads")
def test_a_process_without_the_hook_shows_that_it_does_not_load(node: Node) -> None:
    node.run(7)
    node.run(8, maps="7f00-7f01 r-xp 00000000 08:01 42 /usr/lib/libc.so.6\n")
    assert node.test.look() == SelfTestVerdict(hook_loads=False, injected=False)


@pytest.mark.promise("node-env-injection")
@pytest.mark.parametrize(
    "mounted",
    ["/dev/nvidia0", "/usr/bin/nvidia-smi", "/usr/lib/x86_64-linux-gnu/libcuda.so.1", "/proc/driver/nvidia/gpus/0"],
)
def test_what_nvidias_runtime_mounts_shows(node: Node, mounted: str) -> None:
    node.run(7, also_mounted=mounted)
    assert node.test.look() == SelfTestVerdict(hook_loads=True, injected=True)


@pytest.mark.promise("node-env-injection")
def test_a_device_that_was_made_in_the_container_shows(node: Node) -> None:
    node.run(7, devices=("null", "nvidiactl"))
    assert node.test.look() == SelfTestVerdict(hook_loads=True, injected=True)


@pytest.mark.parametrize(
    "other", [{"directory": OF_A_TENANT}, {"at": "/mnt"}, {"name": "python"}, {"directory": "/self-test-of-others"}]
)
def test_another_process_has_no_part_in_it(node: Node, other: dict[str, str]) -> None:
    node.run(7, maps="", **other)  # type: ignore[arg-type]
    assert node.test.look() is None


def test_a_process_that_ends_while_it_is_looked_at_has_no_part_in_it(node: Node) -> None:
    node.run(7)
    (node.proc / "7" / "comm").unlink()
    (node.proc / "9").mkdir()
    (node.proc / "9" / "comm").write_text("sleep\n")
    assert node.test.look() is None


def test_a_verdict_becomes_two_conditions_and_outlives_its_process_for_a_while(node: Node) -> None:
    test = node.test
    assert (test.hook_loads[0].status, test.env_injection[0].status) == ("Unknown", "Unknown")
    assert "kubectl -n sharepod-system get pods" in test.hook_loads[1]
    test.take(SelfTestVerdict(hook_loads=False, injected=True), 100.0)
    assert (test.hook_loads[0].status, test.env_injection[0].status) == ("False", "True")
    assert "manifests/selinux" in test.hook_loads[1]
    assert "env_injection: Accept" in test.env_injection[1]
    test.take(SelfTestVerdict(hook_loads=False, injected=True), 200.0)
    test.take(None, 450.0)
    assert (node.changes, test.hook_loads[0].status) == (1, "False"), "an upgrade of its Pod opens no node"
    test.take(SelfTestVerdict(hook_loads=True, injected=False), 460.0)
    assert (test.hook_loads[0].status, test.env_injection[0].status) == ("True", "False")
    test.take(None, 800.0)
    assert (node.changes, test.hook_loads[0].status) == (3, "Unknown")


def test_an_administrator_accepts_what_the_default_runtime_gives(node: Node) -> None:
    test = node.restart(accept_injection=True)
    test.take(SelfTestVerdict(hook_loads=True, injected=True), 100.0)
    assert (test.env_injection[0].status, test.env_injection[0].value) == ("True", "Accepted")


async def test_it_looks_again_until_there_is_a_process(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "_FIRST_LOOKS_S", 0.01)
    running = asyncio.create_task(node.test.run())
    try:
        async with asyncio.timeout(10):
            await asyncio.sleep(0.03)
            assert node.test.verdict is None
            node.run(7)
            while node.test.verdict is None:  # noqa: ASYNC110 - no event to await
                await asyncio.sleep(0.01)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
