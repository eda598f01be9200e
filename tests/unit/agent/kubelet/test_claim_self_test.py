"""Self-test of claims on a node: which processes count, and the verdicts on them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from sharepod.agent.kubelet import claim_self_test, mounts
from sharepod.agent.kubelet.claim_self_test import ClaimsAttachReason, ClaimSelfTest
from sharepod.agent.kubelet.self_test import SelfTest

HOOK = "7f00-7f01 r-xp 00000000 08:01 42 /run/sharepod/libsharepod.so\n"
MARK = ("/self-test", "/run/sharepod-self-test")
BROUGHT = ("/self-test", "/run/sharepod")


class Node:
    """Folder in place of /proc, and the self-test that reads it."""

    def __init__(self, root: Path) -> None:
        self.proc, self.state = root / "proc", root / "state"
        self.state.mkdir(parents=True)
        self.proc.mkdir()
        self.changes = 0
        self.prepared_for_s: float | None = 5.0
        self.test = ClaimSelfTest(
            self.state, prepared_for_s=lambda: self.prepared_for_s, changed=self._count, proc=self.proc
        )
        self.begun = self.test._judged_at

    def _count(self) -> None:
        self.changes += 1

    def run(self, pid: int, *mounted: tuple[str, str], maps: str = HOOK, name: str = "sleep") -> None:
        on = mounts.mount_of(self.state)
        assert on is not None
        root = Path(on.root) / self.state.resolve().relative_to(on.point)
        folder = self.proc / str(pid)
        (folder / "root" / "dev").mkdir(parents=True)
        (folder / "root" / "dev" / "nvidia0").touch()
        (folder / "comm").write_text(f"{name}\n")
        (folder / "maps").write_text(maps)
        lines = [f"1 0 {on.device} {root}{directory} {at} ro - ext4 /dev/sda ro" for directory, at in mounted]
        (folder / "mountinfo").write_text("\n".join(lines) + "\n")

    def end(self, pid: int) -> None:
        (self.proc / str(pid) / "comm").unlink()

    def look(self, after_s: float = 0.0) -> ClaimsAttachReason | None:
        return self.test.look(self.begun + after_s)

    def judge(self, after_s: float) -> tuple[str, str]:
        """Check this many seconds after the agent's start. Return (reason, status) of the condition."""
        self.test.take(self.look(after_s), self.begun + after_s)
        reason, _ = self.test.claims_attach
        return reason.value, reason.status


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.promise("node-claims-attach")
def test_a_container_that_has_what_its_claim_brings_shows_that_claims_attach(node: Node) -> None:
    node.run(7, MARK, BROUGHT)
    assert node.look() is ClaimsAttachReason.ATTACHED


@pytest.mark.promise("node-claims-attach")
def test_a_container_that_has_nothing_by_its_claim_shows_a_runtime_without_cdi(node: Node) -> None:
    node.run(7, MARK, maps="")
    node.run(8, MARK, BROUGHT)
    assert node.judge(1.0) == ("NotAttached", "False")
    assert "enable_cdi" in node.test.claims_attach[1]


def test_a_container_that_does_not_load_the_hook_of_its_claim_shows(node: Node) -> None:
    node.run(7, MARK, BROUGHT, maps="")
    assert node.judge(1.0) == ("NotLoaded", "False")


@pytest.mark.promise("node-claims-attach")
def test_a_container_that_never_starts_though_its_claim_is_prepared_shows(node: Node) -> None:
    node.prepared_for_s = 100.0
    assert node.judge(110.0) == ("Starting", "Unknown")
    node.prepared_for_s = 121.0
    assert node.judge(131.0) == ("NotStarted", "False")
    assert "nvidia-ctk cdi generate" in node.test.claims_attach[1]
    node.run(7, MARK, BROUGHT)
    assert node.judge(132.0) == ("Attached", "True")


def test_a_container_that_is_only_made_again_shows_nothing(node: Node) -> None:
    node.run(7, MARK, BROUGHT)
    node.prepared_for_s = 1000.0
    assert node.judge(1000.0) == ("Attached", "True")
    node.end(7)
    assert node.judge(1060.0) == ("Attached", "True")
    assert node.judge(1121.0) == ("NotStarted", "False")


def test_without_a_prepared_claim_there_is_a_verdict_for_a_while_and_then_none(node: Node) -> None:
    node.prepared_for_s = None
    assert node.judge(119.0) == ("Starting", "Unknown")
    assert node.judge(121.0) == ("NoSelfTest", "Unknown")
    assert "sharepod-self-test-claim" in node.test.claims_attach[1]
    node.prepared_for_s = 1.0
    node.run(7, MARK, BROUGHT)
    assert node.judge(200.0) == ("Attached", "True")
    node.prepared_for_s = None
    node.end(7)
    assert node.judge(499.0) == ("Attached", "True"), "an upgrade of its Pod changes no node"
    assert node.judge(501.0) == ("NoSelfTest", "Unknown")
    assert node.changes == 3


@pytest.mark.parametrize(
    ("mounted", "name"),
    [
        ([BROUGHT], "sleep"),
        ([("/tenants/a", "/run/sharepod-self-test"), BROUGHT], "sleep"),
        ([MARK, BROUGHT], "python"),
        ([("/self-test-of-others", "/run/sharepod-self-test")], "sleep"),
    ],
)
def test_another_process_has_no_part_in_it(node: Node, mounted: list[tuple[str, str]], name: str) -> None:
    node.run(7, *mounted, maps="", name=name)
    assert node.look() is None


def test_its_process_has_no_part_in_the_other_self_test(node: Node) -> None:
    """This process gets GPUs by its claim. The node's self-test (test_self_test.py) must not mistake that for GPUs
    without a share.
    """
    node.run(7, MARK, BROUGHT)
    other = SelfTest(node.state, accept_injection=False, changed=lambda: None, proc=node.proc)
    assert other.look() is None


async def test_it_looks_again_until_there_is_a_process(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_self_test, "_FIRST_LOOKS_S", 0.01)
    running = asyncio.create_task(node.test.run())
    try:
        async with asyncio.timeout(10):
            await asyncio.sleep(0.03)
            assert node.test.claims_attach[0].value == "Starting"
            node.run(7, MARK, BROUGHT)
            while node.test.claims_attach[0].value != "Attached":  # noqa: ASYNC110 - no event to await
                await asyncio.sleep(0.01)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
