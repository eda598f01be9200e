"""Driver of an agent without a cluster: tenants from a YAML file with rows as in GPUNode `spec.tenants`.

Guarantees:
- The file is read again when it changes and on SIGHUP.
- A file that has become invalid is logged once; the tenants stay as they are.
- A row that the state directory cannot store is logged and retried; the agent keeps running.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import structlog
import yaml
from pydantic import Field, ValidationError

from sharepod.api.gpunode import Tenant
from sharepod.api.objects import MAX_TENANTS, Model
from sharepod.setting_faults import first_fault

from .apart.distant_agent import AnyAgent

log = structlog.get_logger(__name__)

_INTERVAL_S = 0.25
"""Seconds between two checks of the file's modification time and size."""


class TenantsFileError(Exception):
    """Error for a tenants file that cannot be read or is not valid. The message names the place of the fault."""


class _TenantsFile(Model):
    """Content of the tenants file."""

    tenants: Annotated[tuple[Tenant, ...], Field(max_length=MAX_TENANTS)]


def load(path: Path) -> tuple[Tenant, ...]:
    """Return the rows of a tenants file. Raises `TenantsFileError`."""
    try:
        file = _TenantsFile.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise TenantsFileError(f"cannot read the tenants file {path}: {error.strerror or error}") from None
    except ValidationError as error:
        raise TenantsFileError(f"the tenants file {path} is not valid: {first_fault(error, 'the file')}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise TenantsFileError(f"the tenants file {path} is not valid: {error}") from None
    ids = [tenant.id for tenant in file.tenants]
    duplicates = sorted({tenant_id for tenant_id in ids if ids.count(tenant_id) > 1})
    if duplicates:
        raise TenantsFileError(f"the tenants file {path} is not valid: id {', '.join(duplicates)} is listed twice")
    return file.tenants


async def run(agent: AnyAgent, again: asyncio.Event) -> None:
    """Apply the tenants file that the settings name, and apply it again whenever it changes, until cancelled.

    Args:
        agent: The started agent.
        again: Set to have the file read at once.

    Raises `TenantsFileError` if the file is invalid at the start; later the tenants stay as they are. Raises
    `InventoryError` if there is no inventory at the start.
    """
    path = agent.settings.tenants_file
    assert path is not None, "settings require it in this mode"
    stamp = _stamp(path)
    await agent.take_stock()
    all_in_force = await _apply(agent, await asyncio.to_thread(load, path))
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_INTERVAL_S):
                await again.wait()
        present = _stamp(path)
        if all_in_force and not again.is_set() and present == stamp:
            continue
        again.clear()
        stamp = present
        try:
            all_in_force = await _apply(agent, await asyncio.to_thread(load, path))
        except TenantsFileError as error:
            log.error("keeping the tenants as they were", error=str(error))


async def _apply(agent: AnyAgent, rows: Sequence[Tenant]) -> bool:
    """Apply the rows; return whether the state directory stored everything."""
    try:
        await agent.tenants.apply(rows)
    except OSError as error:
        log.error("cannot apply the tenants; trying again", error=str(error))
        return False
    return True


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return (stat.st_mtime_ns, stat.st_ino, stat.st_size)
