"""Renewal of the webhook's certificates: trusted and served certificates, and the order of the steps."""

from __future__ import annotations

import asyncio
import base64
import datetime
import ssl
from pathlib import Path
from typing import Any

import pytest
import yaml
from sharepod.api.admission.line_webhook import WEBHOOK_NAME
from sharepod.controller import metrics
from sharepod.controller.webhook import certificate_keeper
from sharepod.controller.webhook.certificate_keeper import CertificateKeeper
from sharepod.controller.webhook.certificates import (
    LIFE,
    TRUSTED_S,
    Held,
    Step,
    bundle_of,
    held,
    host_of,
    make_pair,
    next_step,
    secret_data,
    trusted,
)
from sharepod.kube import ConflictError, Json, NotFoundError
from structlog.testing import capture_logs

BEGAN = datetime.datetime(2026, 11, 25, tzinfo=datetime.UTC)
DAY = datetime.timedelta(days=1)


class _Server:
    """API server with the Secret and the webhook's configuration. `history`: the trusted certificates and the Secret
    after each write."""

    def __init__(self) -> None:
        self.secret: Json | None = {"metadata": {"uid": "s", "resourceVersion": "1"}}
        self.configuration: Json | None = {
            "metadata": {"resourceVersion": "1"},
            "webhooks": [{"name": WEBHOOK_NAME, "clientConfig": {"service": {"name": "w", "namespace": "system"}}}],
        }
        self.writes: list[str] = []

    async def get(self, resource: Any, _name: str, _namespace: str | None = None) -> Json:
        found = self.secret if resource.plural == "secrets" else self.configuration
        if found is None:
            raise NotFoundError("GET", 404, "NotFound", "none")
        return found

    async def patch_merge(self, _resource: Any, _name: str, body: Json, _namespace: str) -> Json:
        assert self.secret is not None
        if body["metadata"]["resourceVersion"] != self.secret["metadata"]["resourceVersion"]:
            raise ConflictError("PATCH", 409, "Conflict", "another")
        data = {**self.secret.get("data", {}), **body["data"]}
        version = str(int(self.secret["metadata"]["resourceVersion"]) + 1)
        self.secret = {
            "metadata": {"uid": "s", "resourceVersion": version},
            "data": {name: value for name, value in data.items() if value is not None},
        }
        self.writes.append("secret")
        return self.secret

    async def patch_json(self, _resource: Any, _name: str, operations: list[Json]) -> Json:
        assert self.configuration is not None
        test, add = operations
        if test["value"] != self.configuration["metadata"]["resourceVersion"]:
            raise ConflictError("PATCH", 409, "Conflict", "another")
        number = int(add["path"].split("/")[2])
        self.configuration["webhooks"][number]["clientConfig"]["caBundle"] = add["value"]
        self.configuration["metadata"] = {"resourceVersion": str(int(test["value"]) + 1)}
        self.writes.append("trust")
        return self.configuration

    @property
    def bundle(self) -> list[bytes]:
        assert self.configuration is not None
        ours = [one for one in self.configuration.get("webhooks", ()) if one["name"] == WEBHOOK_NAME]
        return trusted(ours[0]["clientConfig"].get("caBundle")) if ours else []


class World:
    """One or more keepers of certificates over one API server, on clocks that the test sets."""

    def __init__(self) -> None:
        self.server = _Server()
        self.seconds = 0.0
        self.at = BEGAN
        self.leads = True

    @staticmethod
    def now_is() -> datetime.datetime:
        """Return the time of day, for certificates that a client checks today."""
        return datetime.datetime.now(datetime.UTC)

    def keeper(self, *, leads: bool = True) -> CertificateKeeper:
        client: Any = self.server
        return CertificateKeeper(
            client, "system", acts=lambda: leads and self.leads, clock=lambda: self.seconds, now=lambda: self.at
        )

    async def settle(self, *keepers: CertificateKeeper) -> None:
        """Let keepers run as often as a renewal needs. At each moment the served certificate must be trusted (W1)."""
        for _ in range(8):
            for keeper in keepers:
                await keeper.look()
                assert keeper._served is None or keeper._served.certificate in self.server.bundle
            self.seconds += TRUSTED_S / 2


@pytest.mark.promise("operator-line-webhook-certificates")
async def test_a_certificate_is_made_trusted_and_then_served_by_all() -> None:
    world = World()
    leader, standby = world.keeper(), world.keeper(leads=False)
    await world.settle(standby, leader)
    assert world.server.writes == ["secret", "trust", "secret"], "made, trusted, served"
    assert leader.ready.is_set()
    assert standby._served == leader._served is not None
    assert leader.context.cert_store_stats() is not None
    assert isinstance(leader.context, ssl.SSLContext)


@pytest.mark.promise("operator-line-webhook-certificates")
async def test_it_is_renewed_while_a_third_of_its_life_is_left_and_another_leader_goes_on_with_it() -> None:
    world = World()
    first, second = world.keeper(), world.keeper()
    await world.settle(first)
    before = first._served
    world.at = BEGAN + LIFE * 0.6
    await world.settle(first)
    assert first._served == before, "not yet"
    assert metrics.WEBHOOK_CERTIFICATE_ENDS._value.get() == (BEGAN + LIFE).timestamp()
    world.at = BEGAN + LIFE * 0.7
    await first.look()  # this keeper creates the next certificate, and dies
    assert first._served == before
    await world.settle(second)
    assert second._served not in (None, before)
    assert len(world.server.bundle) == 2, "the former one is still served by others"
    world.at = BEGAN + LIFE * 1.4
    await world.settle(second)
    assert before is not None
    assert before.certificate not in world.server.bundle, "it has ended"


@pytest.mark.promise("operator-line-webhook-certificates")
async def test_a_removed_certificate_is_written_again() -> None:
    world = World()
    keeper = world.keeper()
    await world.settle(keeper)
    served = keeper._served
    assert world.server.configuration is not None
    world.server.configuration["webhooks"][0]["clientConfig"].pop("caBundle")
    await keeper.look()
    assert served is not None
    assert world.server.bundle == [served.certificate]
    world.server.secret = {"metadata": {"uid": "s", "resourceVersion": "9"}, "data": {"tls.crt": "bm9uZQ=="}}
    await world.settle(keeper)
    assert keeper._served not in (None, served), "a Secret that holds nothing is filled again"


@pytest.mark.promise("operator-line-webhook-certificates")
async def test_a_configuration_without_our_webhook_is_left_alone_and_one_that_stands_elsewhere_is_found() -> None:
    world = World()
    assert world.server.configuration is not None
    ours = world.server.configuration.pop("webhooks")
    await world.settle(world.keeper())
    world.server.configuration["webhooks"] = []
    await world.settle(world.keeper())
    assert world.server.writes == []
    other: Json = {"name": "other", "clientConfig": {"url": "https://elsewhere"}}
    world.server.configuration["webhooks"] = [other, *ours]
    keeper = world.keeper()
    await world.settle(keeper)
    assert keeper.ready.is_set()
    assert "caBundle" not in other["clientConfig"]


@pytest.mark.promise("operator-line-webhook-certificates")
async def test_api_servers_that_ask_by_another_name_get_a_certificate_of_it() -> None:
    world = World()
    keeper = world.keeper()
    await world.settle(keeper)
    before = keeper._served
    assert world.server.configuration is not None
    client = world.server.configuration["webhooks"][0]["clientConfig"]
    del client["service"]
    client["url"] = "https://127.0.0.1:9444/line"
    await world.settle(keeper)
    assert keeper._served not in (None, before)
    writes = len(world.server.writes)
    await world.settle(keeper)
    assert len(world.server.writes) == writes, "once"


async def test_what_stands_in_the_secret_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    await world.settle(world.keeper())
    tries: list[object] = []

    def load(*files: object) -> None:
        tries.append(files)
        raise ssl.SSLError("key too small")

    monkeypatch.setattr(certificate_keeper, "PERIOD_S", 0.0)
    monkeypatch.setattr(certificate_keeper, "_load", load)
    running = asyncio.create_task(world.keeper().run())
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(tries) > 1
    running.cancel()


@pytest.mark.promise("operator-line-webhook-rollout")
async def test_an_operator_that_serves_no_certificate_which_others_do_is_not_ready() -> None:
    world = World()
    keeper = world.keeper(leads=False)
    await keeper.look()
    assert keeper.unready() is None, "there is none: the leader makes it"
    await world.settle(world.keeper())
    keeper = world.keeper(leads=False)
    assert keeper.unready() is not None
    await keeper.look()
    assert keeper.ready.is_set()
    assert keeper.unready() is None
    world.server.secret = None
    keeper = world.keeper(leads=False)
    await keeper.look()
    assert keeper.unready() is None, "without the manifests there is nothing to wait for"


@pytest.mark.promise("operator-line-webhook-rollout")
def test_api_servers_ask_no_operator_that_starts_or_ends() -> None:
    folder = Path(__file__).resolve().parents[4] / "manifests" / "line-webhook"
    service = yaml.safe_load((folder / "service.yaml").read_text())
    assert not service["spec"].get("publishNotReadyAddresses")
    deployment = yaml.safe_load((folder / "operator.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["lifecycle"]["preStop"]["sleep"]["seconds"] > 0


async def test_nothing_is_written_without_leading_or_without_the_manifests() -> None:
    world = World()
    standby = world.keeper(leads=False)
    await world.settle(standby)
    world.server.configuration = None
    await world.settle(world.keeper())
    world.server.secret = None
    await world.settle(world.keeper())
    assert world.server.writes == []
    assert not standby.ready.is_set()


@pytest.mark.promise("operator-line-webhook-secret")
async def test_a_missing_secret_is_reported_and_the_former_certificate_served() -> None:
    world = World()
    keeper = world.keeper()
    await world.settle(keeper)
    served, kept = keeper._served, world.server.secret
    assert metrics.WEBHOOK_SECRET_MISSING._value.get() == 0
    world.server.secret = None
    with capture_logs() as lines:
        for _ in range(3):
            await keeper.look()
    assert [(line["log_level"], line["secret"], line["serves_on"]) for line in lines] == [
        ("error", "system/sharepod-webhook", True)
    ]
    assert metrics.WEBHOOK_SECRET_MISSING._value.get() == 1
    assert keeper._served is served
    world.server.secret = kept
    await keeper.look()
    assert metrics.WEBHOOK_SECRET_MISSING._value.get() == 0
    with capture_logs() as lines:
        world.server.secret = None
        world.seconds += 600
        await world.keeper(leads=False).look()
    assert [line["serves_on"] for line in lines] == [False], "a starting process has none to serve"


def test_the_host_is_the_services_or_the_urls() -> None:
    assert host_of({"service": {"name": "a", "namespace": "b"}}) == "a.b.svc"
    assert host_of({"url": "https://127.0.0.1:9444/line"}) == "127.0.0.1"
    assert b"BEGIN CERTIFICATE" in make_pair("127.0.0.1", BEGAN).certificate


@pytest.mark.promise("operator-line-webhook-certificates")
def test_a_certificate_is_trusted_for_a_while_before_it_is_served_the_first_too() -> None:
    former, coming = make_pair("h", BEGAN), make_pair("h", BEGAN)
    for serving in (None, former):
        pairs, bundle = Held(serving, coming), [former.certificate, coming.certificate]
        assert next_step(pairs, bundle[:1], BEGAN, trusted_for_s=None) is Step.TRUST
        for seconds in (None, 0.0, TRUSTED_S - 0.1):
            assert next_step(pairs, bundle, BEGAN, trusted_for_s=seconds) is Step.NONE
        assert next_step(pairs, bundle, BEGAN, trusted_for_s=TRUSTED_S) is Step.SERVE


@pytest.mark.promise("operator-line-webhook-certificates")
def test_a_certificate_of_a_clock_that_was_ahead_is_served_by_nobody_before_it_has_begun() -> None:
    former, ahead = make_pair("h", BEGAN), make_pair("h", BEGAN + 2 * DAY)
    both = [former.certificate, ahead.certificate]
    assert next_step(Held(former, ahead), both, BEGAN, trusted_for_s=TRUSTED_S) is Step.NONE
    assert next_step(Held(None, ahead), both, BEGAN, trusted_for_s=TRUSTED_S) is Step.MAKE
    assert next_step(Held(former, ahead), both, BEGAN + DAY, trusted_for_s=TRUSTED_S) is Step.SERVE
    hours = make_pair("h", BEGAN + DAY / 2)
    assert next_step(Held(former, hours), [*both, hours.certificate], BEGAN, trusted_for_s=TRUSTED_S) is Step.SERVE


def test_an_unreadable_secret_counts_as_absent() -> None:
    pair, other = make_pair("h", BEGAN), make_pair("h", BEGAN)
    whole = secret_data(Held(pair, None))
    assert held({"data": whole}) == Held(pair, None)
    mixed = {**whole, "tls.key": base64.b64encode(other.key).decode()}
    der = bytearray(base64.b64decode(b"".join(pair.certificate.split(b"\n")[1:-2])))
    der[der.index(b"\xa0\x03\x02\x01\x02") + 4] = 9  # a version that X.509 does not define
    strange = b"-----BEGIN CERTIFICATE-----\n" + base64.encodebytes(der) + b"-----END CERTIFICATE-----\n"
    assert held({"data": {**whole, "tls.crt": base64.b64encode(strange).decode()}}) == Held(None, None)
    assert strange not in trusted(bundle_of(Held(pair, None), [strange], BEGAN))
    for secret in ({}, {"data": None}, {"data": {"tls.crt": 5}}, {"data": {"tls.crt": "%"}}, {"data": mixed}):
        assert held(secret) == Held(None, None)
    assert trusted(None) == []
    assert trusted("%") == []
    assert next_step(Held(None, None), [], BEGAN, trusted_for_s=None) is Step.MAKE


def test_a_bundle_keeps_what_lives_and_is_bounded() -> None:
    pair = make_pair("h", BEGAN)
    others = [make_pair("h", BEGAN - DAY * number).certificate for number in range(20)]
    found = trusted(bundle_of(Held(pair, None), [b"none", *others], BEGAN))
    assert len(found) == 16
    assert found[-1] == pair.certificate
