"""Prometheus and promtool for the tests of this folder. `make test-all` builds them. Other runs use them if they are
built.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from harness.build import own_programs
from harness.errors import HarnessError
from harness.prometheus import why_no_prometheus
from harness.releases import DASHBOARD_SCHEMA, PROMETHEUS

_HERE = Path(__file__).parent


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build both programs before the timeout of the first test begins, if the environment has BUILD_PROMETHEUS."""
    if os.environ.get("BUILD_PROMETHEUS") and any(_HERE in item.path.parents for item in session.items):
        try:
            for tool in (PROMETHEUS, DASHBOARD_SCHEMA):
                own_programs(tool)
        except HarnessError as error:
            print(f"tests of rules and panels: skipped without Prometheus: {error}", file=sys.stderr)


@pytest.fixture
def built_prometheus() -> None:
    """Skip the test if Prometheus is not built."""
    if (reason := why_no_prometheus()) is not None:
        pytest.skip(reason)
