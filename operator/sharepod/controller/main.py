"""`sharepod-operator`: the operator's process, which runs the handlers of `handlers.py` under Kopf.

Guarantees:
- A failed part ends the process with exit status 1; the Deployment restarts it.
- On SIGTERM the process stops acting, releases its Lease and exits with 0.
- The process runs as any user ID, also without an entry in the container's /etc/passwd.
"""

from __future__ import annotations

import asyncio
import sys

import kopf
import structlog
import uvloop
from kopf._core.engines.peering import Identity

from sharepod import logs

from . import handlers as handlers
from .settings import OperatorSettings, SettingsError, load

log = structlog.get_logger(__name__)


async def _run(settings: OperatorSettings) -> None:
    """Run Kopf until a signal ends it. Raise the error that ended the operator, if any."""
    memo = kopf.Memo(stop=asyncio.Event())
    try:
        await kopf.operator(
            # without an identity, Kopf would look up the user's name, which a pod's user may not have
            identity=Identity(settings.identity),
            standalone=True,
            clusterwide=True,
            stop_flag=memo.stop,
            memo=memo,
        )
    finally:
        if (failure := memo.get("failure")) is not None:
            raise failure


def main() -> None:
    """Run `sharepod-operator`."""
    try:
        settings = load()
    except SettingsError as error:
        sys.exit(f"sharepod-operator: {error}")
    logs.configure(settings.log_level, settings.log_format)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(settings))
    except ConnectionError as error:
        sys.exit(f"sharepod-operator: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        log.exception("operator cannot continue", error=str(error))
        sys.exit(1)
