"""Brings what Kopf watches into the model.

Guarantees: handlers are `on.event` handlers only, so that Kopf writes nothing to any object; they wait for nothing.
Kopf hides the end of a list and sends no DELETED for what vanished in a gap, so each gap it lets be seen (objects
listed anew) calls for a list of our own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kopf
from kubernetes.aio.client import Configuration

from sharepod.api.objects import GROUP, POOL_LABEL, TENANT_LABEL, VERSION
from sharepod.controller.state.cluster_state import ClusterState

_PAGE = 500


class _NoDiffBase(kopf.DiffBaseStorage):  # type: ignore[misc]
    """Kopf works out for every event what has changed since it was last handled, which only its other handlers use,
    and which is most of what an event costs. Nothing is stored, nothing is compared.
    """

    def build(self, **_: Any) -> dict[str, Any]:
        return {}

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None


class _NoProgress(kopf.ProgressStorage):  # type: ignore[misc]
    """Handlers of events have no progress to keep."""

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
    """Kopf's registry with our handlers. `login` gives its credentials; `gap` is called for each object listed anew;
    `healthy` says how it goes, or raises.
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
    """Kopf's settings: it watches, and does nothing else."""
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
    """What Kopf needs of our way to the API server; asked again whenever the API server no longer takes it."""
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
