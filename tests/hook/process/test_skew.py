"""Agent and hook of different protocol versions, either way: real programs on simulated GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.older import NO_OLDER, OLDER, VERSION_2, has_older, older_package
from hook.world.agent_node import GI, GPUS, HOOK, built, running, tenant, wait_for

pytestmark = [
    pytest.mark.skipif(not built(), reason="hook or double not built: run `make shim doubles`"),
    pytest.mark.skipif(not has_older(), reason=NO_OLDER),
]


@pytest.fixture(scope="module", params=[OLDER, VERSION_2], ids=["version 1", "version 2"])
def older(request: pytest.FixtureRequest) -> Iterator[Path]:
    with older_package(request.param) as package:
        yield package


@pytest.mark.promise("install-skew-hooks")
@pytest.mark.parametrize("old_agent", [True, False], ids=["old agent", "old hook"])
def test_a_hook_and_an_agent_of_different_versions_share_a_gpu_and_keep_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, older: Path, old_agent: bool
) -> None:
    hook = HOOK if old_agent else older / "sharepod" / "agent" / "hook" / "libsharepod.so"
    if old_agent:
        monkeypatch.setenv("PYTHONPATH", str(older))
    with running(tmp_path, tenant("a", 0.4), tenant("b", 0.6, memory=2 * GI), hook_file=str(hook)) as node:
        assert (node.path("a") / "libsharepod.so").read_bytes() == hook.read_bytes()
        first, second = (node.launch(name, "--sync-every", "16") for name in "ab")
        # Turns of both alternate, which is possible only if the agent grants to both.
        for _ in range(3):
            before = {name: node.devices().busy_ns(name) for name in "ab"}
            wait_for(
                lambda before=before: all(node.devices().busy_ns(name) > ns for name, ns in before.items()),
                "device time of both",
            )
        assert first.process.poll() is None
        assert second.process.poll() is None
        refused = node.launch("b", "--memory", "3G", "--seconds", "1", label="refused")
        assert refused.process.wait(60) is not None
        assert node.devices().client("refused").usage[GPUS[0]].peak == 0, "3 GiB of 2"
        node.set_tenants(tenant("a", 0.5), tenant("b", 0.5, memory=2 * GI))
        assert first.end() == second.end()
        assert "refused" not in node.log()
