"""The second block of the printed uninstallation, against a kubectl that is a script: no share is left without its
agent."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from cluster.pasted import uninstall_script

KUBECTL = """#!/bin/bash
# One node: the files of this folder are its label and a row of its ledger. The agent of the labelled node releases the
# row. Without label and row, the operator deletes the GPUNode.
cd "$(dirname "$0")" && echo "$*" >> calls
case "$*" in
  "label node goes"*pool-)
    rm -f label; if [ -e late ]; then mv late row; fi ;;
  "label node goes"*pool=dedicated) touch label && rm row ;;
  "get gpunodes"*)
    if [ -e row ]; then echo "goes dedicated team-a/late"; elif [ -e label ]; then echo "goes dedicated"; fi ;;
esac
"""


@pytest.mark.parametrize("appears", ["row", "late"])
def test_a_share_between_the_blocks_is_named_and_keeps_or_gets_back_its_agent(appears: str, tmp_path: Path) -> None:
    for name, text in (("kubectl", KUBECTL), ("sleep", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for state in ("label", appears):
        (tmp_path / state).touch()
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", "-c", uninstall_script(first=1)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "gpunode goes, whose node keeps its label for the shares of team-a/late" in done.stdout
    labels = [call.split()[-1] for call in (tmp_path / "calls").read_text().splitlines() if "label node goes" in call]
    there, without = "sharepod.dev/pool=dedicated", "sharepod.dev/pool-"
    assert labels == ([there, without] if appears == "row" else [without, there, without])
