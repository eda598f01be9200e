"""Writes docs/settings.md from the code that reads them: every setting of operator and agent, the operator's metrics.

python docs/generate.py            # or make docs
"""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from prometheus_client import Metric
from pydantic_core import PydanticUndefined
from pydantic_settings import BaseSettings
from sharepod.agent.settings import Settings as AgentSettings
from sharepod.controller import metrics
from sharepod.controller.settings import OperatorSettings

PAGE = Path(__file__).parent / "settings.md"
_BY_PLACE = {"identity": "the host's name", "hook_file": "the packaged hook"}  # defaults that depend on where it runs

_HEAD = """# Settings

Made by `make docs` from the classes that read them. Where files and variables go: [install.md](install.md#settings).
A key that does not exist or a value that cannot be used ends the program at its start, with a message that names it.
"""


def _meanings(settings: type[BaseSettings]) -> dict[str, str]:
    """The text below each field in the class's source."""
    (body,) = (node.body for node in ast.parse(inspect.getsource(settings)).body if isinstance(node, ast.ClassDef))
    found: dict[str, str] = {}
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
            found[field.target.id] = " ".join(str(text).split())
    return found


def _shown(name: str, default: Any) -> str:
    if name in _BY_PLACE:
        return _BY_PLACE[name]
    if default is None or default is PydanticUndefined:
        return "unset"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, Enum):
        return f"`{default.value}`"
    if isinstance(default, tuple):
        return "`" + ", ".join(str(getattr(item, "key", item)) for item in default) + "`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def _table(settings: type[BaseSettings]) -> Iterator[str]:
    meanings = _meanings(settings)
    yield "| setting | default | meaning |"
    yield "|---|---|---|"
    for name, field in settings.model_fields.items():
        meaning = meanings[name].replace("|", "\\|")
        yield f"| `{name}` | {_shown(name, field.default)} | {meaning} |"


def _full_name(metric: Metric) -> str:
    return f"{metric.name}_total" if metric.type == "counter" else str(metric.name)


def page() -> str:
    """What the page should say."""
    lines = [_HEAD, "## Operator", "", "Environment: `SHAREPOD_` and the name in capitals. Times are in seconds.", ""]
    lines += [*_table(OperatorSettings), "", "## Agent", ""]
    lines += ["Environment: `SHAREPOD_AGENT_` and the name in capitals.", "", *_table(AgentSettings), ""]
    lines += ["## Metrics of the operator", "", "Under `/metrics` on `metrics_port`. Those of the agent stand in"]
    lines += ["[reference.md](reference.md#metrics-of-the-agent).", "", "| metric | type | meaning |", "|---|---|---|"]
    found = sorted(metrics.REGISTRY.collect(), key=lambda metric: str(metric.name))
    lines += [f"| `{_full_name(metric)}` | {metric.type} | {metric.documentation} |" for metric in found]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
