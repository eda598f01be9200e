"""Run a command on the machine to its end.

Guarantees: the command ends within its timeout, and a failure is reported with its whole output.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

from harness.errors import CommandError


def command(
    *argv: str | Path,
    input: str | None = None,  # noqa: A002  as subprocess.run calls it
    check: bool = True,
    timeout: float = 20.0,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command. Raises CommandError if its status is not 0 (with `check`), or after `timeout` seconds. `env`: its
    whole environment."""
    shown = shlex.join(map(str, argv))
    try:
        done = subprocess.run(list(argv), input=input, capture_output=True, text=True, timeout=timeout, env=env)
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"{shown}: still running after {timeout} s") from error
    if check and done.returncode != 0:
        raise CommandError(f"{shown}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done
