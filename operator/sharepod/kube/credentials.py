"""Credentials of the API server: from a kubeconfig, or the pod's ServiceAccount; read again as they are rotated.

Guarantees:
- Credentials are read again at most once in `_PERIOD_S`, or in `_AFTER_REJECTION_S` if the API server has rejected
  them. The clock is monotonic, so a clock that is set back delays nothing.
- While the credentials cannot be read, the former credentials stay in use.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from kubernetes.aio.client import Configuration
from kubernetes.aio.config import load_incluster_config, load_kube_config

_PERIOD_S = 60.0
"""Seconds between two readings: well below the lifetime of a token (at least 10 min)."""
_AFTER_REJECTION_S = 1.0
"""Shortest time in seconds between two readings while the API server rejects the credentials. A rotation replaces the
files by a rename, so a later reading soon succeeds."""


class NoApiServerError(ConnectionError):
    """No configuration with the address of an API server can be read."""


class Rereading:
    """Refresh hook of a `Configuration`: before a call, `load` reads the credentials again if they are due."""

    def __init__(self, load: Callable[[Any], Awaitable[None]]) -> None:
        self._load = load
        self._read_at = time.monotonic()
        self._rejected = False

    async def __call__(self, config: Any) -> None:
        """Read the credentials into `config` if they are due."""
        period = _AFTER_REJECTION_S if self._rejected else _PERIOD_S
        if time.monotonic() - self._read_at < period:
            return
        self._read_at = time.monotonic()
        self._rejected = False
        with contextlib.suppress(Exception):  # the file may be only partly written, for instance
            await self._load(config)
        config.refresh_api_key_hook = self

    def expire(self) -> None:
        """Record that the API server has rejected the credentials."""
        self._rejected = True


async def configuration(kubeconfig: Path | None) -> Configuration:
    """Return the configuration of the API server: from a kubeconfig; without one, from the pod's ServiceAccount.

    Raise `NoApiServerError` with the remedy if neither can be read.
    """

    async def load(config: Any) -> None:
        if kubeconfig is not None:
            await load_kube_config(config_file=str(kubeconfig), client_configuration=config, persist_config=False)
        else:
            load_incluster_config(client_configuration=config, try_refresh_token=False)

    config = Configuration()
    try:
        await load(config)
    except Exception as error:  # the loaders raise exceptions of many kinds
        source = f"kubeconfig {kubeconfig}" if kubeconfig else "the pod's ServiceAccount (set kubeconfig to use a file)"
        raise NoApiServerError(
            f"cannot read the API server's address and credentials from {source}: {error}"
        ) from error
    config.refresh_api_key_hook = Rereading(load)
    return config
