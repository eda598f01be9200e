"""Watches of the operator: one reflector for each kind of object. Together they keep the cluster state up to date.

Guarantees:
- Each kind is listed and watched once in this process, whether it leads or stands by.
- Freshness is reported by kind: `unready` (not listed yet), `stale` (too old to place by), `blind` (unhealthy).
- If the versions of one kind went back, every kind is listed again and its store replaced.
- The metric apply_to_pod_seconds measures from the arrival of a new SharePod until the arrival of its Pod with a share.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from sharepod.api.objects import POOL_LABEL, TENANT_LABEL
from sharepod.controller import metrics
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.unreadable_objects import UnreadableObjects
from sharepod.kube import Json

from . import watch_freshness
from .client import CLAIMS, GPUBUDGETS, GPUNODES, LEASES, NAMESPACES, NODES, PODS, SHAREPODS, Client
from .reflector import Reflector
from .watch_freshness import WatchFreshness

_OTHER_PODS = "status.phase!=Succeeded,status.phase!=Failed"
"""Field selector of unfinished pods without a tenant label: they use a node's resources, or wait with a claim."""
_REPLAY_S = 0.1
"""Seconds from the answer to a watch until all events before the answer count as recorded. The API server sends them at
once."""
_POLL_S = 0.02
"""Seconds between two checks whether all watches are open."""


@dataclass(frozen=True, slots=True)
class _Feed:
    """Store of one kind, composed of functions: the cluster state stores several kinds, and their methods differ by
    name."""

    put: Callable[[Json], None]
    drop: Callable[[str, int, Json | None], None]
    versions: Callable[[], Mapping[str, int]]
    invalidate: Callable[[], None]
    put_unreadable: Callable[[Json, str], None] = lambda _metadata, _why: None


class Watches:
    """Reflectors of all kinds.

    Args:
        state: The cluster state to keep up to date.
        client: The API server.
        namespace: Namespace of the Leases.
        on_lease: Called with each Lease of that namespace.
        on_replaced: Called after all stores were invalidated, because etcd was restored from a backup.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        state: ClusterState,
        client: Client,
        *,
        namespace: str,
        on_lease: Callable[[Json], None],
        on_replaced: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._state = state
        self._client = client
        self._clock = clock
        self._arrived: dict[str, float] = {}
        """For each uid of a new SharePod whose Pod has no share yet: time at which the SharePod arrived on the
        watch."""
        self._believed_until = -math.inf
        """Time until which every needed watch is known to be fresh, so that `believed` need not check."""

        unreadable = UnreadableObjects(state)

        def put_lease(raw: Json) -> None:
            state.agents.put(raw)
            on_lease(raw)

        def replaced() -> None:
            # Every kind is listed again: one with few events may not notice, because later writes raise the versions.
            self._believed_until = -math.inf
            client.forget()
            for kind in self.all:
                kind.replace_all()
            on_replaced()

        reflector = partial(Reflector, client, on_replaced=replaced, clock=clock)
        self.nodes = reflector(
            NODES,
            _Feed(
                state.put_node,
                lambda uid, version, _: state.drop_node(uid, version),
                state.nodes.versions,
                state.nodes.invalidate,
                unreadable.put_node,
            ),
            kind="nodes",
            labels=POOL_LABEL,
        )
        self.gpunodes = reflector(
            GPUNODES,
            _Feed(
                state.put_gpunode,
                lambda uid, version, _: state.drop_gpunode(uid, version),
                state.gpunodes.versions,
                state.invalidate_gpunodes,
                unreadable.put_gpunode,
            ),
            kind="gpunodes",
        )
        self.sharepods = reflector(
            SHAREPODS,
            _Feed(
                self._put_sharepod,
                self._drop_sharepod,
                state.sharepods.versions,
                state.invalidate_sharepods,
                unreadable.put_sharepod,
            ),
            kind="sharepods",
        )
        self.pods = reflector(
            PODS,
            _Feed(
                self._put_pod,
                lambda uid, version, last: state.drop_pod(uid, last, version),
                state.pods.versions,
                state.invalidate_pods,
            ),
            kind="pods",
            labels=TENANT_LABEL,
        )
        self.other_pods = reflector(
            PODS,
            _Feed(
                state.other_pods.put,
                lambda uid, version, _last: state.other_pods.drop(uid, version),
                state.other_pods.versions,
                state.other_pods.invalidate,
            ),
            kind="other_pods",
            labels=f"!{TENANT_LABEL}",
            fields=_OTHER_PODS,
            on_listing=state.seen_claims.forget_unused,
        )
        self.claims = reflector(
            CLAIMS,
            _Feed(
                state.seen_claims.put_claim,
                lambda uid, version, last: state.seen_claims.drop_claim(uid, version, deleted=last is not None),
                state.seen_claims.claims.versions,
                state.seen_claims.invalidate_claims,
                state.seen_claims.put_unreadable_claim,
            ),
            kind="claims",
            needed=False,
            on_listing=state.seen_claims.forget_unused,
        )
        self.leases = reflector(
            LEASES,
            _Feed(
                put_lease,
                lambda uid, _version, _last: state.agents.drop(uid),
                state.agents.versions,
                state.agents.invalidate,
            ),
            kind="leases",
            namespace=namespace,
        )
        self.namespaces = reflector(
            NAMESPACES,
            _Feed(
                self._put_namespace,
                lambda uid, _version, _last: self._drop_namespace(uid),
                state.namespace_labels.versions,
                self._invalidate_namespaces,
            ),
            kind="namespaces",
            needed=False,
        )
        self.budgets = reflector(
            GPUBUDGETS,
            _Feed(
                state.budgets.put,
                lambda uid, version, _last: state.budgets.drop(uid, version),
                state.budgets.known.versions,
                state.budgets.known.invalidate,
                state.budgets.put_unreadable,
            ),
            kind="gpubudgets",
            needed=False,
        )
        self.all = (
            self.nodes,
            self.gpunodes,
            self.sharepods,
            self.pods,
            self.other_pods,
            self.leases,
            self.namespaces,
            self.claims,
            self.budgets,
        )

    def freshness(self) -> list[WatchFreshness]:
        """Return the present freshness of each kind."""
        return [reflector.freshness() for reflector in self.all]

    def unready(self) -> str | None:
        """Return the kinds that have not been listed, as text. None if all have been listed."""
        return watch_freshness.unready(self.freshness())

    def stale(self) -> list[str]:
        """Return the needed kinds whose watch has been silent for too long. While there are any, nothing may be
        placed."""
        return watch_freshness.stale(self.freshness())

    def believed(self) -> bool:
        """Return True if every needed watch is fresh enough for placement."""
        now = self._clock()
        if now >= self._believed_until:
            seen = [watch for watch in self.freshness() if watch.needed]
            if not all(watch.listed for watch in seen):
                return False
            self._believed_until = now + watch_freshness.BELIEF_S - max(watch.silent_s for watch in seen)
        return now < self._believed_until

    def blind(self) -> str | None:
        """Return why the process is unhealthy; None if it is not."""
        return watch_freshness.blind(self.freshness(), self._client.answered_s)

    async def catch_up(self) -> None:
        """Open every watch again, and wait until the needed ones have delivered all events from before this call."""
        asked = self._clock()
        for reflector in self.all:
            reflector.reopen()
        needed = [reflector for reflector in self.all if reflector.freshness().needed]
        while not all(reflector.followed_since(asked) for reflector in needed):  # noqa: ASYNC110 - of each only a time
            await asyncio.sleep(_POLL_S)
        await asyncio.sleep(_REPLAY_S)

    def _put_namespace(self, raw: Json) -> None:
        self._state.ending_namespaces.put(raw)
        self._state.namespace_labels.put(raw)

    def _drop_namespace(self, uid: str) -> None:
        self._state.ending_namespaces.drop(uid)
        self._state.namespace_labels.drop(uid)

    def _invalidate_namespaces(self) -> None:
        self._state.ending_namespaces.invalidate()
        self._state.namespace_labels.invalidate()

    def _put_sharepod(self, raw: Json) -> None:
        uid = str(raw["metadata"]["uid"])
        if self.sharepods.listed and uid not in self._arrived and self._state.sharepods.get(uid) is None:
            self._arrived[uid] = self._clock()
        self._state.put_sharepod(raw)

    def _drop_sharepod(self, uid: str, version: int, last: Json | None) -> None:
        self._arrived.pop(uid, None)
        self._state.drop_sharepod(uid, version, deleted=last is not None)

    def _put_pod(self, raw: Json) -> None:
        self._state.put_pod(raw)
        if self._arrived:
            pod = self._state.pods.get(str(raw["metadata"]["uid"]))
            if pod is None or pod.tenant is None or pod.waits_for_share:
                return
            arrived = self._arrived.pop(pod.tenant, None)
            if arrived is not None:
                metrics.APPLY_TO_POD_SECONDS.observe(self._clock() - arrived)
