"""Metrics of a played agent and a played operator: one series of each family, with counters that grow with time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client.metrics import MetricWrapperBase
from sharepod.agent.telemetry.families import FAMILIES
from sharepod.controller import metrics

VALUES = {"namespace": "team-a", "pod": "train", "gpu": "GPU-0", "index": "0", "use": "held"}
"""Values of labels. Any other label has its own name as value. `mode` has the value Shared, and `kind` has two
values."""
TARGET = {"node": "gpu-node-0"}


def families() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return the kind and the labels of each metric family of the agents and the operator, by the family's name without
    suffix."""
    found = {name: (family.kind, family.labels) for name, family in FAMILIES.items()}
    for registry in (metrics.REGISTRY, metrics.LEADERS):
        for collector in registry._collector_to_names:
            if isinstance(collector, MetricWrapperBase):
                found[collector._name] = (str(collector._type), tuple(collector._labelnames))
    return found


def labels_of_series() -> dict[str, set[str]]:
    """Return, by name of the series in Prometheus, its labels and the labels of the target."""
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    return {
        f"{name}{suffix}": {*labels, *TARGET, *(("le",) if suffix == "_bucket" else ())}
        for name, (kind, labels) in families().items()
        for suffix in suffixes[kind]
    }


def text(seconds: float) -> str:
    """Return the text of the metrics after this many seconds."""
    lines: list[str] = []
    for name, (kind, labels) in families().items():
        known = {label: "Shared" if label == "mode" else VALUES.get(label, label) for label in labels}
        lines.append(f"# TYPE {name}{'_total' if kind == 'counter' else ''} {kind}")
        if kind == "histogram":
            for bound in ("0.1", "1.0", "+Inf"):
                lines.append(_line(f"{name}_bucket", known | {"le": bound}, seconds))
            lines += [_line(f"{name}_sum", known, seconds / 10), _line(f"{name}_count", known, seconds)]
            continue
        for of_kind in ("held", "reserved") if "kind" in labels else ("",):
            own = known | ({"kind": of_kind} if of_kind else {})
            lines.append(_line(name, own, 1) if kind == "gauge" else _line(f"{name}_total", own, seconds / 2))
    return "\n".join(lines) + "\n"


def _line(name: str, labels: dict[str, str], value: float) -> str:
    return f"{name}{{{','.join(f'{label}={json.dumps(each)}' for label, each in labels.items())}}} {value}"


@contextmanager
def serving() -> Iterator[str]:
    """Serve the metrics over HTTP. Yield the address."""
    began = time.monotonic()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text(time.monotonic() - began).encode())

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
