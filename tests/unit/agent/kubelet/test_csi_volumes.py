"""Volumes as real mounts. Each test makes them in a mount namespace of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sharepod.agent.kubelet.mounts import parse_mountinfo
from unit.agent.kubelet import csi_mount_cases


def _why_no_namespace() -> str | None:
    if os.geteuid() != 0:
        return "mounting needs root"
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"no mount namespace: {tried.stderr.strip()}"


@pytest.mark.skipif(_why_no_namespace() is not None, reason=str(_why_no_namespace()))
@pytest.mark.parametrize("name", csi_mount_cases.CASES)
def test_volumes(name: str, tmp_path: Path) -> None:
    command: list[str | Path] = [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        sys.executable,
        csi_mount_cases.__file__,
        name,
        tmp_path,
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 0, ran.stderr


def test_mountinfo_is_read_as_the_kernel_writes_it() -> None:
    first, second = parse_mountinfo(
        [
            "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n",
            r"37 35 98:0 /with\040space /a\134b ro shared:7 master:2 - ext3 /dev/root rw" + "\n",
        ]
    )
    assert (first.root, first.point, first.readonly, first.shared) == ("/mnt1", Path("/mnt2"), False, False)
    assert (second.root, second.point, second.readonly, second.shared) == ("/with space", Path("/a\\b"), True, True)
