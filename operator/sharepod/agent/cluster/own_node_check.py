"""Check that the policy on agents is effective: the API server refuses this agent's writes for other nodes.

RBAC lets an agent write the status of every GPUNode and every Lease of its namespace. The admission policy
sharepod-agent-own-node restricts each agent to its own node's objects. If the policy is missing or names another
ServiceAccount, the API server refuses nothing, and only this check detects that.

Guarantees:
- Nothing is written: the check attempts a write as a dry run, with a name that no node has.
- An API server that does not answer gives no verdict.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from sharepod.kube import ApiError, Connection, ForbiddenError, UnavailableError

from .liveness import lease_name
from .status_report import OwnNodeReason, Readiness

log = structlog.get_logger(__name__)

_AGAIN_S = 10.0
"""Seconds until the next check while the policy is not effective. A policy takes effect a second or two after it was
applied."""
_HELD_S = 600.0
"""Seconds until the next check while the policy is effective."""
_NO_NODE = "a.node.that.does.not.exist"
"""Name that no node has, so that the attempt concerns no other agent's Lease."""
_NOT_IN_FORCE = (
    "the API server would let this agent write for other nodes: the policy sharepod-agent-own-node is not installed, "
    "or its matchConditions name another ServiceAccount than the agent's. Apply manifests/policies; if you changed "
    "the namespace or the ServiceAccount, change them in the policy, too"
)


class OwnNodeCheck:
    """Check of one agent. `changed`: called when the verdict has changed."""

    def __init__(self, api: Connection, *, namespace: str, changed: Callable[[], None]) -> None:
        self._api = api
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._changed = changed
        self.verdict = Readiness(OwnNodeReason.NOT_ASKED, "the API server has not been asked yet")

    async def run(self) -> None:
        """Check at intervals, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(_HELD_S if self.verdict.reason is OwnNodeReason.HELD else _AGAIN_S)

    async def look(self) -> None:
        """Try to create a Lease for another node, as a dry run."""
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": lease_name(_NO_NODE)},
            "spec": {},
        }
        try:
            await self._api.call("POST", self._collection, body, query={"dryRun": "All"})
        except ForbiddenError:
            verdict = Readiness(OwnNodeReason.HELD)
        except UnavailableError:
            return
        except ApiError as error:
            verdict = Readiness(OwnNodeReason.NOT_ASKED, f"the API server gives no verdict: {error}")
        else:
            verdict = Readiness(OwnNodeReason.NOT_IN_FORCE, _NOT_IN_FORCE)
        if verdict == self.verdict:
            return
        if verdict.reason is OwnNodeReason.NOT_IN_FORCE:
            log.error("this agent may write for other nodes", why=verdict.message)
        self.verdict = verdict
        self._changed()
