"""`kubectl sharepod trace`: it reads through a forwarded port, with a token of a separate ServiceAccount."""

from __future__ import annotations

import json
import sys
import threading
from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from kubectl_sharepod.kubectl import Json, Kubectl, KubectlError
from kubectl_sharepod.program import seconds
from kubectl_sharepod.trace import trace

from .fleet import UUIDS, Memory, cluster
from .test_commands import printed

EVENTS = [
    {"ph": "X", "pid": 1, "tid": 0, "name": "team/train", "ts": 0, "dur": 750_000},
    {"ph": "X", "pid": 1, "tid": 0, "name": "idle", "ts": 750_000, "dur": 250_000},
    {"ph": "X", "pid": 1, "tid": 1, "name": "holds", "ts": 0, "dur": 750_000},
]
AGENT: Json = {
    "metadata": {"namespace": "sharepod-system", "name": "agent-x", "creationTimestamp": "2026-01-01T00:00:00Z"},
    "spec": {"containers": [{"ports": [{"name": "metrics", "containerPort": 9437}]}]},
    "status": {"phase": "Running"},
}


@dataclass(frozen=True)
class Forwarding(Memory):
    """kubectl of a cluster in memory that forwards to a port of this machine."""

    port: int = 0

    def token(self, namespace: str, account: str) -> str:
        return f"token of {namespace}/{account}"

    @contextmanager
    def forwarded(self, namespace: str, pod: str, port: int) -> Iterator[int]:
        assert (namespace, pod, port) == ("sharepod-system", "agent-x", 9437)
        yield self.port


@pytest.fixture
def asked() -> Iterator[tuple[int, list[tuple[str, str | None]]]]:
    """Serve an agent that answers each request with a trace. It refuses a second concurrent request."""
    seen: list[tuple[str, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append((self.path, self.headers["Authorization"]))
            refused = self.path.endswith("seconds=1.0")
            self.send_response(400 if refused else 200)
            self.end_headers()
            self.wfile.write(b"too short\n" if refused else json.dumps({"traceEvents": EVENTS}).encode())

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port, seen
    server.shutdown()
    server.server_close()
    thread.join()


def with_agent(port: int, **agent: Json) -> Forwarding:
    known = cluster().objects | {"/api/v1/namespaces/sharepod-system/pods": {"items": [AGENT | agent]}}
    return Forwarding(objects=known, port=port)


def test_trace_writes_a_file_and_shows_where_the_time_went(
    asked: tuple[int, list[tuple[str, str | None]]], tmp_path: Path
) -> None:
    port, seen = asked
    target = tmp_path / "trace.json"
    lines = printed(trace(with_agent(port), "node-a:0", 5.0, target)).splitlines()
    assert json.loads(target.read_text()) == {"traceEvents": EVENTS}
    assert seen == [(f"/trace?gpu={UUIDS[0]}&seconds=5.0", "Bearer token of sharepod-system/sharepod-trace")]
    assert lines[0].startswith(f"{target}: 1.0 s; open it at https://ui.perfetto.dev")
    assert [line.split() for line in lines[2:]] == [["team/train", "0.750", "75.0%"], ["idle", "0.250", "25.0%"]]


def test_trace_says_what_keeps_it_from_the_agent(
    asked: tuple[int, list[tuple[str, str | None]]], tmp_path: Path
) -> None:
    port, _ = asked
    target = tmp_path / "trace.json"
    with pytest.raises(KubectlError, match="the agent refuses the trace: too short"):
        trace(with_agent(port), "node-a:0", 1.0, target)
    with pytest.raises(KubectlError, match="no agent runs on node node-a"):
        trace(with_agent(port, status={"phase": "Pending"}), "node-a:0", 5.0, target)
    with pytest.raises(KubectlError, match="no port named metrics"):
        trace(with_agent(port, spec={}), "node-a:0", 5.0, target)
    with pytest.raises(KubectlError, match="name another file by --file"):
        trace(with_agent(port), "node-a:0", 5.0, tmp_path)


def test_lengths_are_seconds() -> None:
    assert seconds("10s") == seconds("10") == 10
    for wrong in ("ten", "5m", "0", "0.0s", "nan", "inf", "1e9", "-5s", ""):
        with pytest.raises(ArgumentTypeError, match="write one such as 10s"):
            seconds(wrong)


def test_a_forwarded_port_is_that_of_kubectl_and_ends_with_the_command(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    program = tmp_path / "kubectl"
    program.write_text(
        f"#!{sys.executable}\nimport os, pathlib, sys, time\npathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\n"
        "print('Forwarding from 127.0.0.1:4242 -> 9437', flush=True)\ntime.sleep(60)\n"
    )
    program.chmod(0o755)
    with Kubectl(program=str(program)).forwarded("n", "pod", 9437) as port:
        assert port == 4242
        assert Path(f"/proc/{pid.read_text()}").exists()
    assert not Path(f"/proc/{pid.read_text()}").exists()
    program.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('Error from server (Forbidden): no')\n")
    with pytest.raises(KubectlError, match="Forbidden"), Kubectl(program=str(program)).forwarded("n", "pod", 1):
        pass
