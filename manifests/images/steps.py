"""Runs the long steps of image making: shows their progress, and adds the output of a failed program to the error.

Guarantees: a program ends within its timeout, or when this process ends.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.errors import HarnessError
from harness.process import die_with

_SHOWN_EACH_S = 10.0
_LINES = 25
"""Most lines of a failed program's output that are shown, the last ones."""


class ImageError(HarnessError):
    """Failure to make an image. The message names the step, and includes the output of its program."""


class NotHadError(ImageError):
    """Failure to fetch a part of an image. The first line can be used as the reason of a skipped test."""


def show(text: str) -> None:
    """Show a line of progress."""
    print(f"images: {text}", file=sys.stderr, flush=True)


def run(
    label: str,
    argv: Sequence[str | Path],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    usual_s: float = 0.0,
    failure: type[ImageError] = ImageError,
) -> None:
    """Run a program to its end. Raise `failure` if it fails, or after `timeout` seconds.

    Args:
        label: Purpose of the program, for people.
        env: The program's whole environment; None: this process's.
        usual_s: Seconds that it usually takes on two idle cores, printed at the start; 0: not printed.
    """
    show(label + (f" (about {usual_s:.0f} s)" if usual_s else ""))
    began = shown = time.monotonic()
    with tempfile.TemporaryFile(mode="w+", errors="replace") as output:
        process = subprocess.Popen(
            [str(part) for part in argv],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            preexec_fn=functools.partial(die_with, os.getpid()),
        )
        try:
            while process.poll() is None:
                now = time.monotonic()
                if now - began > timeout:
                    raise failure(f"{label}: no end after {timeout:.0f} s")
                if now - shown > _SHOWN_EACH_S:
                    shown = now
                    show(f"{label}, {now - began:.0f} s")
                time.sleep(0.05)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(timeout=10)
        if process.returncode != 0:
            output.seek(0)
            lines = "\n".join(output.read().strip().splitlines()[-_LINES:])
            raise failure(f"{label}: status {process.returncode}\n{lines}")
