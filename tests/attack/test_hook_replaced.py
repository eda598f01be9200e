"""The hook is replaced from inside the pod. The agent detects this, because it checks the mapped file, not its name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sharepod.agent.findings.rules import FindingRules, FindingThresholds
from sharepod.agent.kubelet.hook_integrity import NO_HOOK_MAPPED, OTHER_PRELOAD
from sharepod.agent.settings import PACKAGED_HOOK
from sharepod.api.gpunode import FindingReason

from attack.tenant_container import TENANT, TenantContainers, why_no_container

pytestmark = pytest.mark.skipif(why_no_container() is not None, reason=str(why_no_container()))


@pytest.fixture
def containers(tmp_path: Path) -> Iterator[TenantContainers]:
    made = TenantContainers(tmp_path)
    yield made
    made.close()


def verdict(containers: TenantContainers, pid: int, *, hooked: bool = True) -> str | None:
    return containers.integrity.look(TENANT, pid, hooked=hooked)


HONEST = {
    "the program": "",
    "in a user and mount namespace of its own": 'exec unshare -Urm sh -c "$PROGRAM"',
    "another file mounted elsewhere": "touch /run/ld.so.preload; mount --bind $FAKE /run/ld.so.preload",
    "the same file mounted again": "mount --bind /run/sharepod/ld.so.preload /etc/ld.so.preload",
}


@pytest.mark.parametrize("way", HONEST)
def test_a_program_with_the_hook_is_not_blamed(way: str, containers: TenantContainers) -> None:
    assert verdict(containers, containers.run(HONEST[way])) is None


REPLACED = {
    "a bind mount in a namespace of its own": (
        "exec unshare -Urm sh -c 'mount --bind $FAKE /etc/ld.so.preload; exec sh -c \"$PROGRAM\"'"
    ),
    "a volume mounted by way of a link to /etc": (
        "mkdir /run/a; ln -s /etc /run/a/b; mount --bind $FAKE /run/a/b/ld.so.preload"
    ),
    "another /etc": (
        "mkdir /run/etc; touch /run/etc/ld.so.preload; "
        "exec unshare -Urm sh -c 'mount --bind /run/etc /etc; cat /etc/ld.so.preload; exec sh -c \"$PROGRAM\"'"
    ),
    "the tenant's own hook mounted over it": "mount --bind /run/sharepod/limits /etc/ld.so.preload",
}


@pytest.mark.promise("node-hook-replaced", "security-replaced")
@pytest.mark.parametrize("way", REPLACED)
def test_a_replaced_mounted_file_is_found(way: str, containers: TenantContainers) -> None:
    pid = containers.run(REPLACED[way])
    assert verdict(containers, pid) == OTHER_PRELOAD
    assert verdict(containers, pid, hooked=False) == OTHER_PRELOAD


def test_a_link_that_leads_to_the_agents_own_file_only_outside_is_followed_inside(containers: TenantContainers) -> None:
    """The link is absolute. For the program it leads to the program's own file; in the agent's mount namespace it would
    lead to the tenant's file."""
    root = containers.root / "jail"
    inside = root / str(containers.directory).lstrip("/")
    inside.mkdir(parents=True)
    (inside / "ld.so.preload").touch()
    (root / "etc").symlink_to(containers.directory)
    binds = "; ".join(f"mkdir -p {root}/{name}; mount --rbind /{name} {root}/{name}" for name in ("usr", "proc"))
    links = "; ".join(f"ln -sfn usr/{name} {root}/{name}" for name in ("bin", "lib", "lib64"))
    pid = containers.run(
        f'{binds}; {links}; exec chroot {root} sh -c "$PROGRAM"',
        program="cat /etc/ld.so.preload; echo ready; read line",
    )
    assert verdict(containers, pid, hooked=False) == OTHER_PRELOAD


@pytest.mark.promise("node-hello-without-hook", "security-replaced")
def test_a_process_that_imitates_the_hook_without_mapping_it_is_found(containers: TenantContainers) -> None:
    pid = containers.run(
        "exec unshare -Urm sh -c 'mount --bind $FAKE /etc/ld.so.preload; "
        'exec sh -c "umount /etc/ld.so.preload; $PROGRAM"\''
    )
    assert verdict(containers, pid) == NO_HOOK_MAPPED
    assert verdict(containers, pid, hooked=False) is None, "static programs have a finding of their own"


def test_a_program_started_with_an_earlier_agents_hook_is_not_blamed(containers: TenantContainers) -> None:
    pid = containers.run()
    newer = containers.root / "newer.so"
    newer.write_bytes(PACKAGED_HOOK.read_bytes() + b"\n")
    containers.serve(newer)
    assert not (containers.directory / "libsharepod.so").samefile(PACKAGED_HOOK)
    assert verdict(containers, pid) is None
    assert verdict(containers, containers.run()) is None, "a program with the present hook is not reported either"


def test_a_program_that_has_ended_is_not_blamed(containers: TenantContainers) -> None:
    pid = containers.run()
    containers.close()
    assert verdict(containers, pid) is None


def test_the_finding_names_the_process_and_ends_with_it(containers: TenantContainers) -> None:
    honest, offender = containers.run(), containers.run(REPLACED["a bind mount in a namespace of its own"])
    rules = FindingRules(FindingThresholds())
    pids, deadline = {honest, offender}, time.monotonic() + 30
    while not rules.findings:
        assert time.monotonic() < deadline
        rules.observe_replaced(0, containers.integrity.replaced(TENANT, pids, pids))
    [finding] = rules.findings
    assert finding.reason == FindingReason.HOOK_REPLACED
    assert f"process {offender} " in finding.message
    rules.observe_replaced(1, containers.integrity.replaced(TENANT, {honest}, pids))
    assert not rules.findings
