"""Kopf's handlers of the operator, at module level: `kopf run -m sharepod.controller.handlers` runs the operator.

Kopf starts and stops the operator, and calls its login and health handlers. Kopf watches no objects: see
docs/decisions/0021-kopf-without-watches.md. With the webhook enabled, Kopf also answers the API server's reviews of
Pods.

Guarantees:
- The operator starts with Kopf, and releases its Lease and ends before Kopf ends.
- If a part of the operator fails, Kopf ends with a non-zero exit status.
- Kopf waits for an unreachable API server, for any length of time.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import Any

import kopf
import structlog
from kubernetes.aio.client import Configuration

from sharepod.api.admission.line_webhook import BY_CLAIM, BY_VOLUME
from sharepod.api.claims.line_claim import with_claim
from sharepod.api.pods.line_volume import with_volume
from sharepod.backoff import Backoff
from sharepod.kube import configuration

from .operator import Operator
from .settings import load

_BACKOFF = Backoff(0.5, 3.0)
"""Pauses between tries of Kopf's own calls, in seconds: first and longest."""
_EXIT_S = 30
"""Seconds after which Kopf kills a process that does not stop: more than the pod's grace period."""

log = structlog.get_logger(__name__)


@kopf.on.startup()  # type: ignore[untyped-decorator]
async def start(settings: kopf.OperatorSettings, memo: Any, **_: Any) -> None:
    """Start the operator as a separate task."""
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.peering.standalone = True
    settings.networking.request_timeout = 60
    settings.networking.connect_timeout = 10
    settings.networking.error_backoffs = _BACKOFF
    settings.process.ultimate_exiting_timeout = _EXIT_S
    try:
        chosen = load()
        memo.config = await configuration(chosen.kubeconfig)
        memo.operator = Operator(chosen, memo.config)
    except Exception as error:
        memo.failure = error
        raise kopf.PermanentError(str(error)) from error
    if (webhook := memo.operator.webhook()) is not None:
        settings.admission.server = webhook
        memo.runtime_class = chosen.pods().runtime_class
        kopf.on.mutate("", "v1", "pods", id=BY_CLAIM, operations=["CREATE"])(give_claim)
        kopf.on.mutate("", "v1", "pods", id=BY_VOLUME, operations=["CREATE"])(give_volume)
    memo.ending = asyncio.Event()
    memo.running = asyncio.create_task(memo.operator.run(memo.ending), name="operator")
    memo.running.add_done_callback(lambda task: _ended(task, memo))


@kopf.on.cleanup()  # type: ignore[untyped-decorator]
async def stop(memo: Any, **_: Any) -> None:
    """Stop the operator, and wait for its end. Under `kopf run`, raise `kopf.PermanentError` if the operator has
    failed, which makes Kopf's exit status non-zero."""
    memo.ending.set()
    await asyncio.wait([memo.running])
    if (failure := memo.get("failure")) is not None and "stop" not in memo:
        raise kopf.PermanentError(str(failure)) from failure


@kopf.on.login()  # type: ignore[untyped-decorator]
async def log_in(memo: Any, **_: Any) -> kopf.ConnectionInfo:
    """Return the operator's credentials. Kopf calls this again whenever the API server rejects the former ones."""
    config: Configuration = memo.config
    header = await config.get_api_key_with_prefix("BearerToken", alias="authorization")
    scheme, _space, token = (header or "").partition(" ")
    return kopf.ConnectionInfo(
        server=config.host,
        ca_path=config.ssl_ca_cert,
        insecure=not config.verify_ssl,
        scheme=scheme if token else None,
        token=token or scheme or None,
        certificate_path=config.cert_file,
        private_key_path=config.key_file,
    )


@kopf.on.probe(id="operator")  # type: ignore[untyped-decorator]
async def probe(memo: Any, **_: Any) -> str:
    """Return whether the operator leads or stands by, for the health probe. Raise `kopf.PermanentError` if a restart
    can help."""
    try:
        return str(memo.operator.health.healthy())
    except RuntimeError as error:
        log.error("unhealthy", why=str(error))
        raise kopf.PermanentError(str(error)) from error


async def give_claim(body: kopf.Body, patch: kopf.Patch, **_: Any) -> None:
    """Add to a new Pod with a resource line the claim through which its share is attached."""
    patch.update(with_claim(body))


async def give_volume(body: kopf.Body, patch: kopf.Patch, memo: Any, **_: Any) -> None:
    """Add to a new Pod with a resource line the CSI volume through which its share is attached."""
    patch.update(with_volume(body, memo.runtime_class))


def _ended(task: asyncio.Task[None], memo: Any) -> None:
    """Record the error that ended the operator, if any. Stop Kopf, unless it was Kopf that stopped the operator."""
    if task.cancelled() or memo.ending.is_set():
        memo.failure = None if task.cancelled() else task.exception()
        return
    memo.failure = task.exception()
    if (stopping := memo.get("stop")) is not None:
        stopping.set()
    elif threading.current_thread() is threading.main_thread():
        signal.raise_signal(signal.SIGTERM)
