"""Tenant containers: programs in a mount namespace with the tenant's directory and the file that preloads the hook."""

from __future__ import annotations

import os
import shlex
import subprocess
from contextlib import ExitStack
from pathlib import Path

from sharepod.agent.kubelet.hook_integrity import HookIntegrity
from sharepod.agent.kubelet.tenant_mounts import TenantMounts
from sharepod.agent.settings import PACKAGED_HOOK
from sharepod.agent.state.directory import StateDir
from sharepod.api.objects import PRELOAD_FILE, PRELOAD_PATH, VOLUME_MOUNT_PATH

TENANT = "tenant-a"
_PROGRAM = "echo ready; read line"
"""Shell program: prints `ready` once it runs with its preloaded libraries, and waits."""


def why_no_container() -> str | None:
    """Return why this machine cannot make these containers. None if it can."""
    if os.geteuid() != 0:
        return "a tenant's container is made here by root"
    tried = subprocess.run(["unshare", "-m", "unshare", "-Urm", "true"], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"no user and mount namespaces: {tried.stderr.strip()}"


class TenantContainers:
    """Containers of tenants on a node: each program in a mount namespace of its own.

    Args:
        root: empty folder for the agent's state and for files that programs mount.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._stack = ExitStack()
        self.programs: dict[int, subprocess.Popen[str]] = {}
        """Programs that were started, by pid."""
        self.tenants = root / "state" / "tenants"
        self.directory = self.serve(PACKAGED_HOOK)
        self.integrity = HookIntegrity(self.tenants, TenantMounts.of(self.tenants))
        self._etc = root / "etc"
        self._etc.mkdir()
        for name in ("ld.so.cache", "passwd"):
            (self._etc / name).write_bytes(Path("/etc", name).read_bytes())
        (self._etc / "ld.so.preload").touch()
        self.fake = root / "fake.preload"
        self.fake.touch()

    def serve(self, hook: Path) -> Path:
        """Create the tenant's directory, as an agent whose hook is this file does. Return the directory."""
        state = StateDir(self.root / "state", hook)
        state.prepare()
        return state.create(TENANT, "gpu limits\n")

    def run(self, attempt: str = "", program: str = _PROGRAM, *, tenant: str = TENANT) -> int:
        """Run a program in a container; return its pid once it has printed `ready`.

        Args:
            attempt: shell commands that run before the program, in the container, as its user. A command that ends in
                `exec` of another shell passes the program on as `$PROGRAM`.
            program: the program, for a shell.
            tenant: the tenant, which has a directory.
        """
        volume = self.tenants / tenant
        preload = volume / PRELOAD_FILE
        script = "\n".join(
            [
                "set -e",
                f"mount --bind {shlex.quote(str(self._etc))} /etc",
                "mount -t tmpfs tmpfs /run",
                f"mkdir {VOLUME_MOUNT_PATH}",
                f"mount --bind {shlex.quote(str(volume))} {VOLUME_MOUNT_PATH}",
                f"mount --bind {shlex.quote(str(preload))} {PRELOAD_PATH}",
                attempt,
                'exec sh -c "$PROGRAM"',
            ]
        )
        process = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
            env={**os.environ, "PROGRAM": program, "FAKE": str(self.fake)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._stack.enter_context(process)
        self._stack.callback(process.kill)
        self.programs[process.pid] = process
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process.pid

    def close(self) -> None:
        """End all programs."""
        self._stack.close()
