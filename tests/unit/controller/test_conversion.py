"""The conversion server as an API server meets it: over TLS, on kept connections, with bounds."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from doubles import second_version
from harness.certs import Authority, KeyPair
from sharepod.api.versions.kind_versions import VERSIONS
from sharepod.controller import conversion
from sharepod.controller.conversion import LARGEST_REVIEW, ServingCertificate, conversions_of, serve_conversions
from sharepod.controller.settings import OperatorSettings

HOST = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class Serving:
    """Running conversion server with its certificate's files."""

    def __init__(self, authority: Authority, pair: KeyPair, port: int) -> None:
        self.authority = authority
        self.pair = pair
        self.url = f"https://{HOST}:{port}/convert"
        self.port = port

    def client(self) -> aiohttp.ClientSession:
        trust = ssl.create_default_context(cafile=str(self.authority.certificate))
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust))

    async def up(self) -> None:
        """Wait until it listens."""
        async with asyncio.timeout(20):
            while True:
                with suppress(OSError):
                    _reader, writer = await asyncio.open_connection(HOST, self.port)
                    writer.close()
                    return
                await asyncio.sleep(0.01)

    async def serial(self) -> bytes | None:
        """Return the certificate that a new connection is shown; None if there is none."""
        trust = ssl.create_default_context(cafile=str(self.authority.certificate))
        try:
            _reader, writer = await asyncio.open_connection(HOST, self.port, ssl=trust)
        except OSError:
            return None
        tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
        shown = tls.getpeercert(binary_form=True)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        return shown


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Serving]:
    authority = Authority(folder / "pki")
    pair = authority.issue("conversion", "conversion", addresses=[HOST])
    port = free_port()
    certificate = ServingCertificate(pair.certificate, pair.key)
    task = asyncio.create_task(serve_conversions(HOST, port, second_version.kinds(), certificate))
    served = Serving(authority, pair, port)
    try:
        await served.up()
        yield served
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def review(name: str = "train", pad: int = 0) -> dict[str, Any]:
    item = {
        "apiVersion": "sharepod.dev/v1alpha1",
        "kind": "SharePod",
        "metadata": {"name": name, "namespace": "team"},
        "spec": {"gpu": {"request": 0.4}, "pad": "x" * pad},
    }
    request = {"uid": name, "desiredAPIVersion": "sharepod.dev/v1test", "objects": [item]}
    return {"apiVersion": "apiextensions.k8s.io/v1", "kind": "ConversionReview", "request": request}


async def test_reviews_are_answered_on_kept_connections_however_many_come(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.client() as session:

        async def ask(number: int) -> str:
            async with session.post(served.url, json=review(f"n{number}")) as answer:
                assert answer.headers.get("Connection") != "close"
                return str((await answer.json())["response"]["convertedObjects"][0]["metadata"]["name"])

        assert await asyncio.gather(*(ask(number) for number in range(300))) == [f"n{number}" for number in range(300)]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"\xff\xfe", 400),
        (b"[" * 200_000, 400),
        (b'{"kind": "AdmissionReview"}', 400),
        (json.dumps(review(pad=LARGEST_REVIEW)).encode(), 413),
    ],
)
async def test_what_is_no_review_is_refused_and_the_next_one_answered(tmp_path: Path, body: bytes, status: int) -> None:
    async with serving(tmp_path) as served, served.client() as session:
        async with session.post(served.url, data=io.BytesIO(body)) as answer:
            assert answer.status == status
        async with session.post(served.url, json=review()) as answer:
            assert (await answer.json())["response"]["result"] == {"status": "Success"}


@pytest.mark.promise("operator-conversion-deep")
@pytest.mark.parametrize("depth", [100, 400, 900, 9_000])
@pytest.mark.parametrize("where", ["metadata", "spec"])
async def test_an_object_that_nests_deep_hinders_no_other_one(tmp_path: Path, where: str, depth: int) -> None:
    body = json.dumps(review("a"))
    one = json.dumps(review("a")["request"]["objects"][0])
    nested = f'"{where}": {{"deep": {"[" * depth}{"]" * depth}, '
    deep = one.replace(f'"{where}": {{', nested.replace("deep", "managedFields") if where == "metadata" else nested)
    assert deep != one
    async with (
        serving(tmp_path) as served,
        served.client() as session,
        session.post(served.url, data=body.replace(one, f"{one}, {deep}").encode()) as answer,
    ):
        assert answer.status == 200
        text = await answer.text()
    text = text.replace("[" * depth + "]" * depth, "null")
    response = json.loads(text)["response"]
    assert response["result"] == {"status": "Success"}
    assert [item["apiVersion"] for item in response["convertedObjects"]] == ["sharepod.dev/v1test"] * 2


async def test_clients_that_say_nothing_or_send_slowly_are_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sharepod.web.http_server._WITHIN_S", 0.3)
    monkeypatch.setattr(conversion, "_READ_S", 0.1)
    async with serving(tmp_path) as served, asyncio.timeout(20):
        trust = ssl.create_default_context(cafile=str(served.authority.certificate))
        silent, _writer = await asyncio.open_connection(HOST, served.port, ssl=trust)
        slow, writer = await asyncio.open_connection(HOST, served.port, ssl=trust)
        writer.write(b"POST /convert HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert b"408" in await slow.readline()
        assert await silent.read() == b""


@pytest.mark.promise("operator-kept-crowded")
async def test_connections_that_ask_nothing_make_room_for_an_api_server_and_never_for_who_asks_nothing_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "_OPEN_MAX", 8)
    body = json.dumps(review()).encode()
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(serving(tmp_path))
        await stack.enter_async_context(asyncio.timeout(20))
        trust = ssl.create_default_context(cafile=str(served.authority.certificate))

        async def connect(address: str, tls: ssl.SSLContext | None) -> asyncio.StreamWriter:
            _reader, writer = await asyncio.open_connection(HOST, served.port, ssl=tls, local_addr=(address, 0))
            stack.callback(writer.close)
            return writer

        reader, writer = await asyncio.open_connection(HOST, served.port, ssl=trust)
        stack.callback(writer.close)
        writer.write(b"POST /convert HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body))
        writer.write(body[:-1])
        for number in range(12):
            await connect(f"127.0.1.{number + 1}", trust)
            await connect(f"127.0.1.{number + 1}", None)
        async with served.client() as session, session.post(served.url, json=review()) as answer:
            assert answer.status == 200
        writer.write(body[-1:])
        assert b"200" in await reader.readline()


async def stalls(served: Serving, address: str, body: bytes, *, all_but: int) -> asyncio.StreamWriter:
    """Send a review from an address, all but so many of its bytes, and read no answer."""
    trust = ssl.create_default_context(cafile=str(served.authority.certificate))
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    raw.bind((address, 0))
    raw.connect((HOST, served.port))
    _reader, writer = await asyncio.open_connection(sock=raw, ssl=trust, server_hostname=HOST, limit=1 << 16)
    writer.write(b"POST /convert HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body))
    writer.write(body[: len(body) - all_but])
    return writer


@pytest.mark.promise("operator-conversion-bounded")
@pytest.mark.parametrize("all_but", [1, 0], ids=["they are not sent", "their answers are not read"])
async def test_large_reviews_of_one_address_wait_for_each_other_and_for_nobody_elses(
    tmp_path: Path, all_but: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "_SLOW_STEPS", 10**9)
    large = json.dumps(review(pad=LARGEST_REVIEW - 4096)).encode()
    async with serving(tmp_path) as served, served.client() as session, asyncio.timeout(60):
        stalled = [await stalls(served, "127.0.0.2", large, all_but=all_but) for _ in range(2)]
        async with session.post(served.url, data=io.BytesIO(large)) as answer:
            assert answer.status == 200, "another address is answered"
        same = aiohttp.TCPConnector(
            ssl=ssl.create_default_context(cafile=str(served.authority.certificate)), local_addr=("127.0.0.2", 0)
        )
        async with aiohttp.ClientSession(connector=same) as session_of_same:
            async with session_of_same.post(served.url, json=review()) as answer:
                assert answer.status == 200, "a small review of the same address is answered"
            waits = asyncio.create_task(session_of_same.post(served.url, data=io.BytesIO(large)))
            await asyncio.wait([waits], timeout=1)
            assert not waits.done(), "only two large ones of an address are held at a time"
            for writer in stalled:
                writer.transport.abort()
            assert (await waits).status == 200


@pytest.mark.promise("operator-conversion-bounded")
async def test_large_reviews_that_do_not_arrive_keep_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Enough addresses to take all room announce them."""
    monkeypatch.setattr(conversion, "_STEP_S", 0.02)
    monkeypatch.setattr(conversion, "_ROOM_S", 4.0)  # well before connections are closed that were never answered
    large = json.dumps(review(pad=LARGEST_REVIEW - 4096)).encode()
    async with serving(tmp_path) as served, served.client() as session, asyncio.timeout(60):
        stalled = [
            await stalls(served, f"127.0.0.{number % 5 + 2}", large, all_but=len(large) - 70_000)
            for number in range(40)
        ]
        async with session.post(served.url, data=io.BytesIO(large)) as answer:
            assert answer.status == 200
        for writer in stalled:
            writer.transport.abort()


async def test_a_large_review_that_arrives_slowly_is_answered_while_no_other_one_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "_STEP_S", 0.001)

    async def slowly() -> AsyncIterator[bytes]:
        large = json.dumps(review(pad=2 * conversion.SMALL)).encode()
        for start in range(0, len(large), 1 << 14):
            yield large[start : start + (1 << 14)]
            await asyncio.sleep(0.005)

    async with (
        serving(tmp_path) as served,
        served.client() as session,
        session.post(served.url, data=slowly()) as answer,
    ):
        assert answer.status == 200


@pytest.mark.promise("operator-conversion-bounded")
async def test_large_reviews_that_are_held_are_bounded_in_all_and_small_ones_always_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conversion, "_ROOM_S", 0.05)
    held = conversion.HeldBytes()
    async with AsyncExitStack() as holding:
        for number in range(conversion.HELD // LARGEST_REVIEW):
            await holding.enter_async_context(held.holding(f"address-{number // 2}", LARGEST_REVIEW))
            if number == 1:
                with pytest.raises(TimeoutError):
                    await holding.enter_async_context(held.holding("address-0", LARGEST_REVIEW))
        with pytest.raises(TimeoutError):
            await holding.enter_async_context(held.holding("another", conversion.SMALL + 1))
        for _ in range(600):
            await holding.enter_async_context(held.holding("another", conversion.SMALL))
        monkeypatch.setattr(conversion, "_ROOM_S", 30.0)
        waits = asyncio.create_task(holding.enter_async_context(held.holding("address-0", LARGEST_REVIEW)))
        await asyncio.sleep(0)
        assert not waits.done()
        await asyncio.sleep(0)
        waits.cancel()
    async with held.holding("address-0", LARGEST_REVIEW), held.holding("address-0", LARGEST_REVIEW):
        pass


async def test_a_renewed_certificate_is_served_and_a_broken_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "_REREAD_S", 0.05)
    async with serving(tmp_path) as served, asyncio.timeout(30):
        first = await served.serial()
        served.authority.issue("conversion", "conversion", addresses=[HOST])  # into the same files
        while (second := await served.serial()) in (None, first):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        served.pair.certificate.write_bytes(b"-----BEGIN CERTIFICATE-----\nnonsense")
        await asyncio.sleep(0.3)
        assert await served.serial() == second


async def test_without_a_certificate_nothing_listens_until_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "_REREAD_S", 0.05)
    port = free_port()
    certificate = ServingCertificate(tmp_path / "pki" / "late.crt", tmp_path / "pki" / "late.key")
    task = asyncio.create_task(serve_conversions(HOST, port, second_version.kinds(), certificate))
    try:
        await asyncio.sleep(0.2)
        with pytest.raises(OSError):
            await asyncio.open_connection(HOST, port)
        authority = Authority(tmp_path / "pki")
        pair = authority.issue("late", "conversion", addresses=[HOST])
        served = Serving(authority, pair, port)
        await served.up()
        assert await served.serial() is not None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.promise("install-no-webhook")
@pytest.mark.parametrize(("second", "port", "served"), [(False, 1, False), (True, 0, False), (True, 1, True)])
async def test_it_is_served_where_there_is_a_second_version_and_a_port(
    tmp_path: Path, second: bool, port: int, served: bool
) -> None:
    settings = OperatorSettings(
        conversion_port=port, conversion_certificate=tmp_path / "tls.crt", conversion_key=tmp_path / "tls.key"
    )
    part = conversions_of(settings, second_version.kinds() if second else VERSIONS)
    assert (part is not None) == served
    if part is not None:
        part.close()
