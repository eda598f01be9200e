"""Rotation of the webhook's certificates. The leader renews them; every operator process serves the certificate in the
Secret.

Guarantees:
- Nothing is written unless this process leads and both objects exist: the Secret, and the webhook's configuration.
- A new leader continues a renewal that another process has begun, because its whole state is in these two objects.
- Invalid content of these objects never ends the process. A configuration without SharePod's webhook is not changed.
- While the API server is away or the Secret is missing, the last certificate is served. A missing Secret is logged.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import ssl
from collections.abc import Callable

import structlog

from sharepod.api.admission.line_webhook import WEBHOOK_NAME, WEBHOOK_SERVICE
from sharepod.api.objects import PLAIN_PODS_POLICY
from sharepod.controller import metrics
from sharepod.controller.apiserver.client import SECRETS, WEBHOOKS, Client
from sharepod.kube import ConflictError, Json, NotFoundError

from .certificates import Held, Pair, Step, bundle_of, expiry, held, host_of, make_pair, next_step, secret_data, trusted

PERIOD_S = 5.0
"""Seconds between two rounds. Every operator process serves a renewed certificate within this time."""
_LOG_S = 600.0
"""Shortest time in seconds between two log lines about a missing Secret."""

log = structlog.get_logger(__name__)


class CertificateKeeper:
    """Rotation of the webhook's certificates.

    Args:
        client: The API server.
        namespace: The operator's namespace, which contains the Secret and the Service.
        acts: Returns True while this process leads. Called before each write.
        clock: Monotonic seconds.
        now: Time of day.
    """

    def __init__(
        self,
        client: Client,
        namespace: str,
        *,
        acts: Callable[[], bool],
        clock: Callable[[], float],
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._acts = acts
        self._clock = clock
        self._now = now
        self._looked = False
        self._told_at = float("-inf")
        self._served: Pair | None = None
        self._trusted_since: tuple[bytes, float] | None = None
        """(the next certificate, time since which the caBundle contains it)."""
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        """TLS context of the server. It has a certificate once `ready` is set."""
        self.ready = asyncio.Event()

    async def run(self) -> None:
        """Run a round every `PERIOD_S` until cancelled."""
        while True:
            try:
                await self.look()
            except Exception as error:  # an API error, or invalid content of the two objects
                log.warning("cannot check the webhook's certificates", error=repr(error))
            await asyncio.sleep(PERIOD_S)

    async def look(self) -> None:
        """Run one round: load the Secret's certificate and, if this process leads, perform the next step of a renewal.
        Raises `ApiError`.
        """
        try:
            secret = await self._client.get(SECRETS, WEBHOOK_SERVICE, self._namespace)
        except NotFoundError:
            self._looked = True
            self._say_missing()
            return
        metrics.WEBHOOK_SECRET_MISSING.set(0)
        pairs = held(secret)
        if self._acts():
            pairs = await self._renewed(secret, pairs)
        if pairs.serving is not None and pairs.serving != self._served:
            _load(self.context, pairs.serving)
            self._served = pairs.serving
            metrics.WEBHOOK_CERTIFICATE_ENDS.set(expiry(pairs.serving).timestamp())
            self.ready.set()
            log.info("the webhook serves another certificate")
        self._looked = True

    def unready(self) -> str | None:
        """Return why API servers must not call this process yet. None if they may, and if the Secret is missing or has
        no certificate, as waiting would not help then."""
        return None if self._looked else "the certificate of the webhook has not been read"

    def _say_missing(self) -> None:
        metrics.WEBHOOK_SECRET_MISSING.set(1)
        if self._clock() >= self._told_at + _LOG_S:
            self._told_at = self._clock()
            log.error(
                "the Secret of the webhook's certificate is missing: nothing is renewed, an operator that starts has "
                "none, and Pods with a resource line are refused once none serves one. Apply the component "
                "manifests/line-webhook again, or set webhook_port to 0 where it is not used",
                secret=f"{self._namespace}/{WEBHOOK_SERVICE}",
                serves_on=self._served is not None,
            )

    async def _renewed(self, secret: Json, pairs: Held) -> Held:
        """Perform the next step of a renewal, if any. Return the certificate pairs in the Secret after it."""
        try:
            configuration = await self._client.get(WEBHOOKS, PLAIN_PODS_POLICY)
        except NotFoundError:
            return pairs
        ours = _ours(configuration)
        if ours is None:
            return pairs
        number, client = ours
        bundle = trusted(client.get("caBundle"))
        host, trusted_for_s = host_of(client), self._trusted_for_s(pairs, bundle)
        match next_step(pairs, bundle, self._now(), trusted_for_s=trusted_for_s, host=host):
            case Step.MAKE:
                made = make_pair(host, self._now())
                return await self._write(secret, pairs, Held(pairs.serving, made))
            case Step.TRUST:
                await self._trust(configuration, number, bundle_of(pairs, bundle, self._now()))
            case Step.SERVE:
                return await self._write(secret, pairs, Held(pairs.coming, None))
        return pairs

    def _trusted_for_s(self, pairs: Held, bundle: list[bytes]) -> float | None:
        coming = pairs.coming.certificate if pairs.coming is not None else None
        if coming is None or not any(one.strip() == coming.strip() for one in bundle):
            self._trusted_since = None
            return None
        if self._trusted_since is None or self._trusted_since[0] != coming:
            self._trusted_since = (coming, self._clock())
        return self._clock() - self._trusted_since[1]

    async def _write(self, secret: Json, before: Held, after: Held) -> Held:
        metadata = {"uid": secret["metadata"]["uid"], "resourceVersion": secret["metadata"]["resourceVersion"]}
        body: Json = {"metadata": metadata, "data": secret_data(after)}
        try:
            await self._client.patch_merge(SECRETS, WEBHOOK_SERVICE, body, self._namespace)
        except (ConflictError, NotFoundError):
            return before
        return after

    async def _trust(self, configuration: Json, number: int, bundle: str) -> None:
        operations: list[Json] = [
            {"op": "test", "path": "/metadata/resourceVersion", "value": configuration["metadata"]["resourceVersion"]},
            {"op": "add", "path": f"/webhooks/{number}/clientConfig/caBundle", "value": bundle},
        ]
        try:
            await self._client.patch_json(WEBHOOKS, PLAIN_PODS_POLICY, operations)
        except (ConflictError, NotFoundError):
            return
        log.info("the webhook's certificates are in its configuration")


def _ours(configuration: Json) -> tuple[int, Json] | None:
    """Return (index of SharePod's webhook in the configuration, its clientConfig). None if there is none."""
    for number, webhook in enumerate(configuration.get("webhooks") or ()):
        if webhook["name"] == WEBHOOK_NAME:
            return number, webhook["clientConfig"]
    return None


def _load(context: ssl.SSLContext, pair: Pair) -> None:
    """Load a certificate and its key into a context. `ssl` reads only files, so the file is in memory."""
    file = os.memfd_create("webhook")
    try:
        os.write(file, pair.certificate + b"\n" + pair.key)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
