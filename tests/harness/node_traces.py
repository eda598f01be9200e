"""Traces of a node: everything that it creates on the machine outside of its state directory, recorded and removed.

Guarantees: each such trace is recorded before it is created, so that the next node removes the traces of a killed node.
Only traces of nodes of this harness are touched.
"""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path

from harness.commands import command
from harness.errors import NodeUnavailableError
from harness.node_files import NodeLayout
from harness.node_packages import CGROUPS, RECORD
from harness.process import alive, start_time

LOCK = RECORD.with_suffix(".lock")
# Paths outside of the state directory to which a node would write. In the node's mount namespace, a directory of its
# own is bound over each.
OWN_DIRECTORIES = (
    "/etc/cdi",
    "/run/cdi",
    "/run/containerd",
    "/run/netns",
    "/var/lib/cni",
    "/var/lib/kubelet",
    "/var/lib/sharepod",
    "/var/log/containers",
    "/var/log/pods",
)


def undo_commands(layout: NodeLayout) -> list[list[str]]:
    """Return the commands that remove a node's traces outside of its state directory, in reverse order of their
    creation.

    They can be run in the machine's own mount namespace at any later time.
    """
    cgroups = " ".join(f"{CGROUPS}/{level}{layout.cgroup}" for level in ("", "*/"))
    remove_cgroups = (
        f"for attempt in 1 2 3 4 5 6 7 8 9 10; do find {cgroups} -depth -type d -exec rmdir {{}} + ;"
        f" ls -d {cgroups} | grep -q . || exit 0; sleep 0.1; done 2>/dev/null; exit 1"
    )
    made = [directory for directory in OWN_DIRECTORIES if not Path(directory).exists()]
    return [
        ["rm", "-f", str(RECORD)],
        *(["rmdir", directory] for directory in made),
        ["sh", "-c", remove_cgroups],
        ["ip", "link", "delete", layout.bridge],
    ]


def write_record(state: Path, undo: list[list[str]], *, supervisor: int | None = None) -> None:
    """Record what `clean_what_was_left` needs. `supervisor`: pid of the node's supervisor, once it is known."""
    started = None if supervisor is None else start_time(supervisor)
    facts = {"state": str(state), "undo": undo, "supervisor": supervisor, "started": started}
    RECORD.write_text(json.dumps(facts))


def clean_what_was_left() -> None:
    """Remove the traces of a node whose supervisor was killed. The caller holds the lock, so no node runs."""
    try:
        record = json.loads(RECORD.read_text())
    except (OSError, ValueError):
        return
    if record["supervisor"] is not None and alive(record["supervisor"], record["started"]):
        raise NodeUnavailableError(f"process {record['supervisor']} still runs a node without holding {LOCK}")
    for argv in reversed(record["undo"]):
        command(*argv, check=False)
    shutil.rmtree(record["state"], ignore_errors=True)


def make_cgroup(name: str) -> None:
    """Create the cgroup below which the kubelet creates its cgroups, in every mounted hierarchy."""
    if (CGROUPS / "cgroup.controllers").exists():
        (CGROUPS / name).mkdir()
        for level in (CGROUPS, CGROUPS / name):
            for controller in (level / "cgroup.controllers").read_text().split():
                with suppress(OSError):
                    (level / "cgroup.subtree_control").write_text(f"+{controller}")
        return
    for hierarchy in CGROUPS.iterdir():
        if hierarchy.is_dir() and not hierarchy.is_symlink() and hierarchy.is_mount():
            (hierarchy / name).mkdir()
            for setting in ("cpuset.cpus", "cpuset.mems"):
                if (hierarchy / setting).exists():
                    (hierarchy / name / setting).write_text((hierarchy / setting).read_text())


def weigh_most(name: str, *below: str) -> None:
    """Give these cgroups below `name`, and all their parents up to `name`, the greatest weight for processors."""
    unified = (CGROUPS / "cgroup.controllers").exists()
    top = (CGROUPS if unified else CGROUPS / "cpu") / name
    setting, most = ("cpu.weight", "10000") if unified else ("cpu.shares", "262144")
    for cgroup in {top, *(top / part for path in below for part in (path, *map(str, Path(path).parents)))}:
        (cgroup / setting).write_text(most)
