"""Published volumes: records which tenants' directories are mounted in which pods, and mounts them. The records survive
restarts of the agent.

Guarantees:
- A volume counts as published before it is mounted and until it is unmounted, even if the agent is killed in between.
- The records come from a file and /proc/self/mountinfo. If they differ, the mounts count. If the file is lost, only the
  pods of already unmounted volumes are forgotten.
- A volume can be unpublished without the API server, the ledger and the tenant's directory.
- A pod is remembered with its tenant until the tenant is dropped, because the pod's cgroup may outlive its volume.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError

from sharepod.agent.kubelet import mounts
from sharepod.agent.state import files

log = structlog.get_logger(__name__)

_STATE_VERSION = 1
"""Version of the file's layout; a file of another version is not read."""
_UID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")


class VolumeError(Exception):
    """Error for a volume that cannot be published or unpublished. The message names it, with the remedy."""


class VolumeBusyError(VolumeError):
    """Error for a volume with another operation in progress. The caller retries."""


class TargetError(VolumeError):
    """Error for a path that is not a CSI volume of a pod under the kubelet's root."""


@dataclass
class _Tenant:
    pods: set[str] = field(default_factory=set)
    targets: set[Path] = field(default_factory=set)


class _TenantState(BaseModel):
    model_config = ConfigDict(extra="ignore")
    pods: list[str]
    targets: list[str]


class _State(BaseModel):
    model_config = ConfigDict(extra="ignore")
    version: int
    tenants: dict[str, _TenantState]


class Volumes:
    """Volumes of one node. Called on one event loop; mounts are made in threads."""

    def __init__(self, *, pods_dir: Path, tenants_dir: Path, state_dir: Path) -> None:
        """Args:
        pods_dir: folder in which the kubelet keeps the pods' volumes.
        tenants_dir: folder of the tenants' directories, each named by the tenant's id.
        state_dir: the agent's state directory."""
        self._pods_dir = pods_dir
        self._listed_pods_dir = pods_dir.resolve()
        self._tenants_dir = tenants_dir
        self._state_file = state_dir / "volumes.json"
        self._staging = state_dir / "staging"
        self._staging_number = itertools.count(1)
        self._tenants: dict[str, _Tenant] = {}
        self._running: dict[Path, asyncio.Task[None]] = {}
        self._saving = asyncio.Lock()
        self.changed: Callable[[], None] = lambda: None
        """Called after each unpublishing."""

    def recover(self) -> None:
        """Read the records of an earlier agent. Call once, first. Raise `OSError` if the mounts cannot be read."""
        mounts.sweep(self._staging)
        state = self._load()
        self._tenants = {
            tenant_id: _Tenant(set(row.pods), {Path(target) for target in row.targets})
            for tenant_id, row in state.tenants.items()
        }
        mounted = self._mounted()
        for target, tenant_id in mounted.items():
            tenant = self._tenants.setdefault(tenant_id, _Tenant())
            tenant.targets.add(target)
            tenant.pods.add(self.pod_of(target))
        for tenant_id, tenant in self._tenants.items():
            tenant.targets = {target for target in tenant.targets if mounted.get(target) == tenant_id}
        log.info("volumes recovered", tenants=len(self._tenants), published=len(mounted))

    def pod_of(self, target: Path) -> str:
        """Return the UID of the pod of `target` (`<pods>/<uid>/volumes/kubernetes.io~csi/<name>/mount`).

        Raise `TargetError` for any other path.
        """
        parts = target.relative_to(self._pods_dir).parts if target.is_relative_to(self._pods_dir) else ()
        if (
            len(parts) != 5
            or parts[1:3] != ("volumes", "kubernetes.io~csi")
            or parts[4] != "mount"
            or not _UID.match(parts[0])
        ):
            raise TargetError(
                f"target path {str(target)!r} is not a CSI volume under {self._pods_dir}; "
                "set the agent's kubelet_root to the kubelet's --root-dir, the same path in the agent's container"
            )
        return parts[0]

    def published(self, tenant_id: str) -> tuple[Path, ...]:
        """Return the paths at which this tenant's directory is published or just being published, sorted."""
        tenant = self._tenants.get(tenant_id)
        return tuple(sorted(tenant.targets)) if tenant else ()

    def pods(self, tenant_id: str) -> frozenset[str]:
        """Return the UIDs of all pods in which this tenant's directory was ever published."""
        tenant = self._tenants.get(tenant_id)
        return frozenset(tenant.pods) if tenant else frozenset()

    def tenants(self) -> frozenset[str]:
        """Return the ids of all remembered tenants."""
        return frozenset(self._tenants)

    async def publish(self, *, target: Path, tenant_id: str, source: Path) -> None:
        """Mount `source`, the tenant's directory, read-only at `target`, unless it is mounted there already.

        `published` includes the volume from the call on, before the first await. The operation runs to its end even if
        the caller is cancelled. Raise `VolumeError`.
        """
        pod_uid = self.pod_of(target)
        self._refuse_busy(target)
        for other in self._tenants.values():
            other.targets.discard(target)
        tenant = self._tenants.setdefault(tenant_id, _Tenant())
        tenant.pods.add(pod_uid)
        tenant.targets.add(target)
        await self._to_the_end(target, self._publish(target, source, tenant))

    async def unpublish(self, target: Path) -> None:
        """Unmount everything at `target` and remove the path, whichever tenant it belongs to.

        The operation runs to its end even if the caller is cancelled. Raise `VolumeError` if it fails.
        """
        self.pod_of(target)
        self._refuse_busy(target)
        await self._to_the_end(target, self._unpublish(target))

    async def forget_all_but(self, tenant_ids: Collection[str]) -> None:
        """Drop all tenants that are not in `tenant_ids` and have no published volume."""
        removed = [
            tenant_id
            for tenant_id, tenant in self._tenants.items()
            if tenant_id not in tenant_ids and not tenant.targets
        ]
        for tenant_id in removed:
            del self._tenants[tenant_id]
        if removed:
            await self._save_if_possible()

    async def _publish(self, target: Path, source: Path, tenant: _Tenant) -> None:
        staging = self._staging / str(next(self._staging_number))
        try:
            if await asyncio.to_thread(mounts.is_bound_readonly, source, target):
                await self._save_if_possible()  # already mounted: the kubelet has restarted and repeats its calls
                return
            await self._save()
            await asyncio.to_thread(mounts.bind_readonly, source, target, staging)
        except OSError as error:
            await self._unpublish(target)
            raise VolumeError(f"cannot publish {source} at {target}: {error}") from error

    async def _unpublish(self, target: Path) -> None:
        try:
            await asyncio.to_thread(_take_away, target)
        except OSError as error:
            raise VolumeError(f"cannot unpublish the volume at {target}: {error}") from error
        for tenant in self._tenants.values():
            tenant.targets.discard(target)
        self.changed()
        await self._save_if_possible()

    def _refuse_busy(self, target: Path) -> None:
        if target in self._running:
            raise VolumeBusyError(f"another operation on {target} is under way; try again")

    async def _to_the_end(self, target: Path, operation: Coroutine[None, None, None]) -> None:
        """Run `operation` to its end, even if the kubelet abandons its call. Otherwise the operation could mount while
        the next call runs."""

        def done(task: asyncio.Task[None]) -> None:
            del self._running[target]
            if not task.cancelled() and task.exception() is not None:
                log.warning("volume operation failed", target=str(target), error=str(task.exception()))

        task = asyncio.get_running_loop().create_task(operation)
        self._running[target] = task
        task.add_done_callback(done)
        await asyncio.shield(task)

    def _mounted(self) -> dict[Path, str]:
        """Return the tenant id of each mounted volume, by its path, from /proc/self/mountinfo."""
        found: dict[Path, str] = {}
        for mount in mounts.mounts():
            if not mount.point.is_relative_to(self._listed_pods_dir):
                continue
            target = self._pods_dir / mount.point.relative_to(self._listed_pods_dir)
            try:
                self.pod_of(target)
            except TargetError:
                continue
            # only the end of `root` is the same everywhere, because it is relative to the root of the directory's
            # filesystem
            tenant_dir = PurePosixPath(mount.root.removesuffix("//deleted"))
            if tenant_dir.parent.name == self._tenants_dir.name:
                found[target] = tenant_dir.name
        return found

    def _load(self) -> _State:
        empty = _State(version=_STATE_VERSION, tenants={})
        try:
            state = _State.model_validate_json(self._state_file.read_bytes())
        except FileNotFoundError:
            return empty
        except (OSError, ValidationError) as error:
            log.warning(
                "cannot read the file of published volumes; using only the mounts",
                file=str(self._state_file),
                error=str(error),
            )
            return empty
        if state.version != _STATE_VERSION:
            log.warning("file of published volumes has another version; using only the mounts", version=state.version)
            return empty
        return state

    async def _save(self) -> None:
        async with self._saving:
            tenants = {
                tenant_id: {"pods": sorted(tenant.pods), "targets": sorted(map(str, tenant.targets))}
                for tenant_id, tenant in self._tenants.items()
            }
            text = json.dumps({"version": _STATE_VERSION, "tenants": tenants})
            await asyncio.to_thread(files.replace, self._state_file, text.encode())

    async def _save_if_possible(self) -> None:
        """Write the file; log a failure. For changes that the next agent can also read from the mounts."""
        try:
            await self._save()
        except OSError as error:
            log.warning("cannot write the file of published volumes", file=str(self._state_file), error=str(error))


def _take_away(target: Path) -> None:
    mounts.unmount(target)
    target.rmdir() if target.is_dir() and not target.is_symlink() else target.unlink(missing_ok=True)
