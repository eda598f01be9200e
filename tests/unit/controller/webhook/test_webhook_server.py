"""Webhook server: it answers reviews with the certificate that is trusted. All other input affects only its sender."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import kopf
import pytest
import structlog
import uvloop
from sharepod.controller.handlers import give_claim
from sharepod.controller.webhook import server
from sharepod.controller.webhook.reviews import MOST_PARTS
from sharepod.controller.webhook.server import LARGEST_REVIEW, WebhookServer
from sharepod.web import http_server
from unit.controller.webhook.test_certificates import World

PATIENCE_S = 30.0
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def review(**fields: Any) -> dict[str, Any]:
    """Return a review of a new, empty Pod."""
    pods = {"group": "", "version": "v1", "resource": "pods"}
    return {"request": {"uid": "u", "operation": "CREATE", "resource": pods, "object": {}, **fields}}


REVIEW = json.dumps(review()).encode()


class Asking:
    """API server that trusts the caBundle, and sends reviews."""

    def __init__(self, session: aiohttp.ClientSession, port: int, trust: ssl.SSLContext) -> None:
        self._session = session
        self.port = port
        self._url = f"https://127.0.0.1:{port}/line"
        self.trust = trust

    async def ask(self, content: bytes) -> tuple[int, str]:
        async with self._session.post(self._url, data=content, ssl=self.trust) as answer:
            return answer.status, await answer.text()


@pytest.fixture
def few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the server to 8 connections."""
    monkeypatch.setattr(server, "_OPEN_MAX", 8)


@pytest.fixture
async def asking() -> AsyncIterator[Asking]:
    world = World()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    assert world.server.configuration is not None
    world.server.configuration["webhooks"][0]["clientConfig"] = {"url": f"https://127.0.0.1:{port}/line"}
    world.at = world.now_is()
    keeper = world.keeper()
    await world.settle(keeper)

    async def answer(left: Mapping[str, Any], webhook: str) -> Mapping[str, Any]:
        assert webhook == "line"
        assert left["request"]["operation"] == "CREATE"
        assert "oldObject" not in left["request"]
        return {"response": {"uid": left["request"]["uid"]}}

    serving = WebhookServer(keeper, "127.0.0.1", port)(answer)
    async with asyncio.timeout(PATIENCE_S):
        assert await anext(serving) == {}
    trust = ssl.create_default_context(cadata=b"".join(world.server.bundle).decode())
    async with aiohttp.ClientSession() as session:
        yield Asking(session, port, trust)
    await serving.aclose()


@pytest.mark.promise("operator-line-webhook-certificates")
async def test_a_review_is_answered_over_the_certificate_that_the_bundle_trusts(asking: Asking) -> None:
    status, text = await asking.ask(REVIEW)
    assert (status, text) == (200, '{"response": {"uid": "u"}}')


async def test_an_invalid_review_is_refused_and_the_next_answered(asking: Asking) -> None:
    for content in (b"", b"{", b"[]", b"[" * 100_000, b'{"request": 5}'):
        status, _ = await asking.ask(content)
        assert status == 400
    status, _ = await asking.ask(b" " * (LARGEST_REVIEW + 1))
    assert status == 413
    status, _ = await asking.ask(REVIEW)
    assert status == 200


async def test_an_invalid_review_fills_no_log(asking: Asking) -> None:
    with structlog.testing.capture_logs() as logged:
        for _ in range(20):
            assert (await asking.ask(b"{"))[0] == 400
    assert 1 <= len(logged) < 10


@pytest.mark.promise("operator-line-webhook-bounded")
async def test_what_kopf_would_remember_or_compare_at_length_is_not_shown_to_it(asking: Asking) -> None:
    """Kopf stores a memo for each uid of an object that is not new, and compares Pods in time that grows with
    their size."""
    others: list[dict[str, Any]] = [{"operation": "UPDATE"}, {"subResource": "status"}, {"uid": 5}, {"object": None}]
    for fields in (*others, {"resource": {}}):
        status, _ = await asking.ask(json.dumps(review(**fields)).encode())
        assert status == 400, fields
    containers = [{"name": "c", "resources": {"limits": {"sharepod.dev/gpu-milli": 1}}}] * (MOST_PARTS + 1)
    status, text = await asking.ask(json.dumps(review(object={"spec": {"containers": containers}})).encode())
    assert status == 200
    assert json.loads(text)["response"]["allowed"] is False
    assert "spec.containers" in text


@pytest.mark.promise("operator-line-webhook-bounded")
async def test_a_connection_that_asks_amiss_is_closed(asking: Asking) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", asking.port, ssl=asking.trust)
    head = b"POST /line HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
    async with asyncio.timeout(PATIENCE_S):
        for content, status in ((REVIEW, b"200"), (REVIEW, b"200"), (b"{", b"400")):
            writer.write(head % len(content) + content)
            assert (await reader.readline()).split()[1] == status
            headers = await reader.readuntil(b"\r\n\r\n")
            if status == b"200":
                await reader.readexactly(int(headers.lower().split(b"content-length:")[1].split()[0]))
        await reader.read()
        assert reader.at_eof()
    writer.close()


async def test_a_silent_connection_and_a_slow_review_are_closed(
    asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_WITHIN_S", 0.3)
    monkeypatch.setattr(server, "_READ_S", 0.1)
    async with asyncio.timeout(PATIENCE_S):
        silent, idle = await asyncio.open_connection("127.0.0.1", asking.port, ssl=asking.trust)
        slow, writer = await asyncio.open_connection("127.0.0.1", asking.port, ssl=asking.trust)
        writer.write(b"POST /line HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
        assert b"408" in await slow.readline()
        assert await silent.read() == b""
    idle.close()
    writer.close()


@pytest.mark.promise("operator-kept-crowded")
async def test_on_a_full_port_silent_connections_are_closed_and_pending_reviews_are_answered(
    few_places: None, asking: Asking
) -> None:
    head = b"POST /line HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(REVIEW)
    async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):

        async def connect(address: str, tls: ssl.SSLContext | None) -> Streams:
            streams = await asyncio.open_connection("127.0.0.1", asking.port, ssl=tls, local_addr=(address, 0))
            stack.callback(streams[1].close)
            return streams

        reader, writer = await connect("127.0.0.1", asking.trust)
        writer.write(head + REVIEW[:-1])
        for number in range(12):
            await connect(f"127.0.1.{number + 1}", asking.trust)
            await connect(f"127.0.1.{number + 1}", None)
        assert (await asking.ask(REVIEW))[0] == 200
        writer.write(REVIEW[-1:])
        assert b"200" in await reader.readline()


@pytest.mark.promise("operator-line-webhook")
async def test_kopfs_handler_patches_the_pod_as_the_policy_does() -> None:
    line = {"limits": {"sharepod.dev/gpu-milli": "400"}}
    pod: Any = {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "main", "resources": line}]}}
    patch = kopf.Patch({}, body=kopf.Body(pod))
    await give_claim(body=kopf.Body(pod), patch=patch)
    operations = {one["path"]: one["value"] for one in patch.as_json_patch()}
    assert operations["/metadata/labels"] == {"sharepod.dev/line": "true"}
    assert operations["/spec/resourceClaims"] == [{"name": "sharepod", "resourceClaimTemplateName": "sharepod"}]
    assert operations["/spec/containers/0/resources/claims"] == [{"name": "sharepod"}]


def test_an_operator_without_the_port_loads_nothing_that_makes_certificates() -> None:
    program = (
        "import sys; from kubernetes.aio.client import Configuration; "
        "from sharepod.controller.operator import Operator; "
        "from sharepod.controller.settings import OperatorSettings; "
        "Operator(OperatorSettings(identity='one'), Configuration(host='http://x')); "
        "sys.exit(any(name.startswith('cryptography') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=PATIENCE_S * 2).returncode == 0


@pytest.mark.promise("operator-line-webhook-certificates")
def test_it_answers_on_the_event_loop_that_the_operator_has() -> None:
    async def asked() -> bytes:
        world = World()
        world.at = world.now_is()
        keeper = world.keeper()
        await world.settle(keeper)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])

        async def answer(left: Mapping[str, Any], **_: Any) -> Mapping[str, Any]:
            return {"response": {"uid": left["request"]["uid"]}}

        serving = WebhookServer(keeper, "127.0.0.1", port)(answer)
        trust = ssl.create_default_context(cadata=b"".join(world.server.bundle).decode())
        trust.check_hostname = False
        async with asyncio.timeout(PATIENCE_S):
            await anext(serving)
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
            writer.write(b"POST /line HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(REVIEW) + REVIEW)
            line = await reader.readline()
        writer.close()
        await serving.aclose()
        return line

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(asked()).split()[1] == b"200"
