"""Commands of docs/install.md, run as an administrator pastes them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from harness.cluster import Cluster
from harness.installation import MANIFESTS

_INSTALL = MANIFESTS.parent / "docs" / "install.md"


def paste_uninstall(
    cluster: Cluster, overlay: Path, printed: Path, *, strict: bool = True, first: int = 0
) -> subprocess.Popen[bytes]:
    """Start the commands of the page that uninstall SharePod, in the folder of an overlay, from the block `first` on.
    Their output goes to the file `printed`. `strict`: end at the first command that fails, unlike a terminal."""
    environment = {
        **os.environ,
        "KUBECONFIG": str(cluster.kubeconfig),
        "KUBECACHEDIR": str(cluster.state / "kubectl-cache"),
        "PATH": f"{cluster.bin}:{os.environ['PATH']}",
    }
    with printed.open("wb") as output:
        script = ["bash", "-c", uninstall_script(strict=strict, first=first)]
        return subprocess.Popen(script, cwd=overlay, env=environment, stdout=output, stderr=subprocess.STDOUT)


def uninstall_script(*, strict: bool = True, first: int = 0) -> str:
    """Return the commands of the page that uninstall SharePod. Arguments: as of `paste_uninstall`."""
    section = _INSTALL.read_text().partition("\n## Uninstall\n")[2].partition("\nThen remove `/var/lib")[0]
    blocks = re.findall(r"(?:^    .*\n)+", section, re.MULTILINE)
    assert len(blocks) == 2
    commands = [line[4:] for block in blocks[first:] for line in block.splitlines(keepends=True)]
    return ("set -e\n" if strict else "") + "".join(commands)
