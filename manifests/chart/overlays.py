"""Kustomize overlays whose objects the chart contains, each with the chart's value by which a user selects it.

Guarantees:
- Only kustomize renders objects, never this package.
- An object depends on at most one value. So any combination of values gives the same objects as an overlay with the
  corresponding folders.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

MANIFESTS = Path(__file__).resolve().parents[1]
MONITORING = MANIFESTS.parent / "examples" / "monitoring" / "prometheus-operator.yaml"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TIMEOUT_S = 120.0


class OverlayError(Exception):
    """Error: kustomize could not render an overlay."""


@dataclass(frozen=True)
class Overlay:
    """Overlay of manifests/.

    `when`: condition in the chart's templates; empty for the base. `folders`: kustomize resources. `components`:
    kustomize components. `files`: objects that need no kustomize.
    """

    when: str
    folders: tuple[str, ...] = ()
    components: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()

    @property
    def on_base(self) -> bool:
        """Return whether the overlay contains the base, which its components change."""
        return "." in self.folders


BASE = Overlay("", folders=(".",))
OVERLAYS = (
    BASE,
    Overlay('eq .Values.plainPods "Webhook"', folders=(".",), components=("plain-webhook",)),
    Overlay('eq .Values.plainPods "Volume"', folders=(".",), components=("plain-volume",)),
    Overlay('eq .Values.plainPods "Policy"', folders=("plain",)),
    Overlay("and .Values.selinux (not .Values.openshift)", folders=(".",), components=("selinux",)),
    Overlay(".Values.openshift", folders=(".",), components=("openshift",)),
    Overlay(".Values.claims.enabled", folders=("claims",)),
    Overlay(".Values.claims.selfTest", folders=("claims/self-test",)),
    Overlay('eq .Values.ownNodes "Warn"', folders=("own-nodes-warn",)),
    Overlay('eq .Values.ownNodes "Enforce"', folders=("own-nodes",)),
    Overlay(".Values.monitoring.enabled", files=(MONITORING,)),
)


def render(kubectl: Path | str, overlay: Overlay, **more: object) -> list[dict[str, Any]]:
    """Return the objects of an overlay. `more`: further fields of the generated kustomization, such as images. Raise
    OverlayError."""
    found = [one for path in overlay.files for one in yaml.load_all(path.read_text(), Loader=_LOADER)]
    if not overlay.folders:
        return found
    with tempfile.TemporaryDirectory(prefix="shp-") as folder:
        at = Path(folder).resolve()
        kustomization = {
            "resources": _seen_from(at, overlay.folders),
            "components": _seen_from(at, overlay.components),
            **more,
        }
        (at / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        argv = [str(kubectl), "kustomize", str(at)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise OverlayError(f"kubectl kustomize of {', '.join(overlay.folders + overlay.components)}: {done.stderr}")
    return [*found, *yaml.load_all(done.stdout, Loader=_LOADER)]


def _seen_from(at: Path, folders: Sequence[str]) -> list[str]:
    return [os.path.relpath(MANIFESTS / each, at) for each in folders]
