"""CDI devices of tenants: one specification for each prepared claim, which mounts the tenant's directory into
containers.

    sharepod-<claim's UID>.json: kind sharepod.dev/tenant, one device named by the UID

Guarantees:
- A container runtime reads a complete specification or none.
- The content of a specification depends only on the tenant's id, so it can be written again at any time.
- Mounts are read-only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from sharepod.agent.state import files
from sharepod.api.objects import GROUP, NO_GPUS, PRELOAD_FILE, PRELOAD_PATH, VOLUME_MOUNT_PATH

log = structlog.get_logger(__name__)

_VERSION = "0.6.0"
"""Version of the CDI specification. The first with annotations; each runtime with DRA reads it."""
_READ_ONLY = ("rbind", "ro", "nosuid", "nodev")
_TENANT, _BOOT = f"{GROUP}/tenant", f"{GROUP}/boot"
_BYTES_MAX = 1 << 16
"""Most bytes of a specification that are read back: fifty times the usual size."""


@dataclass(frozen=True)
class DeviceKind:
    """Kind of CDI devices that this agent defines."""

    name: str
    """Name of the kind, below `sharepod.dev/`."""
    prefix: str
    """Beginning of the names of the files with devices of this kind."""


TENANT = DeviceKind("tenant", "sharepod-")
"""The devices of tenants' claims."""
SELF_TEST_KIND = DeviceKind("self-test", "sharepod.self-test-")
"""The devices of the self-test's claims."""


def device_id(claim_uid: str, kind: DeviceKind = TENANT) -> str:
    """Return the qualified name of a claim's device, by which container runtimes refer to it."""
    return f"{GROUP}/{kind.name}={claim_uid}"


class TenantDevices:
    """Specifications of devices of one kind, in one CDI directory. The methods do I/O: call them from a thread."""

    def __init__(self, folder: Path, boot: str, kind: DeviceKind = TENANT) -> None:
        """Args:
        folder: the CDI directory.
        boot: identity of the node's current boot.
        kind: the kind of the devices.
        """
        self._folder = folder
        self._boot = boot
        self._kind = kind

    def write(self, claim_uid: str, tenant_id: str, directory: Path) -> None:
        """Write the specification of a claim. Raise `OSError`.

        Args:
            claim_uid: UID of the claim, a safe part of a file name.
            tenant_id: the claim's tenant.
            directory: the tenant's directory on the node.
        """
        content = json.dumps(self._specification(claim_uid, tenant_id, directory)).encode()
        path = self._path(claim_uid)
        try:
            if path.read_bytes() == content:
                return
        except OSError:
            pass
        files.replace(path, content, durable=False)

    def remove(self, claim_uid: str) -> None:
        """Remove the specification of a claim, if there is one. Raise `OSError`."""
        self._path(claim_uid).unlink(missing_ok=True)

    def present(self) -> Mapping[str, str | None]:
        """Return the tenant of each specification of this kind, by the claim's UID. None if it was written in another
        boot or cannot be read."""
        found: dict[str, str | None] = {}
        for path in self._folder.glob(f"{self._kind.prefix}*.json"):
            found[path.stem.removeprefix(self._kind.prefix)] = self._tenant_of(path)
        return found

    def _path(self, claim_uid: str) -> Path:
        return self._folder / f"{self._kind.prefix}{claim_uid}.json"

    def _specification(self, claim_uid: str, tenant_id: str, directory: Path) -> Mapping[str, Any]:
        mounts = [
            {"hostPath": str(source), "containerPath": target, "options": list(_READ_ONLY)}
            for source, target in ((directory, VOLUME_MOUNT_PATH), (directory / PRELOAD_FILE, PRELOAD_PATH))
        ]
        # Where NVIDIA's runtime is the default and reads the variable, this keeps it from attaching other GPUs.
        edits = {"env": [f"NVIDIA_VISIBLE_DEVICES={NO_GPUS}"], "mounts": mounts}
        return {
            "cdiVersion": _VERSION,
            "kind": f"{GROUP}/{self._kind.name}",
            "annotations": {_TENANT: tenant_id, _BOOT: self._boot},
            "devices": [{"name": claim_uid, "containerEdits": edits}],
        }

    def _tenant_of(self, path: Path) -> str | None:
        try:
            with path.open("rb") as file:
                notes = json.loads(file.read(_BYTES_MAX))["annotations"]
            return str(notes[_TENANT]) if notes[_BOOT] == self._boot else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("cannot read a CDI specification of an earlier agent", file=str(path), error=str(error))
            return None
