"""promtool and Prometheus, which `make prometheus` builds from Go modules. Tests that need them are skipped without."""

from __future__ import annotations

from harness.build import built
from harness.commands import command
from harness.releases import PROMETHEUS

MISSING = "Prometheus and promtool are not built: make prometheus"


def why_no_prometheus() -> str | None:
    """Return why no Prometheus can be run; None if one can."""
    return None if built(PROMETHEUS) is not None else MISSING


def promtool(*arguments: str, input: str | None = None) -> str:  # noqa: A002  as subprocess.run calls it
    """Run promtool and return its output. CommandError if it finds a fault; AssertionError if it is not built."""
    folder = built(PROMETHEUS)
    assert folder is not None, MISSING
    return command(folder / "promtool", *arguments, input=input, timeout=60).stdout
