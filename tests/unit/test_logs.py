"""Logging: events of SharePod and of other libraries have the same form."""

from __future__ import annotations

import json
import subprocess
import sys

_PROGRAM = """
import logging, sys
import structlog
from sharepod import logs
log = structlog.get_logger("sharepod.some.module")
logs.configure(sys.argv[1], sys.argv[2])
log.debug("step", tenant="a")
log.info("placed", tenant="a", pod="team/train")
try:
    raise ValueError("bad")
except ValueError:
    log.exception("failed", tenant="a")
logging.getLogger("kopf").info("chatter")
logging.getLogger("kopf").warning("watch %s", "cut")
"""


def _lines(level: str, form: str) -> list[str]:
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM, level, form], capture_output=True, text=True, timeout=30, check=True
    )
    assert ran.stdout == ""
    return ran.stderr.splitlines()


def test_each_line_is_one_json_object_with_level_logger_and_time() -> None:
    placed, failed, cut = (json.loads(line) for line in _lines("info", "json"))
    assert placed["timestamp"].endswith("Z")
    assert placed | {"timestamp": ""} == {
        "event": "placed",
        "level": "info",
        "logger": "sharepod.some.module",
        "timestamp": "",
        "tenant": "a",
        "pod": "team/train",
    }
    assert failed["event"] == "failed"
    assert failed["exception"].splitlines()[-1] == "ValueError: bad"
    assert {key: cut[key] for key in ("event", "level", "logger")} == {
        "event": "watch cut",
        "level": "warning",
        "logger": "kopf",
    }
    assert cut.keys() == {"event", "level", "logger", "timestamp"}


def test_the_level_is_that_of_our_own_modules() -> None:
    assert [json.loads(line)["event"] for line in _lines("debug", "json")] == ["step", "placed", "failed", "watch cut"]
    assert [json.loads(line)["event"] for line in _lines("error", "json")] == ["failed", "watch cut"]


def test_the_console_form_is_text() -> None:
    first = _lines("info", "console")[0]
    assert "placed" in first
    assert "tenant=a" in first
    assert not first.startswith("{")
