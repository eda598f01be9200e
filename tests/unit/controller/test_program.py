"""The operator as a program, with Kopf, against the API server double: it acts, ends and fails in order."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from doubles.apiserver.kinds import KINDS, Kind
from doubles.apiserver.server import ApiServer, api_server
from unit.logging_program import LoggingProgram

_PROGRAM = """
import os, pwd
def unknown(uid): raise KeyError(f"uid not found: {uid}")
pwd.getpwuid = unknown
for name in ("LOGNAME", "USER", "LNAME", "USERNAME"): os.environ.pop(name, None)
from sharepod.controller.main import main
main()
"""
"""Runs the operator as the user of a pod, which is missing in /etc/passwd."""
_OPERATOR = ("-c", _PROGRAM)
_LEASES: Kind = next(kind for kind in KINDS if kind.plural == "leases")


async def _started(folder: Path, url: str, **changes: str) -> LoggingProgram:
    """Start an operator for the API server at `url`."""
    kubeconfig = folder / "kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    kubeconfig.write_text(json.dumps(config))
    settings = {
        "SHAREPOD_KUBECONFIG": str(kubeconfig),
        "SHAREPOD_IDENTITY": "operator-0",
        "SHAREPOD_BIND_ADDRESS": "127.0.0.1",
        "SHAREPOD_HEALTH_PORT": "0",
        "SHAREPOD_METRICS_PORT": "0",
    } | changes
    return await LoggingProgram.run(*_OPERATOR, settings=settings, without="SHAREPOD_")


@contextlib.asynccontextmanager
async def _running(folder: Path, url: str, **changes: str) -> AsyncIterator[LoggingProgram]:
    program = await _started(folder, url, **changes)
    try:
        yield program
    finally:
        await program.end(signal.SIGKILL)


async def test_it_acts_until_it_is_told_to_end_then_gives_its_lease_up(tmp_path: Path) -> None:
    async with api_server() as api, _running(tmp_path, api.url) as program:
        acting = await program.logged("acting")
        assert acting["logger"] == "sharepod.controller.operator"
        assert (acting["sharepods"], acting["nodes"]) == (0, 0)
        lease = api.storage.get(_LEASES, "sharepod-system", "sharepod-operator")
        assert lease["spec"]["holderIdentity"] == "operator-0"
        program.process.send_signal(signal.SIGTERM)
        assert await program.ended() == 0, program.log
        lease = api.storage.get(_LEASES, "sharepod-system", "sharepod-operator")
        assert lease["spec"]["holderIdentity"] == ""
        assert {line["event"] for line in program.log} >= {"leading", "acting", "stopping"}
        assert all({"event", "level", "logger", "timestamp"} <= line.keys() for line in program.log)


async def test_a_part_that_fails_ends_it_and_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        async with api_server() as api, _running(tmp_path, api.url, SHAREPOD_METRICS_PORT=port) as program:
            assert await program.ended() == 1
            assert program.log[-1]["event"] == "operator cannot continue"
            assert program.log[-1]["error"].startswith("metrics failed: ")


@pytest.mark.promise("operator-standby")
async def test_a_standby_is_warm_and_takes_over_without_listing_again(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    async with api_server() as api, _running(tmp_path / "one", api.url) as leader:
        await leader.logged("acting")
        changes = {"SHAREPOD_IDENTITY": "operator-1", "SHAREPOD_LOG_LEVEL": "debug"}
        async with _running(tmp_path / "two", api.url, **changes) as standby:
            await standby.logged("listed", times=9)
            listed = _lists(api)
            leader.process.send_signal(signal.SIGTERM)
            assert await leader.ended() == 0
            acting = await standby.logged("acting")
            assert acting["sharepods"] == 0
            assert _lists(api) == listed
            lease = api.storage.get(_LEASES, "sharepod-system", "sharepod-operator")
            assert lease["spec"]["holderIdentity"] == "operator-1"


def _lists(api: ApiServer) -> int:
    """Return the number of lists of watched kinds so far. The check before a watch lists one object, and does not
    count; nor do statements and placeholders, which are read without a watch."""
    lists = [call for call in api.calls if call.verb == "list" and call.query["limit"] != "1"]
    others = ("gpustatements", "sharepod.dev/placeholder")
    return len([call for call in lists if not {call.kind.plural, call.query.get("labelSelector")} & {*others}])
