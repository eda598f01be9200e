"""Helm: the program that `make helm` builds, or else the machine's.

Guarantees: a run uses settings, cache and plugins in a folder of its own, never the user's, and it ends within its
timeout.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from harness.build import built
from harness.commands import command
from harness.releases import HELM

NO_HELM = "no Helm here: run `make helm`, which builds it, or put helm 4 on PATH"
_TIMEOUT_S = 120.0


def find_helm() -> Path | None:
    """Return the Helm program. None if there is none."""
    if (kept := built(HELM)) is not None:
        return kept / "helm"
    machine = shutil.which("helm")
    return None if machine is None else Path(machine)


class Helm:
    """Helm with a folder of its own. `kubeconfig`: for its cluster; without it only `template` and `lint` work."""

    def __init__(self, program: Path, folder: Path, kubeconfig: Path | None = None) -> None:
        self._program = program
        self._environment = dict(os.environ) | {
            "HELM_CACHE_HOME": str(folder / "cache"),
            "HELM_CONFIG_HOME": str(folder / "config"),
            "HELM_DATA_HOME": str(folder / "data"),
            "KUBECONFIG": str(kubeconfig or folder / "no-kubeconfig"),
        }

    def run(
        self,
        *arguments: str | Path,
        input: str | None = None,  # noqa: A002  as subprocess.run calls it
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a Helm command; return its output. Raises CommandError with the output."""
        argv = (self._program, *arguments)
        return command(*argv, input=input, check=check, timeout=_TIMEOUT_S, env=self._environment)
