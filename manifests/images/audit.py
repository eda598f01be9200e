"""python -m images.audit: known vulnerabilities of the locked packages, by pip-audit.

Exits with 1 if a package has a vulnerability. If pip-audit's database is unreachable, it prints one line and exits with
0, because nothing is then known about the packages.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from images.package import LOCKS

_TIMEOUT = 300.0


def judge(report: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Return the number of packages that pip-audit's report covers, and a line for each vulnerability."""
    known = [one for one in report["dependencies"] if "skip_reason" not in one]
    found = [
        f"{one['name']} {one['version']}: {fault['id']}, fixed in {', '.join(fault['fix_versions']) or 'no version'}"
        for one in known
        for fault in one["vulns"]
    ]
    return len(known), found


def main() -> int:
    """Run `python -m images.audit`."""
    known, found = 0, []
    locks = sorted(LOCKS.glob("*.lock"))
    for lock in locks:
        argv = [sys.executable, "-m", "pip_audit", "--disable-pip", "--require-hashes", "--format=json"]
        argv += ["--progress-spinner=off", f"--requirement={lock}"]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
            of_lock, faults = judge(json.loads(done.stdout))
        except (subprocess.TimeoutExpired, ValueError, KeyError):
            of_lock, faults = 0, []
        known += of_lock
        found += [f"{lock.name}: {fault}" for fault in faults]
    for line in found:
        print(line, file=sys.stderr)
    if known:
        print(f"audit: {known} packages of {len(locks)} locks known to pip-audit, {len(found)} vulnerabilities")
    else:
        print("audit: skipped, pip-audit's data about packages cannot be had here")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
