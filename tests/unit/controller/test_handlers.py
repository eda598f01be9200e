"""The operator under `kopf run`, as Kopf's users start it and Kopf's own test kit drives it."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kopf
import pytest
from doubles.apiserver.errors import Refused
from doubles.apiserver.server import ApiServer, api_server
from kopf.testing import KopfRunner
from sharepod.controller import handlers
from unit.scripted_server import kubeconfig

PATIENCE_S = 60
RUN = ["run", "-m", "sharepod.controller.handlers", "--all-namespaces", "--standalone"]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets the operator's environment variables for the API server at a URL."""

    def set_for(url: str, **settings: str) -> None:
        chosen = {
            "KUBECONFIG": str(kubeconfig(tmp_path, url, token="t")),
            "IDENTITY": "operator-0",
            "HEALTH_PORT": "0",
            "METRICS_PORT": "0",
            **settings,
        }
        for name, value in chosen.items():
            monkeypatch.setenv(f"SHAREPOD_{name}", value)

    return set_for


def holder(api: ApiServer) -> str | None:
    """Return the holder of the operator's Lease. None if it was never held."""
    try:
        lease = api.storage.get(api.kind("leases"), "sharepod-system", "sharepod-operator")
    except Refused:
        return None
    return str(lease["spec"]["holderIdentity"])


async def test_kopf_run_starts_the_operator_and_stops_it_with_its_lease_given_up(environment: Any) -> None:
    async with api_server() as api:
        environment(api.url)
        runner = KopfRunner(RUN, timeout=PATIENCE_S)
        with_kopf = await asyncio.to_thread(runner.__enter__)
        try:
            async with asyncio.timeout(PATIENCE_S):
                while holder(api) != "operator-0" or not api.made("watch", "sharepods"):
                    await api.storage.wait(api.storage.version) if holder(api) is None else await asyncio.sleep(0.02)
        finally:
            await asyncio.to_thread(runner.__exit__, None, None, None)
        assert with_kopf.exit_code == 0
        assert holder(api) == ""
        assert api.made("watch", "pods")


async def test_settings_that_are_wrong_end_kopf_at_once_with_what_to_do(environment: Any, tmp_path: Path) -> None:
    environment("http://127.0.0.1:1", KUBECONFIG=str(tmp_path / "nowhere"))
    with pytest.raises(kopf.PermanentError, match="nowhere"):
        await handlers.start(settings=kopf.OperatorSettings(), memo=kopf.Memo())


async def test_the_probe_fails_where_a_restart_can_help() -> None:
    class Ill:
        def healthy(self) -> str:
            raise RuntimeError("the watch of pods has been silent for 61 s")

    with pytest.raises(kopf.PermanentError, match="silent"):
        await handlers.probe(memo=kopf.Memo(operator=SimpleNamespace(health=Ill())))


def test_kopf_waits_for_an_api_server_as_long_as_it_takes() -> None:
    pauses = list(itertools.islice(handlers._BACKOFF, 1000))
    assert max(pauses) == 3.0
