"""Prepared claims: records which ResourceClaims are prepared on this node, with their tenants and pods, and writes
their CDI devices. The records survive restarts of the agent.

Guarantees:
- A claim counts as prepared before its CDI device is written and until the device is removed, even if the agent is
  killed in between.
- A record is valid for one boot of the node. After a reboot no container runs, and the kubelet prepares each claim
  again before it starts a container.
- If the CDI device of a prepared claim is lost, the next agent writes it again.
- A tenant's pods are remembered until the tenant is dropped, because a pod's processes may outlive its claim.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError

from sharepod.agent.state import files
from sharepod.agent.state.boot import boot_id
from sharepod.agent.state.directory import StateDir

from .entitlement import ClaimIdentity
from .tenant_devices import TenantDevices

log = structlog.get_logger(__name__)

_STATE_VERSION = 1
"""Version of the file's layout; a file of another version is not read."""
_PODS_MAX = 1024
"""Most pods that are remembered for one tenant. A claim has at most 256 consumers at a time."""


class _KeptTenant(BaseModel):
    model_config = ConfigDict(extra="ignore")
    claims: dict[str, str] = {}
    pods: list[str] = []


class _KeptClaims(BaseModel):
    """Content of the file `claims.json`."""

    model_config = ConfigDict(extra="ignore")
    version: int
    boot: str
    tenants: dict[str, _KeptTenant]


@dataclass
class _Known:
    """Record of a tenant that is or was attached by a claim."""

    claims: dict[str, str] = field(default_factory=dict)
    """Namespace and name of each prepared claim, by UID."""
    pods: set[str] = field(default_factory=set)
    prepared: int = 0
    """Number of times that a claim of the tenant was prepared."""


class PreparedClaims:
    """Prepared claims of one node. Called on one event loop; files are written in threads."""

    def __init__(self, *, cdi_dir: Path, tenants_dir: Path, state_dir: Path) -> None:
        """Args:
        cdi_dir: CDI directory for the tenants' devices.
        tenants_dir: folder of the tenants' directories, each named by the tenant's id.
        state_dir: the agent's state directory.
        """
        self._devices = TenantDevices(cdi_dir, boot_id())
        self._cdi_dir = cdi_dir
        self._tenants_dir = tenants_dir
        self._file = state_dir / "claims.json"
        self._tenants: dict[str, _Known] = {}
        self._saving = asyncio.Lock()
        self._turn = asyncio.Lock()
        """Held by the running operation. Two operations on one claim must not overlap, and all operations are short."""
        self._saves: set[asyncio.Task[None]] = set()

    def recover(self) -> None:
        """Read an earlier agent's records, and correct the CDI devices. Call this once, first."""
        kept = self._load()
        for tenant_id, known in kept.tenants.items():
            self._tenants[tenant_id] = _Known(dict(known.claims), set(known.pods), prepared=1)
        recorded = {uid for tenant in self._tenants.values() for uid in tenant.claims}
        for uid, found in self._devices.present().items():
            if uid in recorded:
                continue
            if found is not None and StateDir.serves(found):
                self._tenants.setdefault(found, _Known(prepared=1)).claims[uid] = f"with UID {uid}"
            else:
                self._remove_stale(uid)
        for tenant_id, tenant in self._tenants.items():
            for uid in tenant.claims:
                self._rewrite(uid, tenant_id)
        log.info("claims recovered", prepared=sum(len(tenant.claims) for tenant in self._tenants.values()))

    def prepared(self, tenant_id: str) -> tuple[str, ...]:
        """Return the claims by which this tenant is attached or being attached, as text, sorted."""
        tenant = self._tenants.get(tenant_id)
        return tuple(sorted(tenant.claims.values())) if tenant else ()

    def times_prepared(self, tenant_id: str) -> int:
        """Return how many times a claim of this tenant was prepared. The number only grows."""
        tenant = self._tenants.get(tenant_id)
        return tenant.prepared if tenant else 0

    def pods(self, tenant_id: str) -> frozenset[str]:
        """Return the UIDs of all pods in which processes of this tenant were ever seen."""
        tenant = self._tenants.get(tenant_id)
        return frozenset(tenant.pods) if tenant else frozenset()

    def tenants(self) -> frozenset[str]:
        """Return the ids of all remembered tenants."""
        return frozenset(self._tenants)

    def learn(self, tenant_id: str, pod_uid: str) -> None:
        """Record a pod in which a process of the tenant was seen. Ignored for a tenant that was never prepared."""
        tenant = self._tenants.get(tenant_id)
        if tenant is None or pod_uid in tenant.pods or len(tenant.pods) >= _PODS_MAX:
            return
        tenant.pods.add(pod_uid)
        task = asyncio.get_running_loop().create_task(self._save_if_possible(), name="save-claims")
        self._saves.add(task)
        task.add_done_callback(self._saves.discard)

    async def prepare(self, claim: ClaimIdentity, entitled: Callable[[], str]) -> None:
        """Write the CDI device of a claim, unless it exists already. Raise `OSError`, and errors of `entitled`.

        `prepared` includes the claim from the answer of `entitled` on, without an await in between. So if the row
        becomes Releasing, its release already finds the claim prepared. The operation runs to its end even if the
        caller is cancelled.

        Args:
            entitled: returns the id of the claim's tenant, if it is still entitled.
        """
        await self._to_the_end(self._prepare(claim, entitled))

    async def unprepare(self, claim_uid: str) -> bool:
        """Remove the CDI device of a claim, of any tenant; return whether the claim was prepared.

        The operation runs to its end even if the caller is cancelled. Raise `OSError`.
        """
        if all(claim_uid not in tenant.claims for tenant in self._tenants.values()):
            return False
        await self._to_the_end(self._unprepare(claim_uid))
        return True

    async def forget_all_but(self, tenant_ids: Collection[str]) -> None:
        """Drop all tenants that are not in `tenant_ids` and have no prepared claim."""
        removed = [
            tenant_id
            for tenant_id, tenant in self._tenants.items()
            if tenant_id not in tenant_ids and not tenant.claims
        ]
        for tenant_id in removed:
            del self._tenants[tenant_id]
        if removed:
            await self._save_if_possible()

    async def close(self) -> None:
        """Wait for pending writes."""
        await asyncio.gather(*self._saves, return_exceptions=True)

    async def _prepare(self, claim: ClaimIdentity, entitled: Callable[[], str]) -> None:
        tenant_id = entitled()
        for other_id, other in self._tenants.items():
            if other_id != tenant_id:
                other.claims.pop(claim.uid, None)
        tenant = self._tenants.setdefault(tenant_id, _Known())
        tenant.claims[claim.uid] = str(claim)
        tenant.prepared += 1
        try:
            await self._save()
            await asyncio.to_thread(self._devices.write, claim.uid, tenant_id, self._tenants_dir / tenant_id)
        except OSError as error:
            raise OSError(
                error.errno,
                f"cannot write the CDI device of claim {claim} in {self._cdi_dir}: {error.strerror or error}",
            ) from error

    async def _unprepare(self, claim_uid: str) -> None:
        await asyncio.to_thread(self._devices.remove, claim_uid)
        for tenant in self._tenants.values():
            tenant.claims.pop(claim_uid, None)
        await self._save_if_possible()

    async def _to_the_end(self, operation: Coroutine[None, None, None]) -> None:
        """Run `operation` to its end, after all earlier operations, even if the kubelet abandons its call. Otherwise
        the operation could write while the next call runs."""

        async def in_turn() -> None:
            async with self._turn:
                await operation

        task = asyncio.get_running_loop().create_task(in_turn(), name="claim")
        self._saves.add(task)
        task.add_done_callback(self._saves.discard)
        await asyncio.shield(task)

    def _rewrite(self, claim_uid: str, tenant_id: str) -> None:
        try:
            self._devices.write(claim_uid, tenant_id, self._tenants_dir / tenant_id)
        except OSError as error:
            log.error("cannot write the CDI device of a claim again", claim_uid=claim_uid, error=str(error))

    def _remove_stale(self, claim_uid: str) -> None:
        try:
            self._devices.remove(claim_uid)
        except OSError as error:
            log.warning("cannot remove a CDI device of an earlier boot", claim_uid=claim_uid, error=str(error))

    def _load(self) -> _KeptClaims:
        empty = _KeptClaims(version=_STATE_VERSION, boot=boot_id(), tenants={})
        try:
            kept = _KeptClaims.model_validate_json(self._file.read_bytes())
        except FileNotFoundError:
            return empty
        except (OSError, ValidationError) as error:
            log.warning("cannot read the file of prepared claims; using only the CDI devices", error=str(error))
            return empty
        if (kept.version, kept.boot) != (_STATE_VERSION, boot_id()):
            return empty
        return kept

    async def _save(self) -> None:
        async with self._saving:
            tenants = {
                tenant_id: _KeptTenant(claims=dict(tenant.claims), pods=sorted(tenant.pods))
                for tenant_id, tenant in self._tenants.items()
            }
            kept = _KeptClaims(version=_STATE_VERSION, boot=boot_id(), tenants=tenants)
            await asyncio.to_thread(files.replace, self._file, kept.model_dump_json().encode())

    async def _save_if_possible(self) -> None:
        """Write the file; log a failure. The kubelet's next call corrects entries that are then still in the file."""
        try:
            await self._save()
        except OSError as error:
            log.warning("cannot write the file of prepared claims", file=str(self._file), error=str(error))
