"""Errors of the harness, as a small hierarchy that a caller can catch.

Every message says what was wrong, where, and what to do about it.
"""

from __future__ import annotations

from pathlib import Path


class HarnessError(RuntimeError):
    """Base of all errors of the harness."""


class BuildError(HarnessError):
    """The cluster's programs could not be built; the message says what is missing and what to install."""


class AssetsError(BuildError):
    """The folder of prebuilt programs that the environment names cannot be used; the message says what to do."""


class StartError(HarnessError):
    """A component did not come up in time or died; the message ends with the tail of its log.

    `logs`: the directory where the logs of all components were left, if they were.
    """

    logs: Path | None = None


class CommandError(HarnessError):
    """A command (kubectl, ctr, ip, ...) failed or ran past its time; the message holds what it printed."""


class NodeUnavailableError(HarnessError):
    """This machine cannot run a real node; the message is one line, fit for a skip reason."""
