"""`support`: writes an archive for a problem report, without the secrets of users.

Guarantees:
- Objects have only the fields that `redaction.py` lists.
- The archive names each part that cannot be read, with the reason, and contains all other parts.
- If a list of the whole cluster is forbidden, the archive has that of the user's namespace.
"""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kubectl_sharepod import redaction
from kubectl_sharepod.kubectl import GROUP, ForbiddenError, Json, Kubectl, KubectlError, path
from kubectl_sharepod.output import EXIT_FORBIDDEN, Page
from kubectl_sharepod.reading import SYSTEM
from kubectl_sharepod.redaction import Rule
from kubectl_sharepod.views import rows, text
from kubectl_sharepod.why import requests_gpus

_LOG_LINES = 5000
_CORE, _CLAIMS = "/api/v1", "/apis/resource.k8s.io/v1"
_BINDINGS = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"
_OBJECTS: dict[str, tuple[str, Rule]] = {
    "nodes": (f"{_CORE}/nodes", redaction.NODES),
    "gpunodes": (f"{GROUP}/gpunodes", redaction.OF_SHAREPOD),
    "sharepods": (f"{GROUP}/sharepods", redaction.SHAREPODS),
    "gpubudgets": (f"{GROUP}/gpubudgets", redaction.OF_SHAREPOD),
    "resourceclaims": (f"{_CLAIMS}/resourceclaims", redaction.CLAIMS),
    "deviceclasses": (f"{_CLAIMS}/deviceclasses", redaction.DEVICE_CLASSES),
    "policies": (_BINDINGS, redaction.POLICIES),
    "system-pods": (f"{_CORE}/namespaces/{SYSTEM}/pods", redaction.PODS),
    "system-events": (f"{_CORE}/namespaces/{SYSTEM}/events", redaction.SYSTEM_EVENTS),
    "settings": (f"{_CORE}/namespaces/{SYSTEM}/configmaps", redaction.SETTINGS),
    "gpunode-events": (f"{_CORE}/events?fieldSelector=involvedObject.kind%3DGPUNode", redaction.EVENTS),
    "sharepod-events": (f"{_CORE}/events?fieldSelector=involvedObject.kind%3DSharePod", redaction.EVENTS),
}
"""Path and rule of redaction of each part."""
_EVENTS_OF = ("SharePod", "ResourceClaim", "Pod")
"""Kinds whose Events are read in the user's namespace."""


def support(kubectl: Kubectl, namespace: str, target: Path | None = None) -> Page:
    """Write the archive; return its path. The exit status is 3 if the user's rights keep parts out. Raise
    `KubectlError` if the API server does not answer."""
    file = target or Path(f"sharepod-support-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    parts = {"version.json": _readable(kubectl.get("/version"))}
    missing: dict[str, str] = {}
    reads = {f"{name}.json": partial(_object, kubectl, *one) for name, one in _OBJECTS.items()}
    reads |= {f"{part}.log": partial(kubectl.logs, SYSTEM, part, _LOG_LINES) for part in ("operator", "agent")}
    forbidden = _read(reads, parts, missing)
    if forbidden:
        own = {f"{name}.json": partial(_object, kubectl, *one) for name, one in _of_namespace(namespace).items()}
        _read(own, parts, missing)
    parts["missing.json"] = _readable(missing)
    try:
        with tarfile.open(file, "w:gz") as bundle:
            for name, content in parts.items():
                _add(bundle, name, content.encode())
    except OSError as error:
        raise KubectlError(f"cannot write {file}: {error.strerror}; name another file by --file") from None
    lines = [f"{name} is missing: {reason}" for name, reason in missing.items()]
    if forbidden:
        lines.append(f"You may not read the whole cluster, so the bundle also has parts of namespace {namespace}.")
    status = EXIT_FORBIDDEN if forbidden else 0
    return Page(before=[f"{file}: read it before you send it", *lines], names=[str(file)], status=status)


def _read(reads: Mapping[str, Callable[[], str]], parts: dict[str, str], missing: dict[str, str]) -> bool:
    """Add the parts that can be read to `parts`, and the reasons of the others to `missing`. Return whether one is
    forbidden."""
    forbidden = False
    for name, read in reads.items():
        try:
            parts[name] = read()
        except KubectlError as error:
            missing[name] = str(error)
            forbidden |= isinstance(error, ForbiddenError)
    return forbidden


def _object(kubectl: Kubectl, where: str, rule: Rule) -> str:
    return _readable(rule(kubectl.get(where)))


def _of_namespace(namespace: str) -> dict[str, tuple[str, Rule]]:
    """Return path and rule of each part that is read in the user's namespace. Only Pods that request GPUs stay."""
    events = _some(lambda one: text(one, "involvedObject", "kind") in _EVENTS_OF, redaction.EVENTS)
    return {
        f"sharepods-of-{namespace}": (path("sharepods", namespace), redaction.SHAREPODS),
        f"gpubudgets-of-{namespace}": (path("gpubudgets", namespace), redaction.OF_SHAREPOD),
        f"resourceclaims-of-{namespace}": (path("resourceclaims", namespace, group=_CLAIMS), redaction.CLAIMS),
        f"pods-of-{namespace}": (path("pods", namespace, group=_CORE), _some(requests_gpus, redaction.PODS)),
        f"events-of-{namespace}": (path("events", namespace, group=_CORE), events),
    }


def _some(keep: Callable[[Json], bool], rule: Rule) -> Rule:
    """Return a rule for a list that keeps only these of its objects."""
    return lambda found: rule(found | {"items": [one for one in rows(found.get("items")) if keep(one)]})


def _readable(value: Any) -> str:
    return json.dumps(value, indent=1)


def _add(bundle: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(f"sharepod-support/{name}")
    entry.size = len(content)
    bundle.addfile(entry, io.BytesIO(content))
