"""Publisher of the node's ResourceSlice: in pool `scheduler`, it offers the node's GPUs to kube-scheduler.

Guarantees:
- A slice exists only while the applied ledger has pool `scheduler` and the node is not leaving the pool.
- The slice is reported as deleted only as long as this process has not begun another write of it.
- A slice that others have changed or deleted (as a kubelet does while the agent is away) is written again. The same
  holds after a restore of etcd from a backup.
- A GPU that takes no tenants is left out of the slice. If the node takes no tenants, all GPUs are left out. Claims that
  have such a GPU keep it, and kube-scheduler still counts them.
- If another node's or driver's slice has the preferred name, the second name is used (`device_slice.slice_names`).
- Nothing is published if a dry run shows that the API server drops the fields for shares of devices.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import structlog

from sharepod.api.gpunode import Gpu
from sharepod.api.objects import SCHEDULER_DRIVER
from sharepod.kube import (
    AlreadyExistsError,
    ApiError,
    ConflictError,
    Connection,
    ForbiddenError,
    InvalidError,
    Json,
    NotFoundError,
    UnavailableError,
    backoff,
)

from .device_slice import is_of_node, says_the_same, shares_devices, slice_body, slice_names, slice_spec
from .ledger_watch import LedgerWatch
from .status_report import Readiness, SliceReason

log = structlog.get_logger(__name__)

SLICES = "/apis/resource.k8s.io/v1/resourceslices"
"""Path of the ResourceSlices in the API."""
LOOK_S = 2.0
"""Seconds between two checks of the GPUs, because their health may change at any time."""
_REVIEWS = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
_NODE_UID = "authentication.kubernetes.io/node-uid"
"""Key in the `extra` field of a user: UID of the Node to which the user's token is bound."""

_NO_SHARES = (
    "the API server does not store shares of devices: turn on the feature gate DRAConsumableCapacity everywhere (on by "
    "default from Kubernetes 1.36), or take the label sharepod.dev/pool=scheduler off the node"
)
_NOT_BOUND = (
    "the token of the agent names no node; it must be bound to the agent's pod, as tokens that the kubelet mounts are"
)


class SlicePublisher:
    """Publisher of one node's slice, run by `run` and `follow`."""

    def __init__(
        self,
        api: Connection,
        *,
        node: str,
        ledger: LedgerWatch,
        gpus: Callable[[], Sequence[Gpu]],
        settling: Callable[[], bool],
        unfit: Callable[[], str | None],
        changed: Callable[[], None],
    ) -> None:
        """Args:
        api: connection to the API server.
        node: name of the node.
        ledger: the node's ledger.
        gpus: returns the GPUs that take tenants by claims.
        settling: returns whether the agent is still starting: until then an earlier agent's slice stays as it is.
        unfit: returns why the node takes no tenants by claims; None if it does.
        changed: called when `verdict` may have changed.
        """
        self._api = api
        self._node = node
        self._name: str | None = None
        """Name of the slice; None until it is chosen."""
        self._chosen = asyncio.Event()
        self._ledger = ledger
        self._gpus = gpus
        self._settling = settling
        self._unfit = unfit
        self._changed = changed
        self._woken = asyncio.Event()
        self._seen: Json | None = None
        """The slice as last read or written. None: it does not exist, or is unknown."""
        self._written: tuple[Json, Json] | None = None
        """(spec that this process wrote last, spec in the API server's answer)."""
        self._node_uid: str | None = None
        self._proven = False
        """True once the API server has been seen to store the fields for shares of devices."""
        self._withdrawn = False
        """True if the slice was deleted and no write of a slice has begun since then."""
        self._verdict = Readiness(SliceReason.STARTING, "the API server has not been asked yet")

    @property
    def verdict(self) -> Readiness | None:
        """Readiness of the node for claims that kube-scheduler allocates. None if the node is not in pool
        `scheduler`.
        """
        if not self._ledger.of_scheduler:
            return None
        if self._ledger.publishes:
            return self._verdict
        return Readiness(SliceReason.WITHDRAWN if self._withdrawn else SliceReason.STARTING, "the node leaves the pool")

    @property
    def _path(self) -> str:
        return f"{SLICES}/{self._name}"

    async def run(self) -> None:
        """Keep the slice up to date, until cancelled."""
        attempt = 0
        while True:
            self._woken.clear()
            try:
                await self.step()
                attempt = 0
            except (NotFoundError, ForbiddenError, InvalidError) as error:
                self._tell(SliceReason.REFUSED, _why(error))
                attempt += 1
            except ApiError as error:
                log.warning("cannot publish the node's GPUs; trying again", error=str(error))
                attempt += 1
            if attempt:
                await backoff(attempt)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._woken.wait()

    async def follow(self) -> None:
        """Watch the slice while the node is in the pool. Wake `run` at each change of the slice or of the ledger."""
        attempt = 0
        while True:
            if not self._ledger.publishes:
                await self._ledger.changed()
                self._woken.set()
                continue
            await self._chosen.wait()
            try:
                await self._watch()
                attempt = 0
            except (UnavailableError, ApiError) as error:
                log.debug("cannot follow the node's slice", error=str(error))
                attempt += 1
                await backoff(attempt)

    async def step(self) -> None:
        """Write the slice that the applied ledger requires. Raise `ApiError`."""
        if self._ledger.uid is None:
            return  # the slice of an earlier agent stays until the ledger is known
        if self._name is None:
            await self._choose()
        if self._ledger.publishes:
            self._withdrawn = False
            await self._publish()
        elif not self._withdrawn:
            await self._withdraw()

    async def _publish(self) -> None:
        if self._settling():
            self._tell(SliceReason.STARTING, "the agent is starting")
            return
        if self._node_uid is None:
            self._node_uid = await self._own_node_uid()
        if self._node_uid is None:
            self._tell(SliceReason.REFUSED, _NOT_BOUND)
            return
        unfit = self._unfit()
        gpus = () if unfit is not None else tuple(sorted(self._gpus(), key=lambda gpu: gpu.index))
        generation = int(self._seen["spec"]["pool"]["generation"]) if self._seen is not None else 0
        wanted = slice_spec(self._node, gpus, generation + 1)
        if self._seen is None or not self._is_as_written(self._seen, wanted):
            if self._seen is None:
                write = ("POST", SLICES, slice_body(self._node, self._node_uid, wanted, self._name))
            else:
                write = ("PUT", self._path, {**self._seen, "spec": wanted})
            if not await self._write(*write):
                return
        if unfit is not None:
            self._tell(SliceReason.NOT_READY, unfit)
        else:
            self._tell(SliceReason.PUBLISHED, "" if gpus else "no GPU of the node takes tenants")

    def _is_as_written(self, seen: Json, wanted: Json) -> bool:
        """Return whether the slice is as this process wrote it, from the wanted spec.

        The API server normalizes quantities, so the slice is compared with the API server's answer to the write.
        """
        if self._written is None:
            return False
        asked, answered = self._written
        return says_the_same(asked, wanted) and says_the_same(answered, seen["spec"])

    async def _write(self, method: str, path: str, body: Json) -> bool:
        """Write the slice; return False if it was not written. Before the first devices, check by a dry run that the
        API server stores the fields that let several claims share a device."""
        try:
            if body["spec"]["devices"] and not self._proven:
                kept = await self._api.call(method, path, body, query={"dryRun": "All"})
                if not shares_devices(kept["spec"]):
                    self._tell(SliceReason.NO_SHARES, _NO_SHARES)
                    return False
                self._proven = True
            made = await self._api.call(method, path, body)
        except (AlreadyExistsError, ConflictError):
            self._seen = None
            self._take(await self._api.get(self._path))
        except NotFoundError:
            if self._seen is None:
                raise
            self._seen = None  # the slice was deleted in the meantime
        else:
            self._seen, self._written = made, (body["spec"], made["spec"])
            log.info("published the node's GPUs", devices=len(body["spec"]["devices"]))
            return True
        self._woken.set()
        return False

    async def _withdraw(self) -> None:
        try:
            await self._api.call("DELETE", self._path)
            log.info("the node's GPUs are no longer published")
        except NotFoundError:
            pass
        except ForbiddenError:  # the agent has no right to delete slices, so it has never published one
            if self._ledger.of_scheduler:
                raise
        self._seen, self._withdrawn = None, True
        self._changed()

    async def _choose(self) -> None:
        """Choose the slice's name: of the node's existing slice, else the first possible name that is free."""
        if self._node_uid is None:
            self._node_uid = await self._own_node_uid()
        names = slice_names(self._node, self._node_uid)
        found: dict[str, Json] = {}
        for name in names:
            with contextlib.suppress(NotFoundError, ForbiddenError):
                found[name] = await self._api.get(f"{SLICES}/{name}")
        own = [name for name in names if name in found and is_of_node(found[name], self._node)]
        free = [name for name in names if name not in found]
        self._name = [*own, *free, names[0]][0]
        if self._name != names[0]:
            log.warning("another node's slice has the name of this node's", taken=names[0], instead=self._name)
        self._chosen.set()

    async def _own_node_uid(self) -> str | None:
        """Return the uid of this node's Node, from the agent's own token; None if the token names none."""
        body: Json = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        user = (await self._api.create(_REVIEWS, body)).get("status", {}).get("userInfo", {})
        found = (user.get("extra") or {}).get(_NODE_UID) or ()
        return str(found[0]) if found else None

    async def _watch(self) -> None:
        """List and watch the slice, until the API server ends the watch or the node leaves the pool."""
        known, name = self._seen, self._name
        query = {"fieldSelector": f"metadata.name={name}"}
        listed = await self._api.get(SLICES, query)
        found = next(iter(listed.get("items") or ()), None)
        if found is not None and known is not None and _version(found) < _version(known):
            log.warning("the API server's resource versions went back: reading the slice again", slice=self._path)
            self._seen = None
        self._take(found)
        async for event in self._api.watch(SLICES, query, str(listed["metadata"]["resourceVersion"])):
            if event["type"] in ("ADDED", "MODIFIED"):
                self._take(event["object"])
            elif event["type"] == "DELETED":
                self._take(None)
            if not self._ledger.publishes or self._name != name:
                return

    def _take(self, found: Json | None) -> None:
        if found is not None and not is_of_node(found, self._node):
            self._chosen.clear()
            self._seen = self._name = None
            self._woken.set()
            return
        if found is not None and self._seen is not None and _version(found) < _version(self._seen):
            return
        self._seen = found
        self._woken.set()

    def _tell(self, reason: SliceReason, message: str) -> None:
        verdict = Readiness(reason, message)
        if verdict != self._verdict:
            if reason.status == "False":
                log.warning("the node's GPUs are not published", driver=SCHEDULER_DRIVER, why=message)
            self._verdict = verdict
            self._changed()


def _version(found: Json) -> int:
    return int(found["metadata"]["resourceVersion"])


def _why(error: ApiError) -> str:
    hint = "the API server has no ResourceSlices of resource.k8s.io/v1: " if isinstance(error, NotFoundError) else ""
    return f"{hint}{error}"
