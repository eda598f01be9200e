"""gRPC services on Unix sockets, built from the descriptors of the generated messages, without generated stubs.

Guarantees:
- A new socket replaces the socket of an earlier agent at the same path. Only root can connect to it.
- A server that stops removes only its own socket, never that of another agent at the same path.
- If a handler raises, only its call ends, with a gRPC status.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import structlog
from google.protobuf import message_factory

from sharepod.agent.state.files import replacing, short_path

log = structlog.get_logger(__name__)

UNIX_PATH_MAX = 107
"""Longest path of a Unix socket in bytes: sun_path of sockaddr_un, less the final zero."""

Handler: TypeAlias = Callable[[Any], Awaitable[Any]]
"""Handler of a call, from request message to response message. Raises `RpcError`; any other exception becomes
INTERNAL."""


class RpcError(Exception):
    """Error that ends a call with a status. `code`: a `grpc.StatusCode`. The message is for the caller."""

    def __init__(self, code: Any, message: str) -> None:
        super().__init__(message)
        self.code = code


class SocketError(OSError):
    """Error for a socket that cannot be served. The message has the path and the remedy."""


class ReadOnlyError(SocketError):
    """Error for a socket whose disk is read-only."""


def service(file_descriptor: Any, name: str, handlers: Mapping[str, Handler]) -> Any:
    """Return the service `name` of a `.proto` file. Raise `ValueError` unless `handlers` has exactly its methods."""
    descriptor = file_descriptor.services_by_name[name]
    methods = {method.name: method for method in descriptor.methods}
    if methods.keys() != handlers.keys():
        raise ValueError(
            f"service {descriptor.full_name} has methods {sorted(methods)}, handled are {sorted(handlers)}"
        )
    return grpc.method_handlers_generic_handler(
        descriptor.full_name,
        {
            method.name: grpc.unary_unary_rpc_method_handler(
                _answering(f"{descriptor.full_name}/{method.name}", handlers[method.name]),
                request_deserializer=message_factory.GetMessageClass(method.input_type).FromString,
                response_serializer=message_factory.GetMessageClass(method.output_type).SerializeToString,
            )
            for method in methods.values()
        },
    )


def _answering(method: str, handler: Handler) -> Callable[[Any, Any], Awaitable[Any]]:
    async def answer(request: Any, context: Any) -> Any:
        try:
            return await handler(request)
        except RpcError as error:
            code, text = error.code, str(error)
            log.info("call refused", method=method, code=code.name, reason=text)
        except Exception as error:
            code, text = grpc.StatusCode.INTERNAL, f"the agent failed at {method}: {error}; see its log"
            log.exception("call failed", method=method)
        return await context.abort(code, text)

    return answer


class UnixServer:
    """gRPC server on one Unix socket."""

    def __init__(self, path: Path, *services: Any) -> None:
        self.path = path
        self._services = services
        self._server: Any = None
        self._made = (0, 0)
        """Device and inode of the socket that this server has created."""

    async def start(self) -> None:
        """Create the socket and serve. Raise `SocketError`."""
        if len(os.fsencode(self.path)) > UNIX_PATH_MAX:
            raise SocketError(
                f"socket path {self.path} is longer than {UNIX_PATH_MAX} bytes; choose a shorter kubelet_root"
            )
        server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        server.add_generic_rpc_handlers(self._services)
        try:
            self.path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            # Renamed after the start: at its end gRPC removes the name that it was given, even if it is another
            # socket's by then.
            with short_path(self.path.parent) as folder, replacing(folder / self.path.name) as fresh:
                server.add_insecure_port(f"unix:{fresh}")
                await server.start()
                fresh.chmod(0o600)
                made = _identity(fresh)
        except (OSError, RuntimeError) as error:
            await server.stop(None)
            kind = ReadOnlyError if isinstance(error, OSError) and error.errno == errno.EROFS else SocketError
            raise kind(
                f"cannot create socket {self.path}: {error}; mount kubelet_root writable into the agent's container"
            ) from error
        self._server, self._made = server, made

    @property
    def serving(self) -> bool:
        """True between `start` and `stop` while the socket file exists."""
        return self._server is not None and self.path.is_socket()

    async def stop(self, grace_s: float) -> None:
        """Remove the socket, unless another server has replaced it. Pending calls run for at most `grace_s` seconds,
        then they are cancelled."""
        if self._server is not None:
            with contextlib.suppress(OSError):
                if _identity(self.path) == self._made:
                    self.path.unlink()
            await self._server.stop(grace_s)
            self._server = None


def _identity(path: Path) -> tuple[int, int]:
    """Return device and inode of a file. No other file has the same while the server has the socket open."""
    status = path.stat(follow_symlinks=False)
    return status.st_dev, status.st_ino
