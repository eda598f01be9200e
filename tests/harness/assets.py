"""Prebuilt programs of a test cluster: the folder that KUBEBUILDER_ASSETS names.

setup-envtest of controller-runtime fills such a folder with etcd, kube-apiserver and kubectl. Users may add
kube-controller-manager, kube-scheduler and kubelet of the same Kubernetes release. `harness.build` builds needed
programs that the folder lacks.

Only the standard library, so that `doctor.py` can check before anything is installed. Guarantees:

- An unusable folder is refused with a remedy; it is never ignored silently.
- The API server is at least the version to whose API SharePod is written.
- Programs of the folder are of the API server's minor version, and built programs can work with that version.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from harness.errors import AssetsError

VARIABLE = "KUBEBUILDER_ASSETS"
REQUIRED = ("etcd", "kube-apiserver", "kubectl")
"""Programs that each folder of setup-envtest contains."""
OPTIONAL = ("kube-controller-manager", "kube-scheduler", "kubelet")
"""Programs that setup-envtest does not install."""
OLDEST = (1, 30)
"""Oldest Kubernetes version that SharePod supports, because ValidatingAdmissionPolicy is stable from it on."""
EMULATED_MINORS = 3
"""Minor versions below its own that a component of Kubernetes can emulate (`--emulated-version`)."""
AHEAD_MINORS = 1
"""Minor versions that an API server may be ahead of its scheduler and controller manager (version skew policy)."""
_VERSION_TIMEOUT = 30.0
"""Seconds for a program to print its version, on a machine that is busy and reads it from disk for the first time."""


@dataclass(frozen=True)
class Assets:
    """Folder of prebuilt programs that passed all checks.

    - `version`: version of its API server.
    - `lacking`: programs that must be built.
    - `emulated`: Kubernetes version that built programs must emulate (`--emulated-version`). None if the API server is
      not older than they are.
    """

    folder: Path
    version: tuple[int, int, int]
    present: tuple[str, ...]
    lacking: tuple[str, ...]
    emulated: str | None

    def describe(self) -> str:
        """Return the origin of the programs in one line."""
        taken = f"{', '.join(self.present)} of Kubernetes {_dotted(self.version)} from {self.folder} ({VARIABLE})"
        if not self.lacking:
            return taken
        emulating = f", emulating {self.emulated}" if self.emulated else ""
        return f"{taken}; {', '.join(self.lacking)} built here{emulating}"


def find_assets(environment: Mapping[str, str], *, built: tuple[int, int], kubelet: bool) -> Assets | None:
    """Return the folder that the environment names, checked, or None if it names none.

    `built`: Kubernetes version (major, minor) of the programs that `harness.build` builds. `kubelet`: whether a kubelet
    is needed. Raises `AssetsError`.
    """
    named = environment.get(VARIABLE, "")
    return _check(Path(named).expanduser().absolute(), built, kubelet) if named else None


@cache
def _check(folder: Path, built: tuple[int, int], kubelet: bool) -> Assets:
    if not folder.is_dir():
        raise AssetsError(f"{VARIABLE} names {folder}, which is no folder: {_way_out()}")
    missing = [name for name in REQUIRED if not _executable(folder / name)]
    if missing:
        raise AssetsError(f"{VARIABLE} names {folder}, which lacks {', '.join(missing)}: {_way_out()}")
    _run_version(folder / "etcd")
    version = _version(folder / "kube-apiserver")
    if version[:2] < OLDEST:
        raise AssetsError(
            f"{folder / 'kube-apiserver'} is Kubernetes {_dotted(version)}, and SharePod needs "
            f"{_dotted(OLDEST)} or newer: {_way_out()}"
        )
    present = tuple(name for name in OPTIONAL if _executable(folder / name))
    for name in present:
        own = _version(folder / name)
        if own[:2] != version[:2]:
            raise AssetsError(
                f"{folder / name} is Kubernetes {_dotted(own)}, and its API server {_dotted(version)}: "
                f"put {name} of {_dotted(version[:2])} there, or remove it"
            )
    lacking = tuple(name for name in OPTIONAL if name not in present and (kubelet or name != "kubelet"))
    distance = version[1] - built[1]
    if lacking and (version[0] != built[0] or not -EMULATED_MINORS <= distance <= AHEAD_MINORS):
        raise AssetsError(
            f"{folder} lacks {', '.join(lacking)}, and those built here are of Kubernetes {_dotted(built)}, which does "
            f"not work with an API server of {_dotted(version)}: put {', '.join(lacking)} of {_dotted(version[:2])} "
            f"there (a Kubernetes release has them in its server archive), or choose binaries of "
            f"{_dotted((built[0], built[1] - EMULATED_MINORS))} to {_dotted((built[0], built[1] + AHEAD_MINORS))}, or "
            f"unset {VARIABLE}"
        )
    emulated = _dotted(version[:2]) if lacking and distance < 0 else None
    return Assets(folder=folder, version=version, present=(*REQUIRED, *present), lacking=lacking, emulated=emulated)


def _way_out() -> str:
    return (
        f"set {VARIABLE} to the folder that `setup-envtest use -p path` prints, or unset it and all programs are built"
    )


def _executable(program: Path) -> bool:
    return program.is_file() and os.access(program, os.X_OK)


def _version(program: Path) -> tuple[int, int, int]:
    """Return the version that a Kubernetes program prints."""
    output = _run_version(program)
    match = re.search(r"Kubernetes v(\d+)\.(\d+)\.(\d+)", output)
    if match is None:
        raise AssetsError(f"`{program} --version` names no version of Kubernetes but prints {output.strip()[:200]!r}")
    major, minor, patch = (int(part) for part in match.groups())
    return major, minor, patch


def _run_version(program: Path) -> str:
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        raise AssetsError(f"`{program} --version` did not end in {_VERSION_TIMEOUT:.0f} s: {_way_out()}") from None
    except OSError as error:  # the program may be for another processor, for instance
        raise AssetsError(f"{program} does not run here ({error.strerror}): {_way_out()}") from error
    if done.returncode != 0:
        output = (done.stderr or done.stdout).strip()[:200]
        raise AssetsError(f"`{program} --version` failed ({done.returncode}), {output!r}: {_way_out()}")
    return done.stdout


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
