"""`trace`: writes the activity of one GPU in the last seconds, in the format of Perfetto and Chrome's trace viewer.

Guarantees:
- The agent is reached through `kubectl port-forward`, with the user's own right to that.
- The token that is sent to the agent gives the right to read GPUNodes and no other right.
- The forwarding ends with the command.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from urllib.parse import quote, urlencode

from kubectl_sharepod.commands import find
from kubectl_sharepod.kubectl import Json, Kubectl, KubectlError, printable
from kubectl_sharepod.output import Column, Page
from kubectl_sharepod.reading import SYSTEM, gpus
from kubectl_sharepod.views import mapping, rows, text, whole

ACCOUNT = "sharepod-trace"
"""ServiceAccount in the manifests whose token is sent to the agent."""
_TIMEOUT_S = 20
_GPU_TRACK = 0


def trace(kubectl: Kubectl, place: str, length_s: float, target: Path | None = None) -> Page:
    """Write the trace of a GPU to a file. Return a page with its path and the GPU's time by state. Raise
    `KubectlError`."""
    gpu = find(gpus(kubectl).gpus, place)
    agent = _agent(kubectl, gpu.node)
    namespace, name = text(agent, "metadata", "namespace"), text(agent, "metadata", "name")
    token = kubectl.token(namespace, ACCOUNT)
    with kubectl.forwarded(namespace, name, _port(agent)) as port:
        found = _read(f"http://127.0.0.1:{port}/trace?{urlencode({'gpu': gpu.uuid, 'seconds': length_s})}", token)
    path = target or Path(f"sharepod-trace-{gpu.node}-{gpu.index}.json")
    try:
        path.write_text(json.dumps(found))
    except OSError as error:
        raise KubectlError(f"cannot write {path}: {error.strerror}; name another file by --file") from None
    return _page(found, path)


def _agent(kubectl: Kubectl, node: str) -> Json:
    """Return the Pod of the agent on a node, from SharePod's namespace. A Pod elsewhere may have the same label. Raise
    `KubectlError` if none runs."""
    select = urlencode(
        {"labelSelector": "app.kubernetes.io/name=sharepod-agent", "fieldSelector": f"spec.nodeName={node}"},
        quote_via=quote,
    )
    pods = kubectl.items(f"/api/v1/namespaces/{SYSTEM}/pods?{select}")
    running = [pod for pod in pods if text(pod, "status", "phase") == "Running"]
    if not running:
        raise KubectlError(f"no agent runs on node {node}; `kubectl sharepod doctor` shows why")
    return max(running, key=lambda pod: text(pod, "metadata", "creationTimestamp"))


def _port(agent: Json) -> int:
    ports = [port for each in rows(mapping(agent.get("spec")).get("containers")) for port in rows(each.get("ports"))]
    named = [whole(port.get("containerPort")) for port in ports if text(port, "name") == "metrics"]
    if not named or named[0] is None:
        raise KubectlError("the agent's Pod has no port named metrics: its setting http_port is 0, or it is too old")
    return named[0]


def _read(url: str, token: str) -> Json:
    import urllib.error  # here, because the other commands need no HTTP client
    import urllib.request

    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})  # noqa: S310  http, loopback
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        output = printable(error.read(500).decode(errors="replace")).strip()
        raise KubectlError(f"the agent refuses the trace: {output}") from None
    except (OSError, ValueError) as error:
        raise KubectlError(f"the agent gives no trace: {error}") from None
    return mapping(found)


def _page(found: Json, path: Path) -> Page:
    """Return a page with the path of the trace, and the seconds that the GPU spent in each state."""
    spent: dict[str, float] = defaultdict(float)
    for event in rows(found.get("traceEvents")):
        if event.get("ph") == "X" and event.get("tid") == _GPU_TRACK:
            spent[text(event, "name")] += float(event.get("dur") or 0)
    whole_us = sum(spent.values())
    lines = sorted(spent.items(), key=lambda each: -each[1])
    return Page(
        before=[f"{path}: {whole_us / 1e6:.1f} s; open it at https://ui.perfetto.dev or in chrome://tracing"],
        columns=[Column("GPU", grows=True), Column("SECONDS", right=True), Column("PART", right=True)],
        rows=[[name, f"{us / 1e6:.3f}", f"{us / (whole_us or 1):.1%}"] for name, us in lines],
        items=lambda: [{"state": name, "seconds": us / 1e6} for name, us in lines],
        names=[str(path)],
    )
