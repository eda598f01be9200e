"""Reads of the API server through one `kubectl proxy`: refusals, failures, and the end of the proxy. A script stands in
kubectl's place and answers on the socket that it is asked to serve."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
from kubectl_sharepod import kubectl as calls
from kubectl_sharepod.kubectl import ForbiddenError, Kubectl, KubectlError, NotFoundError, at_once

CLI = Path(calls.__file__).parents[1]
_PROXY = """\
import os, pathlib, socket, sys
here = pathlib.Path(__file__).parent
(here / "pids").open("a").write(f"{os.getpid()} ")
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[-1].removeprefix("--unix-socket="))
listener.listen()
print("Starting to serve on", sys.argv[-1], flush=True)
while True:
    link, _ = listener.accept()
    path = link.recv(4096).split()[1].decode()
    link.sendall((here / "answer").read_bytes().replace(b"PATH", path.encode()))
    link.close()
"""


def script(folder: Path, text: str) -> str:
    """Return the path of an executable script in kubectl's place."""
    program = folder / "kubectl"
    program.write_text(text)
    program.chmod(0o755)
    return str(program)


@contextmanager
def answering(folder: Path, status: str, body: str) -> Iterator[Kubectl]:
    """Context manager: a kubectl whose proxy answers every read in this way."""
    (folder / "answer").write_text(f"HTTP/1.0 {status}\r\nContent-Type: application/json\r\n\r\n{body}")
    with closing(Kubectl(program=script(folder, f"#!{sys.executable}\n{_PROXY}"))) as kubectl:
        yield kubectl


def runs(pid: str) -> bool:
    """Return whether a process exists and is no zombie, which its parent has not yet noticed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ended(pid: str) -> bool:
    """Return whether a process ends within ten seconds."""
    ends = time.monotonic() + 10
    while runs(pid) and time.monotonic() < ends:
        time.sleep(0.01)
    return not runs(pid)


def test_all_reads_of_a_command_take_one_proxy_which_ends_with_it(tmp_path: Path) -> None:
    with answering(tmp_path, "200 OK", '{"path": "PATH"}') as kubectl:
        found = at_once(*(lambda number=number: kubectl.get(f"/{number}") for number in range(8)))
        folder = kubectl._proxy._folder
        assert folder.stat().st_mode & 0o777 == 0o700
    assert found == [{"path": f"/{number}"} for number in range(8)]
    (pid,) = (tmp_path / "pids").read_text().split()
    assert ended(pid)
    assert not folder.exists()


def test_the_proxy_of_a_killed_command_ends(tmp_path: Path) -> None:
    with answering(tmp_path, "200 OK", "{}"):
        reads = (
            "from kubectl_sharepod.kubectl import Kubectl\n"
            f"kubectl = Kubectl(program={str(tmp_path / 'kubectl')!r})\n"
            "kubectl.get('/')\n"
            "print(kubectl._proxy._folder, flush=True)\n"
            "input()"
        )
        command = [sys.executable, "-c", reads]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=CLI) as plugin:
            assert plugin.stdout is not None
            folder = Path(plugin.stdout.readline().strip())
            plugin.send_signal(signal.SIGKILL)
    (pid,) = (tmp_path / "pids").read_text().split()
    assert ended(pid)
    ends = time.monotonic() + 10
    while folder.exists() and time.monotonic() < ends:
        time.sleep(0.01)
    assert not folder.exists()


def test_a_proxy_that_ended_is_replaced_before_the_next_read(tmp_path: Path) -> None:
    with answering(tmp_path, "200 OK", "{}") as kubectl:
        kubectl.get("/")
        (pid,) = (tmp_path / "pids").read_text().split()
        os.kill(int(pid), signal.SIGKILL)
        assert ended(pid)
        with pytest.raises(KubectlError, match=r"kubectl failed: .*refused"):
            kubectl.get("/")
        assert kubectl.get("/") == {}


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (
            "403 Forbidden",
            json.dumps({"reason": "Forbidden", "message": "gpunodes is forbidden"}),
            ForbiddenError,
            r"^Error from server \(Forbidden\): gpunodes is forbidden$",
        ),
        (
            "404 Not Found",
            json.dumps({"reason": "NotFound", "message": 'pods "a" not found'}),
            NotFoundError,
            r'^Error from server \(NotFound\): pods "a" not found$',
        ),
        ("404 Not Found", "404 page not found", NotFoundError, "could not find the requested resource"),
        ("401 Unauthorized", json.dumps({"reason": "Unauthorized"}), KubectlError, "logged in to the server"),
        (
            "500 Internal Server Error",
            "dial tcp 127.0.0.1:1:\033[1m refused",
            KubectlError,
            r"^Unable to connect to the server: dial tcp 127.0.0.1:1: \[1m refused$",
        ),
        ("200 OK", "[1", KubectlError, "is no JSON object"),
        ("200 OK", "[1]", KubectlError, "is no JSON object"),
    ],
)
def test_a_refused_or_unreadable_answer_is_an_error_of_its_kind(
    tmp_path: Path, status: str, body: str, kind: type[KubectlError], message: str
) -> None:
    with answering(tmp_path, status, body) as kubectl, pytest.raises(kind, match=message) as caught:
        kubectl.get("/apis")
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("#!/bin/sh\nprintf 'error: login failed: \\377' >&2\nexit 1\n", "^login failed"),
        ("#!/bin/sh\nexit 1\n", "kubectl proxy ended"),
        ("#!/bin/sh\necho Starting to serve\nexec sleep 60\n", "kubectl failed: .*No such file"),
        (
            "#!/bin/sh\nprintf 'open \\033[1mhttps://login\\033[0m' >&2\nexec sleep 60\n",
            r"within 0.5 s; its last output: open  \[1mhttps://login \[0m$",
        ),
    ],
)
def test_a_proxy_that_does_not_serve_is_an_error_with_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.setattr(calls, "TIMEOUT_S", 0.5)
    with closing(Kubectl(program=script(tmp_path, text))) as kubectl, pytest.raises(KubectlError, match=message):
        kubectl.get("/version")


@pytest.mark.parametrize("read", [partial(Kubectl.get, path="/apis"), Kubectl.namespace])
def test_a_missing_kubectl_is_an_error_that_says_what_to_do(tmp_path: Path, read: Callable[[Kubectl], object]) -> None:
    with closing(Kubectl(program=str(tmp_path / "none"))) as kubectl, pytest.raises(KubectlError, match="install"):
        read(kubectl)
