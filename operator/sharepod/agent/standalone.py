"""Tenants from a YAML file, without a cluster: `tenants: [...]` with rows as in GPUNode `spec.tenants`.

The file is read again when it changes and on SIGHUP. A file that became wrong is logged once and changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Annotated

import structlog
import yaml
from pydantic import Field, ValidationError

from sharepod.api.gpunode import Tenant
from sharepod.api.objects import MAX_TENANTS, Model

from .agent import Agent

log = structlog.get_logger(__name__)

_INTERVAL_S = 0.25


class TenantsFileError(Exception):
    """The file cannot be read or is not valid. The message says where."""


class _TenantsFile(Model):
    tenants: Annotated[tuple[Tenant, ...], Field(max_length=MAX_TENANTS)]


def load(path: Path) -> tuple[Tenant, ...]:
    """The rows of a file. Raises `TenantsFileError`."""
    try:
        file = _TenantsFile.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise TenantsFileError(f"cannot read the tenants file {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, ValidationError, UnicodeDecodeError) as error:
        raise TenantsFileError(f"the tenants file {path} is not valid: {error}") from None
    ids = [tenant.id for tenant in file.tenants]
    twice = sorted({tenant_id for tenant_id in ids if ids.count(tenant_id) > 1})
    if twice:
        raise TenantsFileError(f"the tenants file {path} is not valid: id {', '.join(twice)} stands there twice")
    return file.tenants


async def run(agent: Agent, again: asyncio.Event) -> None:
    """Follows the file of the settings until cancelled. `again` set: read it now. Raises `TenantsFileError` at the
    start only."""
    path = agent.settings.tenants_file
    assert path is not None, "settings require it in this mode"
    stamp = _stamp(path)
    await agent.tenants.apply(await asyncio.to_thread(load, path))
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(again.wait(), timeout=_INTERVAL_S)
        present = _stamp(path)
        if not again.is_set() and present == stamp:
            continue
        again.clear()
        stamp = present
        try:
            await agent.tenants.apply(await asyncio.to_thread(load, path))
        except TenantsFileError as error:
            log.error("keeping the tenants as they were", error=str(error))
        except OSError as error:
            log.error("cannot apply the tenants", error=str(error))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return (stat.st_mtime_ns, stat.st_ino, stat.st_size)
