"""Statements: collects the counts of consumed GPU time from GPUNodes, and stores one account per namespace in a
GPUStatement.

Guarantees:
- ST1 one-writer: only the leader writes. Each write names the resourceVersion that the leader has read; if another
  client has written since, the statement is read again.
- ST2 any-step: an operator that dies between any two calls loses nothing. A count that is not yet in a statement is
  still in the GPUNode. A count that is in both is counted once (`budgets.namespace_account`).
- ST3 written-first: an agent may drop a closed series (to which it adds no more) only after the statement that contains
  it is written. The operator deletes a GPUNode only after all its counts are written. Exception: counts that belong
  to an unreadable statement.
- ST4 growing: the totals in metrics never fall while this process lives.
- A statement that cannot be read or written affects only its namespace. All others are read and charged as usual. An
  unreadable statement is never overwritten.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import structlog

from sharepod.api.consumption import TAKEN_IN_ANNOTATION, Consumption
from sharepod.api.objects import API_VERSION
from sharepod.api.statement import STATEMENT_KIND, GPUStatementStatus
from sharepod.budgets.amounts import Amounts
from sharepod.budgets.budget import ConsumedTotal, TotalKey
from sharepod.budgets.charges import Prices, latest_cost
from sharepod.budgets.namespace_account import NamespaceAccount, NodeReading, take_in
from sharepod.budgets.statement_status import account_of, status_of
from sharepod.controller import metrics
from sharepod.controller.apiserver.client import GPUNODES, GPUSTATEMENTS, Client, NotLeadingError
from sharepod.controller.state.facts.node_facts import GpuNodeFacts
from sharepod.controller.state.reading.timestamps import text_of
from sharepod.kube import AlreadyExistsError, ApiError, ConflictError, Json, NotFoundError

ROUND_S = 30.0
"""Seconds between two rounds. Agents report each minute. A thousand namespaces cause at most thirty writes a second."""
_PAGE = 50
"""Statements in one page of a list: 50 of the largest possible have 30 MB."""
_LOOK_S = 1.0
"""Seconds between two checks of `acting` while this process does not act."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _WrittenAccount:
    """Account of a namespace as stored in its statement. `version`: resourceVersion of the statement; None if there is
    no statement.
    """

    account: NamespaceAccount
    version: str | None


class Statements:
    """Writer of the GPUStatements: for each namespace, the GPU time that it consumed and the cost.

    Args:
        client: The API server.
        gpunodes: Returns all GPUNodes.
        acting: Returns True while this process leads and its watches have caught up.
        wall: Time of day in seconds since 1970. A count with a later time gets this time.
        prices: Prices by which the cost in a statement is computed.
    """

    def __init__(
        self,
        client: Client,
        gpunodes: Callable[[], Iterable[GpuNodeFacts]],
        acting: Callable[[], bool],
        wall: Callable[[], float],
        prices: Prices,
    ) -> None:
        self._client = client
        self._gpunodes = gpunodes
        self._acting = acting
        self._wall = wall
        self._prices = prices
        self._written: dict[str, _WrittenAccount] = {}
        self._unreadable: dict[str, str] = {}
        """For each namespace with an unreadable statement: the reason."""
        self._doubtful: set[str] = set()
        """Namespaces whose last write got no answer. Their statements are read before the next write."""
        self._reported: dict[tuple[str, str, str], int] = {}
        """Total that the metric of GPU time shows so far, by (namespace, model, kind)."""
        self._round = asyncio.Lock()
        self._lost = asyncio.Event()
        """Set when leadership is lost: ends the pause, so that the next leadership begins with a round at once."""
        self.complete = False
        """True once all statements have been read since this process began to lead."""

    def totals(self, namespace: str) -> Mapping[str, Amounts]:
        """Return the stored totals of a namespace by model; empty until `complete`."""
        known = self._written.get(namespace)
        return known.account.totals if known is not None else {}

    def namespaces(self) -> tuple[str, ...]:
        """Return the namespaces that have a statement."""
        return tuple(self._written)

    def consumed(self) -> dict[TotalKey, ConsumedTotal] | None:
        """Return the stored totals of each namespace by model; None before they are read."""
        if not self.complete:
            return None
        return {
            (namespace, model): ConsumedTotal(had.held_ms, had.reserved_ms)
            for namespace in self.namespaces()
            for model, had in self.totals(namespace).items()
        }

    def forget(self) -> None:
        """Drop the cached statements: another process may write from now on."""
        self._lost.set()
        self.complete = False
        self._written.clear()
        self._unreadable.clear()
        self._doubtful.clear()

    async def run(self) -> None:
        """Collect the agents' counts every `ROUND_S` until cancelled. The first round starts as soon as this process
        acts."""
        while True:
            if not self._acting():
                await asyncio.sleep(_LOOK_S)
                continue
            await self.take_in(self._gpunodes())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ROUND_S):
                    await self._lost.wait()
            self._lost.clear()

    async def take_in(self, gpunodes: Iterable[GpuNodeFacts]) -> bool:
        """Store the counts of these GPUNodes in statements. Then name the stored closed series to their agents, which
        drop them. Return True if all counts are stored."""
        async with self._round:
            try:
                if not self.complete:
                    await self._read_all()
                nodes = list(gpunodes)
                whole = True
                for namespace, readings in _by_namespace(nodes, self._wall()).items():
                    whole &= await self._take_in(namespace, readings)
                    await asyncio.sleep(0)
                for node in nodes:
                    await self._tell(node)
            except NotLeadingError:
                return False
            except NotFoundError as error:
                log.warning("statements are not kept: the CRD gpustatements is missing; apply crds/", error=str(error))
                return True
            except ApiError as error:
                log.warning("cannot read the statements; trying again", error=str(error))
                return False
            return whole

    async def _read_all(self) -> None:
        await self._client.read_all(GPUSTATEMENTS, limit=_PAGE, take=self._take)
        self.complete = True

    def _take(self, item: Json) -> None:
        namespace = str(item["metadata"]["name"])
        try:
            status = GPUStatementStatus.model_validate(item.get("status") or {}, extra="ignore")
        except ValueError as error:
            if namespace not in self._unreadable:
                log.error(
                    "a statement cannot be read and is left as it is; upgrade the operator, or delete the statement: "
                    "its sums then begin at zero; also delete and create again the GPUBudget of its namespace, which "
                    "otherwise charges nothing until the sums are as large as before",
                    gpustatement=namespace,
                    error=str(error),
                )
            self._unreadable[namespace] = str(error)
            self._written.pop(namespace, None)
            return
        self._unreadable.pop(namespace, None)
        self._keep(namespace, account_of(status), str(item["metadata"]["resourceVersion"]))

    async def _take_in(self, namespace: str, readings: list[NodeReading]) -> bool:
        if namespace in self._unreadable:
            return True  # an unreadable statement is left as it is, and must not keep GPUNodes from being deleted
        if namespace in self._doubtful and not await self._read_again(namespace):
            return False
        known = self._written.get(namespace) or _WrittenAccount(NamespaceAccount(), None)
        account = take_in(known.account, readings, text_of(self._wall())[:7])
        if account is known.account:
            return True
        try:
            version = known.version
            if version is None:
                body = {
                    "apiVersion": API_VERSION,
                    "kind": STATEMENT_KIND,
                    "metadata": {"name": namespace},
                    "spec": {},
                }
                version = str((await self._client.create(GPUSTATEMENTS, body))["metadata"]["resourceVersion"])
            status = status_of(account, latest_cost(account, self._prices)).dump()
            answer = await self._client.patch_status(
                GPUSTATEMENTS, namespace, {"metadata": {"resourceVersion": version}, "status": status}
            )
        except (ConflictError, AlreadyExistsError, NotFoundError):
            self._doubtful.add(namespace)
            await self._read_again(namespace)
            return False
        except NotLeadingError:
            raise
        except ApiError as error:
            log.warning("cannot write a statement; trying again", gpustatement=namespace, error=str(error))
            self._doubtful.add(namespace)
            return False
        self._keep(namespace, account, str(answer["metadata"]["resourceVersion"]))
        return True

    async def _read_again(self, namespace: str) -> bool:
        """Read a statement again. Return True if its account is now known, or the statement does not exist. Return
        False if it is unreadable or the call failed."""
        try:
            self._take(await self._client.get(GPUSTATEMENTS, namespace))
        except NotFoundError:
            self._written.pop(namespace, None)
        except ApiError as error:
            log.warning("cannot read a statement; trying again", gpustatement=namespace, error=str(error))
            return False
        self._doubtful.discard(namespace)
        return namespace not in self._unreadable

    async def _tell(self, node: GpuNodeFacts) -> None:
        """Write the names of the stored closed series into the GPUNode's annotation. The node's agent then drops these
        series.
        """
        closed = [
            entry.series
            for entry in node.status.consumption
            if entry.closed
            and (known := self._written.get(entry.namespace)) is not None
            and known.version is not None
            and known.account.has(entry)
        ]
        if not closed or node.taken_in.issuperset(closed):
            return
        body = {"metadata": {"uid": node.uid, "annotations": {TAKEN_IN_ANNOTATION: ",".join(closed)}}}
        try:
            await self._client.patch_merge(GPUNODES, node.name, body)
        except NotLeadingError:
            raise
        except ApiError as error:
            log.warning("cannot notify an agent of counted series; retrying", node=node.name, error=str(error))

    def _keep(self, namespace: str, account: NamespaceAccount, version: str) -> None:
        self._written[namespace] = _WrittenAccount(account, version)
        for model, amounts in account.totals.items():
            self._count(namespace, model, "held", amounts.held_ms)
            self._count(namespace, model, "borrowed", amounts.borrowed_ms)
            self._count(namespace, model, "reserved", amounts.reserved_ms)
            self._count(namespace, model, "memory", amounts.memory_mib_s)

    def _count(self, namespace: str, model: str, kind: str, now: int) -> None:
        key = (namespace, model, kind)
        more = max(0, now - self._reported.get(key, 0))
        self._reported[key] = max(now, self._reported.get(key, 0))
        if kind == "memory":
            metrics.NAMESPACE_MEMORY_SECONDS.labels(namespace, model).inc(more << 20)
        else:
            metrics.NAMESPACE_GPU_SECONDS.labels(namespace, model, kind).inc(more / 1000)


def _by_namespace(nodes: Iterable[GpuNodeFacts], now_s: float) -> dict[str, list[NodeReading]]:
    """Return the nodes' counts by namespace. A count with a time in the future gets the present time, because future
    months would displace past months of an account."""
    latest = f"{text_of(now_s)[:-1]}.000Z"
    found: dict[str, list[NodeReading]] = {}
    for node in nodes:
        if node.status.consumption_at is None:
            continue
        entries: dict[str, list[Consumption]] = {}
        for entry in node.status.consumption:
            entries.setdefault(entry.namespace, []).append(entry)
        for namespace, own in entries.items():
            reading = NodeReading(node.name, min(node.status.consumption_at, latest), tuple(own))
            found.setdefault(namespace, []).append(reading)
    return found
