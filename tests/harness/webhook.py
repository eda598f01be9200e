"""Validating webhook of a third party on a test cluster, for one namespace: it allows, fails, or does not answer.

Guarantees: the webhook is effective from the start of the `with` block, and deleted at its end. Reviews that are held
back are then answered.
"""

from __future__ import annotations

import base64
import json
import ssl
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

from harness.api import ApiError, Object
from harness.cluster import Cluster, free_ports, wait_until

_CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
_LOOPBACK = "127.0.0.1"


class Webhook:
    """Webhook for the objects of one namespace.

    Args:
        cluster: Cluster on which it is registered.
        namespace: Namespace of the reviewed objects; also the name of the webhook.
        resources: Resources such as `pods`, `pods/eviction`.
        operations: Operations such as CREATE, UPDATE.
        timeout: Seconds that the API server waits for an answer.
        policy: Consequence of a missing answer: Fail or Ignore.
    """

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        *,
        resources: Sequence[str] = ("pods",),
        operations: Sequence[str] = ("CREATE",),
        timeout: int = 10,
        policy: str = "Fail",
    ) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._rules = [
            {
                "apiGroups": ["*"],
                "apiVersions": ["*"],
                "operations": [*operations],
                "resources": [*resources],
                "scope": "Namespaced",
            }
        ]
        self._timeout = timeout
        self._policy = policy
        self._pair = cluster.authority.issue(f"webhook-{namespace}", namespace, addresses=[_LOOPBACK])
        (self._port,) = free_ports(1)
        self._server = self._serve()
        self._may_answer = threading.Event()
        self._may_answer.set()
        self._lock = threading.Lock()
        self._status = 200
        self.asked: list[Object] = []
        """AdmissionReview requests so far, in order of arrival."""
        self.answered = 0
        """Number of requests that were answered, or that the API server gave up before the answer."""

    def hold(self) -> None:
        """Answer no review from now on."""
        self._may_answer.clear()

    def fail(self, status: int = 500) -> None:
        """Answer with this HTTP status from now on."""
        self._status = status
        self._may_answer.set()

    def allow(self) -> None:
        """Allow the reviews that are held back, and all later reviews."""
        self._status = 200
        self._may_answer.set()

    def count(self, name: str = "") -> int:
        """Return the number of reviews; with `name`, only of objects with that name."""
        with self._lock:
            return sum(not name or request.get("name") == name for request in self.asked)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        body: Object = {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": self._namespace},
            "webhooks": [
                {
                    "name": f"{self._namespace}.example.com",
                    "admissionReviewVersions": ["v1"],
                    "sideEffects": "None",
                    "timeoutSeconds": self._timeout,
                    "failurePolicy": self._policy,
                    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": self._namespace}},
                    "rules": [*self._rules, _PROBED],
                    "clientConfig": {
                        "url": f"https://{_LOOPBACK}:{self._port}/",
                        "caBundle": base64.b64encode(self._cluster.ca.read_bytes()).decode(),
                    },
                }
            ],
        }
        self._cluster.api.create(_CONFIGURATIONS, body)
        wait_until(self._in_force, what=f"the webhook of {self._namespace}", timeout=30)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.allow()
        self._cluster.api.delete(f"{_CONFIGURATIONS}/{self._namespace}")
        self._server.shutdown()
        self._thread.join(timeout=10)
        self._server.server_close()

    def _in_force(self) -> bool:
        """Create a ConfigMap by a dry run. Return True if the webhook was called for it."""
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "probe-of-webhook"}}
        path = f"/api/v1/namespaces/{self._namespace}/configmaps"
        try:
            self._cluster.api.create(path, body, dryRun="All")
        except ApiError as error:
            if error.code not in (409, 500):
                raise
        return self.count("probe-of-webhook") > 0

    def _serve(self) -> ThreadingHTTPServer:
        webhook = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                webhook._answer(self, review["request"])

            def log_message(self, *_: object) -> None:
                return

        server = ThreadingHTTPServer((_LOOPBACK, self._port), Handler)
        server.daemon_threads = True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._pair.certificate, self._pair.key)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        return server

    def _answer(self, to: BaseHTTPRequestHandler, request: Object) -> None:
        with self._lock:
            self.asked.append(request)
        self._may_answer.wait()
        answer: Object = {"uid": request["uid"], "allowed": True}
        review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": answer}
        content = json.dumps(review).encode()
        try:
            to.send_response(self._status)
            to.send_header("Content-Type", "application/json")
            to.send_header("Content-Length", str(len(content)))
            to.end_headers()
            to.wfile.write(content)
        except OSError:
            to.close_connection = True  # the API server no longer waits for this answer
        with self._lock:
            self.answered += 1


_PROBED: Object = {
    "apiGroups": [""],
    "apiVersions": ["v1"],
    "operations": ["CREATE"],
    "resources": ["configmaps"],
    "scope": "Namespaced",
}
