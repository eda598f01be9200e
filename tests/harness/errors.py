"""Errors of the harness, as a small hierarchy for callers.

Every message names the problem, its place, and the remedy.
"""

from __future__ import annotations

from pathlib import Path


class HarnessError(RuntimeError):
    """Base of all errors of the harness."""


class BuildError(HarnessError):
    """Failed build of the cluster's programs; the message names missing requirements and their packages."""


class AssetsError(BuildError):
    """Unusable folder of prebuilt programs; the message names the remedy."""


class StartError(HarnessError):
    """Component that did not start in time or exited. The message ends with the end of its log.

    `logs`: the directory with the logs of all components, if they were kept.
    """

    logs: Path | None = None


class CommandError(HarnessError):
    """Command (kubectl, ctr, ip, ...) that failed or exceeded its time; the message contains its output."""


class NodeUnavailableError(HarnessError):
    """This machine cannot run a real node. The message is one line, which tests use as the reason of a skip."""
