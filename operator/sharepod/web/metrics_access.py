"""Access to `/metrics` and `/trace`: the API server identifies a client's token, and decides what it may read.

As in Kubernetes' own components: a TokenReview, then a SubjectAccessReview. A reader of metrics may `get` the path. A
reader of traces may `get` GPUNodes, which name the tenants of all namespaces as traces do.

Guarantees:
- A decision is remembered for `_ALLOWED_S` or `_DENIED_S`. Only the hash of a token is stored.
- The API server is asked about unknown tokens at most `_REVIEWS_PER_S` times a second, and a fifth of that for one
  address. Clients that send the same token share one review.
- Unknown tokens neither delay nor displace clients that were allowed before.
- While the API server is away, clients that were allowed within the last `_STALE_S` still are.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from aiohttp import web

from sharepod.rate_limit import RateLimiter

Review = Callable[[str, dict[str, Any]], Awaitable[Mapping[str, Any]]]
"""Function that creates an object at a path of the API server and returns the stored object. Raises one of
`Reviews.failures`."""

TOKEN_REVIEWS: Final = "/apis/authentication.k8s.io/v1/tokenreviews"  # noqa: S105  a path
ACCESS_REVIEWS: Final = "/apis/authorization.k8s.io/v1/subjectaccessreviews"

TRACE_PATH: Final = "/trace"

_ALLOWED_S, _DENIED_S, _STALE_S = 60.0, 10.0, 600.0
_REVIEWS_PER_S, _REVIEWS_AT_ONCE = 5.0, 20.0
_REVIEWS_EACH_PER_S, _REVIEWS_EACH_AT_ONCE = 1.0, 4.0
"""Limit on reviews for one address: per second, and at once. So a program that invents tokens does not use up the
reviews that a reader with a new token needs."""
_ADDRESSES = 1024
"""Most client addresses that are remembered, the latest ones."""
_REMEMBERED = 256
"""Most tokens whose decision is remembered, the latest ones."""
_TOKEN_MAX = 16_384
"""Most characters of a token; a longer one is refused."""


class MetricsAccess(StrEnum):
    """Readers of `/metrics`."""

    TOKEN = "Token"  # noqa: S105  a word of the settings
    """Clients with a token that may `get` the path `/metrics`, by the API server."""
    OPEN = "Open"
    """Every client that reaches the port."""


@dataclass(frozen=True, slots=True)
class Reviews:
    """Access to the API server's reviews. `failures`: errors of `create` if the API server gives no answer."""

    create: Review
    failures: tuple[type[Exception], ...]


@dataclass(frozen=True, slots=True)
class _Right:
    """Right that a reader needs. `attributes`: of the SubjectAccessReview; `role`: a ClusterRole that grants it, for
    the message."""

    name: str
    attributes: Mapping[str, Any]
    role: str


_TRACES = _Right(
    "gpunodes.sharepod.dev",
    {"resourceAttributes": {"verb": "get", "group": "sharepod.dev", "resource": "gpunodes"}},
    "sharepod-gpunode-view",
)


@dataclass(frozen=True, slots=True)
class _Verdict:
    status: int
    """HTTP status of the answer; 200: the client is allowed."""
    text: str
    at: float
    """Monotonic seconds of the decision."""


class MetricsGuard:
    """Guard that decides who may read `path`, and `TRACE_PATH` if that is served."""

    def __init__(
        self, reviews: Reviews, *, path: str = "/metrics", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._reviews = reviews
        own = {"nonResourceAttributes": {"path": path, "verb": "get"}}
        self._metrics = _Right(path, own, "sharepod-metrics-reader")
        self._clock = clock
        self._limiter = RateLimiter(clock(), per_s=_REVIEWS_PER_S, burst=_REVIEWS_AT_ONCE)
        self._addresses: OrderedDict[str, RateLimiter] = OrderedDict()
        self._known: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._asking: dict[bytes, asyncio.Future[_Verdict]] = {}

    async def refusal(self, request: web.BaseRequest) -> web.Response | None:
        """Return the answer for a client that may not read; None if it may."""
        right = _TRACES if request.path == TRACE_PATH else self._metrics
        scheme, _space, token = request.headers.get("Authorization", "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token or len(token) > _TOKEN_MAX or not token.isascii():
            text = f"send a token that may get {right.name}: bind the ClusterRole {right.role} to its owner"
            return web.Response(status=401, text=f"{text}\n", headers={"WWW-Authenticate": "Bearer"})
        key = hashlib.sha256(f"{right.name} {token}".encode()).digest()
        verdict = await self._verdict(key, token, right, request.remote or "")
        return None if verdict.status == 200 else web.Response(status=verdict.status, text=f"{verdict.text}\n")

    async def _verdict(self, key: bytes, token: str, right: _Right, address: str) -> _Verdict:
        now = self._clock()
        known = self._known.get(key)
        if known is not None and now - known.at < (_ALLOWED_S if known.status == 200 else _DENIED_S):
            self._known.move_to_end(key)
            return known
        if (asked := self._asking.get(key)) is not None:
            return await asyncio.shield(asked)
        allowed = known is not None and known.status == 200 and now - known.at < _STALE_S
        if not allowed and not (self._limiter_of(address, now).take(now) and self._limiter.take(now)):
            return _Verdict(429, "too many unknown tokens; try again", now)
        answer = self._asking[key] = asyncio.get_running_loop().create_future()
        verdict = _Verdict(503, "asking the API server was cancelled", now)
        try:
            verdict = await self._ask(token, right)
            self._remember(key, verdict)
        except self._reviews.failures as error:
            away = _Verdict(503, f"the API server cannot be asked who may read this: {error}", now)
            verdict = known if known is not None and allowed else away
        finally:
            del self._asking[key]
            answer.set_result(verdict)
        return verdict

    async def _ask(self, token: str, right: _Right) -> _Verdict:
        answer = await self._reviews.create(
            TOKEN_REVIEWS,
            {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}},
        )
        status = answer.get("status") or {}
        if not status.get("authenticated"):
            return _Verdict(401, "the API server does not know this token", self._clock())
        user = status.get("user") or {}
        spec = {
            "user": user.get("username") or "",
            "uid": user.get("uid") or "",
            "groups": user.get("groups") or [],
            "extra": user.get("extra") or {},
            **right.attributes,
        }
        answer = await self._reviews.create(
            ACCESS_REVIEWS,
            {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec},
        )
        if (answer.get("status") or {}).get("allowed"):
            return _Verdict(200, "", self._clock())
        text = f"{spec['user']} may not get {right.name}: bind the ClusterRole {right.role} to it"
        return _Verdict(403, text, self._clock())

    def _limiter_of(self, address: str, now: float) -> RateLimiter:
        limiter = self._addresses.pop(address, None) or RateLimiter(
            now, per_s=_REVIEWS_EACH_PER_S, burst=_REVIEWS_EACH_AT_ONCE
        )
        self._addresses[address] = limiter
        if len(self._addresses) > _ADDRESSES:
            self._addresses.popitem(last=False)
        return limiter

    def _remember(self, key: bytes, verdict: _Verdict) -> None:
        self._known.pop(key, None)
        self._known[key] = verdict
        if len(self._known) > _REMEMBERED:
            refused = next((known for known, each in self._known.items() if each.status != 200), None)
            del self._known[next(iter(self._known)) if refused is None else refused]
