"""promtool and Prometheus, which `make prometheus` builds from Go modules. Tests that need them are skipped if they are
not built.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import yaml

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


@contextmanager
def prometheus(folder: Path, rules: Path, target: str, labels: Mapping[str, str]) -> Iterator[str]:
    """Run Prometheus with `rules`. It scrapes `target` each second and adds these labels. Yield its URL."""
    found = built(PROMETHEUS)
    assert found is not None, MISSING
    scraped = {"job_name": "played", "static_configs": [{"targets": [target], "labels": dict(labels)}]}
    every = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config = {"global": every, "rule_files": [str(rules)], "scrape_configs": [{"honor_labels": True, **scraped}]}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command_line = [
        str(found / "prometheus"),
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command_line, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
        try:
            yield f"http://{address}"
        finally:
            process.kill()
            process.wait(timeout=10)
