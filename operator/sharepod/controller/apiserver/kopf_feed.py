"""Feed of the cluster state from the watches that Kopf runs.

Guarantees:
- All handlers are `on.event` handlers, so Kopf writes nothing to any object. They wait for nothing.
- Every gap in a watch is followed by a full list of the operator's own. Kopf hides the end of a list and sends no
  DELETED for an object that vanished in a gap; but it marks the objects that it lists again, and each calls `gap`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kopf
from kubernetes.aio.client import Configuration

from sharepod.api.objects import GROUP, POOL_LABEL, TENANT_LABEL, VERSION
from sharepod.controller.state.cluster_state import ClusterState

_PAGE = 500
"""Objects in one page of Kopf's lists; kube-apiserver's own clients use the same."""


class _NoDiffBase(kopf.DiffBaseStorage):  # type: ignore[misc]
    """Storage of Kopf's diffs that stores and compares nothing.

    Kopf works out for every event what has changed since the last one. Only its other handlers use that, and it is most
    of what an event costs.
    """

    def build(self, **_: Any) -> dict[str, Any]:
        return {}

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None


class _NoProgress(kopf.ProgressStorage):  # type: ignore[misc]
    """Storage of Kopf's progress that stores nothing: handlers of events have none."""

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None

    def purge(self, **_: Any) -> None:
        return None

    def touch(self, **_: Any) -> None:
        return None

    def clear(self, *, essence: Any) -> Any:
        return essence


def registry(state: ClusterState, login: Callable[[], Any], gap: Callable[[], None], healthy: Callable[[], str]) -> Any:
    """Return Kopf's registry with the operator's handlers.

    Args:
        state: Where events go.
        login: Returns an awaitable of Kopf's credentials.
        gap: Called for each object that was listed again after a gap.
        healthy: Returns a word for the health probe, or raises.
    """
    found = kopf.OperatorRegistry()

    @kopf.on.login(registry=found)  # type: ignore[untyped-decorator]
    async def log_in(**_: Any) -> Any:
        return await login()

    @kopf.on.probe(registry=found, id="operator")  # type: ignore[untyped-decorator]
    async def probe(**_: Any) -> str:
        return healthy()

    def follow(put: Callable[[Any], None], drop: Callable[[Any], None]) -> Callable[..., Any]:
        async def handle(event: Any, **_: Any) -> None:
            if event["type"] == "DELETED":
                drop(event["object"])
                return
            if event["type"] is None:
                gap()
            put(event["object"])

        return handle

    def uid(drop: Callable[[str], None]) -> Callable[[Any], None]:
        return lambda raw: drop(str(raw["metadata"]["uid"]))

    def drop_pod(raw: Any) -> None:
        state.drop_pod(str(raw["metadata"]["uid"]), raw)

    def drop_node(raw: Any) -> None:
        state.drop_node(str(raw["metadata"]["uid"]), int(raw["metadata"]["resourceVersion"]))

    watched = (
        ((GROUP, VERSION, "sharepods"), state.put_sharepod, uid(state.drop_sharepod)),
        ((GROUP, VERSION, "gpunodes"), state.put_gpunode, uid(state.drop_gpunode)),
        (("", "v1", "nodes"), state.put_node, drop_node),
        (("", "v1", "pods"), state.put_pod, drop_pod),
    )
    for selector, put, drop in watched:
        kopf.on.event(*selector, id=selector[2], registry=found)(follow(put, drop))
    return found


def settings() -> Any:
    """Return Kopf's settings: it watches and does nothing else."""
    found = kopf.OperatorSettings()
    found.posting.enabled = False
    found.scanning.disabled = True
    found.peering.standalone = True
    found.execution.default_backoff = 5
    found.networking.request_timeout = 60
    found.networking.connect_timeout = 10
    found.networking.error_backoffs = (0.5, 1, 1, 2, 2, 3, 3, 5, 5, 5)
    found.watching.chunk_size = _PAGE
    found.watching.connect_timeout = 10
    found.watching.label_selectors["v1", "nodes"] = POOL_LABEL
    found.watching.label_selectors["v1", "pods"] = TENANT_LABEL
    found.queueing.exit_timeout = 1
    found.persistence.diffbase_storage = _NoDiffBase()
    found.persistence.progress_storage = _NoProgress()
    found.process.ultimate_exiting_timeout = 30
    return found


async def credentials(config: Configuration) -> Any:
    """Return Kopf's credentials; asked for again whenever the API server rejects the former ones."""
    header = await config.get_api_key_with_prefix("BearerToken", alias="authorization")
    scheme, _, token = (header or "").partition(" ")
    return kopf.ConnectionInfo(
        server=config.host,
        ca_path=config.ssl_ca_cert,
        insecure=not config.verify_ssl,
        scheme=scheme if token else None,
        token=token or scheme or None,
        certificate_path=config.cert_file,
        private_key_path=config.key_file,
    )
