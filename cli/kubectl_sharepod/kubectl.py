"""Calls of kubectl. Connection, credentials and proxy come from the user's kubeconfig.

Guarantees:
- Each call that returns output ends within `TIMEOUT_S`.
- Each kind of refusal by the API server has an error type of its own, which contains the server's message.
- Messages have no characters that control a terminal.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from typing import Any, NoReturn, TypeVar
from urllib.parse import quote

from kubectl_sharepod.proxy import Proxy, ProxyError

Json = dict[str, Any]
_Read = TypeVar("_Read")
_Other = TypeVar("_Other")

TIMEOUT_S = 20
"""Longest duration of one call in seconds. kubectl ends its own request after three quarters of it."""
GROUP = "/apis/sharepod.dev/v1alpha1"


class KubectlError(Exception):
    """Failure of a call. The message comes from kubectl, or advises what to do."""


class UsageError(KubectlError):
    """Invalid arguments of the command."""


class ForbiddenError(KubectlError):
    """Refusal because the user has no right to make the call."""


class ConflictError(KubectlError):
    """Refusal of a write because the object has changed since it was read."""


class NotFoundError(KubectlError):
    """Absence of an object, or a kind that the API server does not serve."""


@dataclass(frozen=True)
class Kubectl:
    """Caller of kubectl. `flags`: flags of its connection, such as `--context`."""

    flags: tuple[str, ...] = ()
    program: str = "kubectl"

    def namespace(self) -> str:
        """Return the namespace of the kubeconfig's context. Raise `KubectlError`."""
        try:
            found = self._output(["config", "view", "--minify", "--output", "jsonpath={..namespace}"])
        except KubectlError as error:
            if "current-context must exist" not in str(error):
                raise
            raise KubectlError("the kubeconfig has no current context; set KUBECONFIG, or add --context") from None
        return found.strip() or "default"

    def start(self) -> None:
        """Start the proxy that reads, unless it has started. Raise `KubectlError` without kubectl."""
        try:
            self._proxy.start()
        except OSError as error:
            raise self._missing(error) from None

    def get(self, path: str) -> Json:
        """Return the object or list at a path of the API server. Raise `KubectlError`."""
        self.start()
        try:
            status, body = self._proxy.get(path, TIMEOUT_S)
        except ProxyError as error:
            raise _error_of(str(error)) from None
        try:
            found = json.loads(body)
        except ValueError:
            found = None
        if status != HTTPStatus.OK:
            raise _refusal(status, found if isinstance(found, dict) else {"message": body.decode(errors="replace")})
        if not isinstance(found, dict):
            raise KubectlError(f"the API server's answer to {path} is no JSON object")
        return found

    def close(self) -> None:
        """End the proxy that reads."""
        self._proxy.close()

    def items(self, path: str) -> list[Json]:
        """Return the objects of a list. The API server may answer from its cache. Raise `KubectlError`."""
        separator = "&" if "?" in path else "?"
        found = self.get(f"{path}{separator}resourceVersion=0").get("items")
        return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []

    def logs(self, namespace: str, part: str, lines: int) -> str:
        """Return the last lines of the logs of SharePod's operator or of its agents. Raise `KubectlError`."""
        select = f"app.kubernetes.io/name=sharepod-{part}"
        flags = ["--prefix", f"--tail={lines}", "--all-containers", "--max-log-requests=50", "--ignore-errors"]
        return self._output(["logs", "--namespace", namespace, "--selector", select, *flags])

    def merge(self, resource: str, namespace: str, name: str, patch: Json) -> None:
        """Change an object by a JSON merge patch. Raise `KubectlError`."""
        self._patch("merge", resource, namespace, name, patch)

    def edit(self, resource: str, namespace: str, name: str, steps: Sequence[Json]) -> None:
        """Change an object by a JSON patch, whose steps `test` refuse it as a whole. Raise `KubectlError`."""
        self._patch("json", resource, namespace, name, steps)

    def _patch(self, kind: str, resource: str, namespace: str, name: str, patch: Json | Sequence[Json]) -> None:
        self._output(["patch", resource, name, "--namespace", namespace, "--type", kind, "--patch", json.dumps(patch)])

    def evict(self, namespace: str, pod: str) -> None:
        """Evict a Pod, if its PodDisruptionBudgets allow this now. Raise `KubectlError`."""
        metadata = {"name": pod, "namespace": namespace}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
        where = f"{path('pods', namespace, pod, group='/api/v1')}/eviction"
        self._output(["create", "--raw", where, "--filename", "-"], given=json.dumps(body))

    def token(self, namespace: str, account: str) -> str:
        """Return a token of a ServiceAccount, valid for ten minutes. Raise `KubectlError`."""
        return self._output(["create", "token", account, "--namespace", namespace, "--duration", "10m"]).strip()

    @contextmanager
    def forwarded(self, namespace: str, pod: str, port: int) -> Iterator[int]:
        """Forward a port of a Pod while the block lasts. Yield the local port. Raise `KubectlError`."""
        command = [self.program, *self.flags, "port-forward", "--namespace", namespace, f"pod/{pod}", f":{port}"]
        try:
            forwarding = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                encoding="utf-8", errors="replace",
            )  # fmt: skip
        except OSError as error:
            raise self._missing(error) from None
        with forwarding:
            ends = threading.Timer(TIMEOUT_S, forwarding.kill)
            ends.start()
            try:
                assert forwarding.stdout is not None and forwarding.stderr is not None  # noqa: PT018
                match = _FORWARDED.match(forwarding.stdout.readline())
                if match is None:
                    raise _error_of(forwarding.stderr.read().strip() or "kubectl port-forward ended or did not answer")
                yield int(match.group(1))
            finally:
                ends.cancel()
                forwarding.kill()

    def become(self, arguments: Sequence[str]) -> NoReturn:
        """Replace this process by kubectl with these arguments. Raise `KubectlError` if kubectl cannot be run."""
        try:
            os.execvp(self.program, [self.program, *self.flags, *arguments])  # noqa: S606 - the user's own kubectl
        except OSError as error:
            raise self._missing(error) from None

    @cached_property
    def _proxy(self) -> Proxy:
        return Proxy((self.program, *self.flags))

    def _output(self, arguments: Sequence[str], given: str = "") -> str:
        try:
            done = subprocess.run(
                [self.program, *self.flags, *arguments],
                input=given,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            output = printable((error.stderr or b"").decode(errors="replace")).strip()  # bytes, despite `encoding`
            waited = f"kubectl {arguments[0]} did not answer within {TIMEOUT_S} s"
            raise KubectlError(f"{waited}; its last output: {output}" if output else waited) from None
        except OSError as error:
            raise self._missing(error) from None
        if done.returncode == 0:
            return done.stdout
        raise _error_of(done.stderr.strip() or f"kubectl {arguments[0]} failed with exit status {done.returncode}")

    def _missing(self, error: OSError) -> KubectlError:
        return KubectlError(f"cannot run {self.program}: {error.strerror}; install kubectl, or add it to PATH")


UNKNOWN_KIND = "could not find the requested resource"
"""Part of kubectl's message for a kind that the API server does not serve."""
_ERRORS: dict[str, type[KubectlError]] = {
    "(Forbidden)": ForbiddenError,
    "(NotFound)": NotFoundError,
    "(Conflict)": ConflictError,
    "the object has been modified": ConflictError,
    UNKNOWN_KIND: NotFoundError,
}
"""Error type by a part of kubectl's message."""
_FORWARDED = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+) ")


def _error_of(message: str) -> KubectlError:
    kind = next((error for word, error in _ERRORS.items() if word in message), KubectlError)
    return kind(printable(message.removeprefix("error: ")))


def _refusal(code: int, status: Json) -> KubectlError:
    """Return the error for an answer of the API server or, from 500 on, of the proxy, in kubectl's words."""
    message, reason = str(status.get("message", "")).strip(), status.get("reason")
    if code == HTTPStatus.UNAUTHORIZED:
        return KubectlError("You must be logged in to the server (Unauthorized)")
    if code == HTTPStatus.NOT_FOUND and not reason:  # the API server knows no such group
        reason, message = "NotFound", f"the server {UNKNOWN_KIND}"
    if not reason:
        return KubectlError(f"Unable to connect to the server: {printable(message)}")
    return _error_of(f"Error from server ({reason}): {message}")


def printable(text: str) -> str:
    """Return a text without characters that control a terminal, except ends of lines."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in text)


def path(plural: str, namespace: str | None = None, name: str | None = None, *, group: str = GROUP) -> str:
    """Return the path of an object, or of a list if `name` is None. `namespace`: None: all namespaces, or a
    cluster-scoped kind."""
    parts = [group, *(["namespaces", _quoted(namespace)] if namespace else []), plural]
    return "/".join([*parts, *([_quoted(name)] if name else [])])


def _quoted(name: str) -> str:
    """Return a name, escaped as one segment of a path. Raise `UsageError` for a name that no object has, because
    kubectl would resolve `..` and slashes to another path. An argument may contain bytes that are no text."""
    if name in (".", "..") or "/" in name or "%" in name:
        raise UsageError(f"{name!r} is no name of an object: it is `.` or `..`, or has a slash or a percent sign")
    return quote(name, safe="", errors="surrogateescape")


def both(first: Callable[[], _Read], second: Callable[[], _Other]) -> tuple[_Read, _Other]:
    """Return the results of two reads that run at the same time."""
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.submit(first), threads.submit(second)
        return one.result(), other.result()


def at_once(*reads: Callable[[], _Read]) -> list[_Read]:
    """Return the results of several reads that run at the same time, in the order of the arguments."""
    with ThreadPoolExecutor(len(reads)) as threads:
        return [future.result() for future in [threads.submit(read) for read in reads]]
