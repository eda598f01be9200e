"""gRPC services on unix sockets, built from the descriptors of the generated messages: no generated stubs.

A socket is bound afresh at its path (what an earlier agent left there is replaced) and is root's alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import structlog
from google.protobuf import message_factory

log = structlog.get_logger(__name__)

UNIX_PATH_MAX = 107

Handler: TypeAlias = Callable[[Any], Awaitable[Any]]
"""Takes the request message, returns the response message, raises `RpcError` or anything else (INTERNAL)."""


class RpcError(Exception):
    """The call's status: `code` is a `grpc.StatusCode`, the message is the caller's to read."""

    def __init__(self, code: Any, message: str) -> None:
        super().__init__(message)
        self.code = code


class SocketError(OSError):
    """A socket that cannot be served. The message says where and what to do."""


def service(file_descriptor: Any, name: str, handlers: Mapping[str, Handler]) -> Any:
    """The service `name` of a `.proto` file. Raises `ValueError` unless `handlers` names just its methods."""
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
            code, text = grpc.StatusCode.INTERNAL, f"the agent failed at {method}: {error}; its log says more"
            log.exception("call failed", method=method)
        return await context.abort(code, text)

    return answer


class UnixServer:
    """Services on one unix socket."""

    def __init__(self, path: Path, *services: Any) -> None:
        self.path = path
        self._services = services
        self._server: Any = None

    async def start(self) -> None:
        """Listens; raises `SocketError`."""
        if len(os.fsencode(self.path)) > UNIX_PATH_MAX:
            raise SocketError(
                f"socket path {self.path} is longer than {UNIX_PATH_MAX} bytes; choose a shorter kubelet_root"
            )
        try:
            self.path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise SocketError(
                f"cannot make socket {self.path}: {error}; is kubelet_root mounted, writable, into the agent?"
            ) from error
        server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        server.add_generic_rpc_handlers(self._services)
        try:
            server.add_insecure_port(f"unix:{self.path}")
            await server.start()
            self.path.chmod(0o600)
        except (OSError, RuntimeError) as error:
            await server.stop(None)
            raise SocketError(f"cannot listen on {self.path}: {error}") from error
        self._server = server

    async def stop(self, grace_s: float) -> None:
        """Takes the socket away, lets calls under way end for at most `grace_s`, then cancels them."""
        if self._server is not None:
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)
            await self._server.stop(grace_s)
            self._server = None
