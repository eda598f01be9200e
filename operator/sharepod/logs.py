"""Logging of the operator and of the agent: one event a line on standard error, with key-values.

Modules log with `log = structlog.get_logger(__name__)` and `log.info("event in words", key=value)`. The program calls
`configure` once, before its first event. Keys of one meaning have one name everywhere: `tenant` (the tenant's id),
`pod` and `sharepod` (namespace/name), `node`, `gpu` (UUID), `pid`, `error`.

Guarantees:
- With form `json` every line is one JSON object with at least `event`, `level`, `logger` and `timestamp` (ISO, UTC).
- Records of the standard library's loggers (Kopf, asyncio, aiohttp) come in the same form, from WARNING up.
- An event below the configured level costs no formatting.
- Tracebacks show no local variables, even if `rich` is installed, because rendering these takes a tenth of a second
  each.
"""

from __future__ import annotations

import logging
import sys

import structlog


class _NamedWriter(structlog.WriteLogger):
    """Writer to standard error that knows the `name` of its logger, which `add_logger_name` puts into each event."""

    def __init__(self, name: str) -> None:
        super().__init__(sys.stderr)
        self.name = name


def _writer(*args: str) -> _NamedWriter:
    """Return the writer of the logger that `structlog.get_logger(*args)` creates."""
    return _NamedWriter(args[0] if args else "sharepod")


def configure(level: str, form: str) -> None:
    """Configure structlog, and the standard library's logging, for this process.

    Args:
        level: lowest level that SharePod's own modules log: `debug`, `info`, `warning` or `error`.
        form: `json`, or `console` for people.
    """
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    rendered: list[structlog.types.Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if form == "json"
        else [
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
        ]
    )
    lowest = logging.getLevelNamesMapping().get(level.upper(), logging.INFO)
    structlog.configure(
        processors=[*shared, *rendered],
        wrapper_class=structlog.make_filtering_bound_logger(lowest),
        logger_factory=_writer,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendered],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
