"""Trust in the API server: the TLS context of new connections, created again when its files change.

Guarantees:
- A replaced certificate authority or client certificate is used by new connections within `_PERIOD_S`, and sooner after
  a certificate was rejected.
- Certificates that were removed from the files are no longer trusted by new connections.
- While the files cannot be read, or are partly written, the former context stays in use.
"""

from __future__ import annotations

import ssl
import time
from pathlib import Path
from urllib.parse import urlsplit

from kubernetes.aio.client import Configuration

_PERIOD_S = 60.0
"""Seconds between two readings of the files. The kubelet takes up to two minutes to bring a changed ConfigMap to a pod,
so a shorter period would gain little."""
_AFTER_DOUBT_S = 1.0
"""Shortest time in seconds between two readings of the files after the API server's certificate was not trusted."""


class Trust:
    """TLS trust that a `Configuration` describes. Its files are read again while the process runs."""

    def __init__(self, config: Configuration) -> None:
        self._config = config
        self._secure = urlsplit(str(config.host)).scheme == "https"
        self._looked_at = float("-inf")
        self._doubted = False
        self._made_of: tuple[object, ...] | None = None
        self._context: ssl.SSLContext | None = None

    def context(self) -> ssl.SSLContext | None:
        """Return the context for a new connection; None for plain HTTP. Compare by identity: a changed trust is a new
        object.

        Raises `OSError` if the files cannot be read and there is no former context.
        """
        if not self._secure:
            return None
        period = _AFTER_DOUBT_S if self._doubted else _PERIOD_S
        now = time.monotonic()
        if self._context is None or now >= self._looked_at + period:
            self._looked_at, self._doubted = now, False
            try:
                self._look()
            except OSError:  # includes ssl.SSLError: a partly written file
                if self._context is None:
                    raise
        return self._context

    def invalidate(self) -> None:
        """Record that a certificate was not trusted, so that the files are read before the next connection."""
        self._doubted = True

    def _look(self) -> None:
        config = self._config
        files = (config.ssl_ca_cert, config.cert_file, config.key_file)
        flags = (config.verify_ssl, config.disable_strict_ssl_verification)
        made_of = (*(_content(file) for file in files), config.ca_cert_data, *flags)
        if made_of != self._made_of:
            self._context = _made(config)
            self._made_of = made_of


def _content(file: str | None) -> bytes | None:
    return Path(file).read_bytes() if file else None


def _made(config: Configuration) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=config.ssl_ca_cert, cadata=config.ca_cert_data)
    if config.cert_file:
        context.load_cert_chain(config.cert_file, keyfile=config.key_file)
    if not config.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if config.disable_strict_ssl_verification:
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context
