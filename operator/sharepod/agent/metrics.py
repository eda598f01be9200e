"""`/metrics` for Prometheus and `/healthz` for the kubelet.

Values are read when they are asked for, at most once a second however many ask; nothing is counted twice.
"""

from __future__ import annotations

import asyncio
import math
from http import HTTPStatus

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest

from .collector import AgentCollector
from .core import Agent
from .http import Answer, HttpServer

CACHED_S = 1.0


def serve(agent: Agent) -> HttpServer:
    """Serves on the address of the settings. Raises `OSError` if it is taken."""
    registry = CollectorRegistry()
    registry.register(AgentCollector(agent))
    ProcessCollector(registry=registry)

    kept, kept_at = b"", -math.inf

    def metrics() -> Answer:
        nonlocal kept, kept_at
        now = asyncio.get_running_loop().time()
        if now - kept_at >= CACHED_S:
            kept, kept_at = generate_latest(registry), now
        return Answer(HTTPStatus.OK, kept, CONTENT_TYPE_LATEST)

    def healthz() -> Answer:
        trouble = agent.unhealthy()
        if trouble is not None:
            return Answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{trouble}\n".encode())
        return Answer(HTTPStatus.OK, b"ok\n")

    return HttpServer(agent.settings.http_bind, agent.settings.http_port, {"/metrics": metrics, "/healthz": healthz})
