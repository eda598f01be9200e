"""`support`: writes an archive for a problem report, without the secrets of users.

Guarantees:
- Commands, arguments, annotations, probe headers, managed fields and the values of environment variables are left out.
- The archive names each part that cannot be read, with the reason, and contains all other parts.
"""

from __future__ import annotations

import io
import json
import tarfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from kubectl_sharepod.kubectl import GROUP, Json, Kubectl, KubectlError
from kubectl_sharepod.output import Page
from kubectl_sharepod.reading import SYSTEM

_REDACTED = "<redacted>"
_LOG_LINES = 5000
_OBJECTS = {
    "nodes": "/api/v1/nodes",
    "gpunodes": f"{GROUP}/gpunodes",
    "sharepods": f"{GROUP}/sharepods",
    "gpubudgets": f"{GROUP}/gpubudgets",
    "resourceclaims": "/apis/resource.k8s.io/v1/resourceclaims",
    "deviceclasses": "/apis/resource.k8s.io/v1/deviceclasses",
    "policies": "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings",
    "system-pods": f"/api/v1/namespaces/{SYSTEM}/pods",
    "system-events": f"/api/v1/namespaces/{SYSTEM}/events",
    "settings": f"/api/v1/namespaces/{SYSTEM}/configmaps",
    "gpunode-events": "/api/v1/events?fieldSelector=involvedObject.kind%3DGPUNode",
    "sharepod-events": "/api/v1/events?fieldSelector=involvedObject.kind%3DSharePod",
}


def support(kubectl: Kubectl, target: Path | None = None) -> Page:
    """Write the archive; return its path. Raise `KubectlError` if the API server does not answer."""
    path = target or Path(f"sharepod-support-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    parts = {"version.json": _object(kubectl, "/version")}
    missing: dict[str, str] = {}
    reads = {f"{name}.json": partial(_object, kubectl, where) for name, where in _OBJECTS.items()}
    reads |= {f"{part}.log": partial(kubectl.logs, SYSTEM, part, _LOG_LINES) for part in ("operator", "agent")}
    for name, read in reads.items():
        try:
            parts[name] = read()
        except KubectlError as error:
            missing[name] = str(error)
    parts["missing.json"] = _readable(missing)
    try:
        with tarfile.open(path, "w:gz") as bundle:
            for name, content in parts.items():
                _add(bundle, name, content.encode())
    except OSError as error:
        raise KubectlError(f"cannot write {path}: {error.strerror}; name another file by --file") from None
    lines = [f"{name} is missing: {reason}" for name, reason in missing.items()]
    return Page(before=[f"{path}: read it before you send it", *lines], names=[str(path)])


def redacted(value: Any, key: str = "") -> Any:
    """Return an object of the API server with the fields replaced that may contain secrets of users."""
    if key in ("managedFields", "annotations", "command", "args", "exec", "httpHeaders"):
        return _REDACTED
    if key == "env" and isinstance(value, list):
        return [{"name": one.get("name"), "value": _REDACTED} for one in value if isinstance(one, dict)]
    if isinstance(value, dict):
        return {name: redacted(one, name) for name, one in value.items()}
    if isinstance(value, list):
        return [redacted(one) for one in value]
    return value


def _object(kubectl: Kubectl, path: str) -> str:
    return _readable(redacted(kubectl.get(path)))


def _readable(value: Json | dict[str, str]) -> str:
    return json.dumps(value, indent=1)


def _add(bundle: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(f"sharepod-support/{name}")
    entry.size = len(content)
    bundle.addfile(entry, io.BytesIO(content))
