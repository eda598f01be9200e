"""Watch of this node's ledger: follows one GPUNode and keeps the agent's tenants equal to its rows.

A ledger is *applied* once all its tenants are set up. A row *entitles* its pod to a volume: only then the kubelet's
request for the pod's volume succeeds.

Guarantees:
- `generation` is always the generation of an applied ledger, never of a ledger that was only read.
- If the disk cannot store a row's files, the ledger is applied without that row. `problem` names the row, and the agent
  retries. Other rows are not delayed.
- When a row becomes Releasing or is removed, it stops entitling its pod before any other step of its release.
- A new row entitles its pod only once its tenant is set up and its files are on disk (a part of LE1 row-before-use in
  docs/design.md).
- The applied ledger is kept in a file. An agent that starts without the API server serves the running tenants from it,
  but publishes no new volume.
- `on_ledger` gets the pool and the holders of a ledger before its rows are applied.
- A list older than the cached GPUNode means that etcd was restored from a backup: the list replaces the cache.
- The deletion of the GPUNode removes no running tenant. Only a ledger that does not contain the tenant removes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError

from sharepod.agent.state import files
from sharepod.agent.tenants.registry import UntakenRowsError
from sharepod.api.gpunode import PLURAL, HolderState, PluginHolder, Pool, Tenant, TenantState, cordoned
from sharepod.api.objects import GROUP, POOL_LABEL, VERSION
from sharepod.kube import ApiError, Connection, GoneError, Json, UnavailableError, backoff
from sharepod.setting_faults import first_fault

log = structlog.get_logger(__name__)

GPUNODES = f"/apis/{GROUP}/{VERSION}/{PLURAL}"
"""Path of the GPUNodes in the API."""

KnowLedger = Callable[[Pool, Sequence[PluginHolder]], None]
"""Callback that gets pool and holders of a ledger."""

Apply = Callable[[Sequence[Tenant]], Awaitable[None]]
"""Callback that sets up the tenants of these rows and removes all others. It returns when that is done."""


class _Checkpoint(BaseModel):
    """Content of the file with the applied ledger."""

    model_config = ConfigDict(extra="ignore")
    uid: str
    generation: int
    tenants: tuple[Json, ...]
    pool: Pool = Pool.DEDICATED
    holders: tuple[Json, ...] = ()


class LedgerWatch:
    """Watch of the GPUNode with the name of this node. Called on one event loop."""

    def __init__(
        self,
        api: Connection,
        *,
        node: str,
        apply: Apply,
        checkpoint: Path,
        on_change: Callable[[], None],
        on_ledger: KnowLedger = lambda _pool, _holders: None,
    ) -> None:
        """Args:
        api: connection to the API server.
        node: name of the node.
        apply: applies rows.
        checkpoint: file for the applied ledger.
        on_change: called whenever a property of the watch has changed.
        on_ledger: called with pool and holders of each ledger before its rows are applied.
        """
        self._api = api
        self._node = node
        self._apply = apply
        self._checkpoint = checkpoint
        self._object: Json | None = None
        self._spec: Mapping[str, Any] = {}
        """Spec of the applied ledger. Compared too, because a different spec can have the same generation after etcd
        was restored from a backup."""
        self._arrived = asyncio.Event()
        self._moved = asyncio.Event()
        self._on_change = on_change
        self._on_ledger = on_ledger
        self._in_force: tuple[Tenant, ...] = ()
        self._entitling: tuple[Tenant, ...] = ()
        self._unreadable: tuple[str, ...] = ()
        self._absent: str | None = "the agent has not read its ledger yet"
        self._applying_failed: str | None = None
        self.uid: str | None = None
        """UID of the GPUNode whose ledger is applied. None until a ledger from the API server has been applied."""
        self.generation: int | None = None
        """Generation of the GPUNode whose ledger is applied. None until a ledger from the API server has been
        applied."""

    @property
    def rows(self) -> tuple[Tenant, ...]:
        """Rows that entitle their pods, and Releasing rows. The latter entitle no pod; they only show that the row is
        known."""
        return self._entitling

    @property
    def in_force(self) -> tuple[Tenant, ...]:
        """The rows of the applied ledger."""
        return self._in_force

    @property
    def absent(self) -> str | None:
        """Why the ledger is unknown, as text, so that no new volume is published. None while it is known."""
        return self._absent

    @property
    def problem(self) -> str | None:
        """Why rows of the ledger are not applied, as text. None if all rows are."""
        if self._unreadable:
            return f"rows of the ledger cannot be read (upgrade the agent?): {'; '.join(self._unreadable)}"
        return self._applying_failed

    @property
    def object(self) -> Json | None:
        """The cached GPUNode; None if it does not exist."""
        return self._object

    @property
    def cordoned(self) -> frozenset[str]:
        """UUIDs and indexes of cordoned GPUs, by the cached GPUNode."""
        annotations = _mapping(_mapping((self._object or {}).get("metadata")).get("annotations"))
        return cordoned({name: value for name, value in annotations.items() if isinstance(value, str)})

    @property
    def of_scheduler(self) -> bool:
        """True if a ledger from the API server is applied and has pool `scheduler`."""
        return self.uid is not None and self._spec.get("pool") == Pool.SCHEDULER

    @property
    def publishes(self) -> bool:
        """True if the applied ledger has pool `scheduler`, the GPUNode exists, and the node is not leaving the pool."""
        return self.of_scheduler and self._absent is None and not self._spec.get("leaving")

    async def changed(self) -> None:
        """Wait for the next change of rows, generation or object."""
        await self._moved.wait()

    def note(self, gpunode: Json) -> None:
        """Cache a GPUNode that the API server has returned. An older version than the cached one is ignored: watch and
        writes may cross."""
        if self._object is not None and _is_older(gpunode, self._object):
            return
        self._object = gpunode
        if self._absent is not None:
            log.info("ledger found", gpunode=self._node, generation=gpunode["metadata"].get("generation"))
        self._arrived.set()
        self._move()

    async def restore(self) -> None:
        """Apply the ledger that the earlier agent has stored, if the file can be read."""
        try:
            kept = _Checkpoint.model_validate_json(self._checkpoint.read_bytes())
        except FileNotFoundError:
            return
        except (OSError, ValidationError) as error:
            log.warning(
                "cannot read the earlier agent's ledger; waiting for the API server",
                file=str(self._checkpoint),
                error=str(error),
            )
            return
        rows, unreadable = read_rows(kept.tenants, ())
        if unreadable:
            log.warning("rows of the earlier agent's ledger cannot be read", rows=unreadable)
        self._on_ledger(kept.pool, read_holders(kept.holders))
        try:
            await self._apply(rows)
        except OSError as error:
            # Continue: until the ledger can be applied, volumes must be unpublished.
            self._applying_failed = _not_in_force(error)
            log.error("cannot apply all of the earlier agent's ledger", error=str(error))
        self._in_force = rows
        log.info("earlier agent's ledger is applied", generation=kept.generation, tenants=len(rows))

    async def follow(self) -> None:
        """List and watch the GPUNode, until cancelled."""
        query = {"fieldSelector": f"metadata.name={self._node}"}
        attempt = 0
        while True:
            try:
                known = self._object
                listed = await self._api.get(GPUNODES, query)
                self._take_list(listed, known)
                version = str(listed["metadata"]["resourceVersion"])
                while True:
                    async for event in self._api.watch(GPUNODES, query, version):
                        attempt = 0
                        version = str(event["object"]["metadata"]["resourceVersion"])
                        self._take_event(event)
            except GoneError:  # the API server cannot continue the watch, so list again after a short pause
                log.info("watch of the ledger expired; listing again", gpunode=self._node)
            except UnavailableError as error:
                log.warning("cannot follow the ledger; trying again", gpunode=self._node, error=str(error))
            except ApiError as error:
                log.error("API server refuses the ledger", gpunode=self._node, error=str(error))
            attempt += 1
            await backoff(attempt)

    async def enforce(self) -> None:
        """Apply the newest ledger whenever one has arrived, until cancelled. Outdated ledgers are skipped."""
        attempt = 0
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            if self._object is None:
                continue
            try:
                await self._put_in_force(self._object)
                attempt = 0
            except Exception as error:
                # Retry, and do not end the agent: running tenants keep their time and memory even if this ledger cannot
                # be applied.
                self._applying_failed = _not_in_force(error)
                log.exception("cannot apply the ledger; trying again", gpunode=self._node)
                attempt += 1
                self._arrived.set()
                self._move()
                await backoff(attempt)

    async def _put_in_force(self, gpunode: Json) -> None:
        uid, generation = str(gpunode["metadata"]["uid"]), int(gpunode["metadata"]["generation"])
        spec = _mapping(gpunode.get("spec"))
        same = (uid, generation, spec) == (self.uid, self.generation, self._spec)
        if same and self._applying_failed is None:
            if self._absent is not None:
                self._absent = None
                self._move()
            return
        tenants, holders = spec.get("tenants") or (), read_holders(spec.get("holders") or ())
        pool = Pool(spec["pool"]) if spec.get("pool") in tuple(Pool) else Pool.DEDICATED
        self._on_ledger(pool, holders)
        rows, self._unreadable = read_rows(tenants, self._in_force)
        if self._unreadable:
            log.error("rows of the ledger cannot be read", rows=self._unreadable)
        still = {row.id for row in rows if row.state is TenantState.RESERVED}
        self._entitling = tuple(row for row in self._entitling if row.id in still)
        failed = None
        try:
            await self._apply(rows)
        except UntakenRowsError as error:
            failed = error
        self._in_force = self._entitling = rows
        self.uid, self.generation, self._spec = uid, generation, spec
        self._applying_failed = _not_in_force(failed) if failed is not None else None
        # otherwise the GPUNode was deleted while its ledger was being applied
        if self._object is not None and self._object["metadata"]["uid"] == uid:
            self._absent = None
        self._move()
        kept = _Checkpoint(
            uid=uid,
            generation=generation,
            tenants=tuple(row.dump() for row in rows),
            pool=pool,
            holders=tuple(holder.dump() for holder in holders),
        )
        await asyncio.to_thread(self._keep, kept)
        if failed is not None:
            raise failed

    def _keep(self, checkpoint: _Checkpoint) -> None:
        try:
            files.replace(self._checkpoint, checkpoint.model_dump_json().encode())
        except OSError as error:
            log.warning("cannot keep the ledger for the next agent", file=str(self._checkpoint), error=str(error))

    def _take_list(self, listed: Json, known: Json | None) -> None:
        """Cache the GPUNode in the answer to a list. `known`: the GPUNode that was cached when the list was
        requested."""
        items = listed.get("items") or []
        if items:
            if known is not None and _is_older(items[0], known):
                log.warning("the API server's resource versions went back: replacing the ledger", gpunode=self._node)
                self._object = None
            self.note(items[0])
        else:
            self._lose("not in the list")

    def _take_event(self, event: Json) -> None:
        if event["type"] in ("ADDED", "MODIFIED"):
            self.note(event["object"])
        elif event["type"] == "DELETED":
            self._object = None
            self._lose("deleted")

    def _lose(self, how: str) -> None:
        self._object = None
        self._absent = (
            f"GPUNode {self._node} does not exist ({how}); "
            f"the operator creates one for each Node with the label {POOL_LABEL}"
        )
        log.warning("no ledger", gpunode=self._node, why=how)
        self._move()

    def _move(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()
        self._on_change()


def read_rows(rows: Sequence[Any], in_force: Sequence[Tenant]) -> tuple[tuple[Tenant, ...], tuple[str, ...]]:
    """Return the rows that can be read, and for each other row a text with its fault.

    Unknown fields are ignored. A row that can no longer be read is returned in its applied state.

    Args:
        rows: the rows from the API server.
        in_force: the applied rows.
    """
    known = {tenant.id: tenant for tenant in in_force}
    read: dict[str, Tenant] = {}
    unreadable = []
    for row in rows:
        fields = _mapping(row)
        row_id = str(fields.get("id", "?"))
        try:
            tenant = Tenant.model_validate(fields, extra="ignore")
        except ValidationError as error:
            unreadable.append(f"tenant {row_id}: {first_fault(error)}")
            if row_id not in known:
                continue
            tenant = known[row_id]
        read[tenant.id] = tenant
    return tuple(read.values()), tuple(unreadable)


def read_holders(rows: Sequence[Any]) -> tuple[PluginHolder, ...]:
    """Return the holders that can be read. Others, such as a holder in a state that this version does not know, are
    left out, so their GPUs are closed to tenants."""
    known = [row for row in map(_mapping, rows) if row.get("state") in tuple(HolderState)]
    read = []
    for row in known:
        try:
            read.append(PluginHolder.model_validate(row, extra="ignore"))
        except ValidationError as error:
            log.error("a holder of the ledger cannot be read", holder=str(row.get("id")), error=str(error))
    return tuple(read)


def _not_in_force(error: Exception) -> str:
    return f"the ledger cannot be applied: {error}"


def _is_older(one: Json, other: Json) -> bool:
    """Return whether `one` is an older version of the same object than `other`."""
    if one["metadata"].get("uid") != other["metadata"].get("uid"):
        return False
    try:
        return int(one["metadata"]["resourceVersion"]) < int(other["metadata"]["resourceVersion"])
    except ValueError:
        return False


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
