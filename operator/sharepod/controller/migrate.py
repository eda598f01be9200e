"""Storage migration: `python -m sharepod.controller.migrate` brings all stored objects to the CRD's storage version.

It reads each object and patches it with nothing, so that the API server writes it anew; then it takes the former
versions from the CRD's `status.storedVersions`, after which a CRD without them can be applied.

Guarantees:
- A version leaves `status.storedVersions` only after each object has been written in the storage version, or has gone.
- It may be ended and run again at any time. Its patches are empty: what somebody else writes meanwhile stays.
- An object that cannot be written costs itself alone: it is named, the others are written, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import quote

from sharepod.api.gpunode import PLURAL as GPUNODES
from sharepod.api.objects import GROUP
from sharepod.api.sharepod import PLURAL as SHAREPODS
from sharepod.kube import (
    MERGE_PATCH,
    ApiError,
    ConflictError,
    Connection,
    GoneError,
    Json,
    NoApiServerError,
    NotFoundError,
    PageTokens,
    UnavailableError,
    Unreadable,
    backoff,
)

CRDS: Final = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"

_PAGE = 500
"""Objects in one page of a list."""
_AT_ONCE = 8
"""Objects written at the same time: a migration is in no hurry, and users work on the same API server."""
_TRIES = 8
"""Tries of one write, or of one list, that meets a conflict or no answer: about a minute."""
_PAGE_TIMEOUT_S = 60.0
"""Seconds for one page of a list."""
_SETTLE_S = 10.0
"""Seconds until every API server of a control plane has certainly seen a CRD that was applied just before."""
_NAMED = 20
"""Objects that could not be written, as many as are named."""


class MigrationError(Exception):
    """Migration that cannot be carried out. The message says what to do."""


@dataclass
class MigrationProgress:
    """Migration of one kind so far."""

    crd: str
    written: int = 0
    gone: int = 0
    failed: list[str] = field(default_factory=list)
    """Object and reason of each that could not be written."""

    def line(self) -> str:
        """Return the counts in words."""
        parts = [f"{self.written:,} written"]
        parts += [f"{self.gone:,} deleted meanwhile"] if self.gone else []
        parts += [f"{len(self.failed):,} failed"] if self.failed else []
        return f"{self.crd}: {', '.join(parts)}"


class Migration:
    """Storage migration of one kind. `say` takes each line for people."""

    def __init__(
        self, api: Connection, plural: str, say: Callable[[str], None], *, settle_s: float = _SETTLE_S
    ) -> None:
        self._api = api
        self._plural = plural
        self._say = say
        self._settle_s = settle_s
        self._path = f"{CRDS}/{plural}.{GROUP}"
        self.progress = MigrationProgress(f"{plural}.{GROUP}")

    async def run(self, *, again: bool) -> bool:
        """Migrate. Return whether every object is stored in the storage version. `again`: also if all are already."""
        crd = await self._api.get(self._path)
        storage, former = _versions(crd)
        if not former and not again:
            self._say(f"{self.progress.crd}: all stored as {storage}; nothing to do")
            return True
        shown = f"from {', '.join(former)} to {storage}" if former else f"to {storage}"
        self._say(f"{self.progress.crd}: {shown}; every API server has the CRD in {self._settle_s:g} s")
        await asyncio.sleep(self._settle_s)
        for attempt in range(1, _TRIES + 1):
            try:
                await self._write_all(_served(crd, storage))
                break
            except GoneError:  # the list took longer than the API server keeps its state: what is written stays written
                self._say(f"{self.progress.line()}; the list is too old to go on with, listing again")
                await backoff(attempt)
        else:
            raise MigrationError("the list was never read to its end; run it again when the API server is less busy")
        self._say(self.progress.line())
        for name in self.progress.failed[:_NAMED]:
            self._say(f"  {name}")
        if self.progress.failed:
            self._say(f"{self.progress.crd}: correct or delete what failed, then run it again")
            return False
        await self._drop_former(crd, storage)
        return True

    async def _write_all(self, version: str) -> None:
        """Write every object that there is. Raise `GoneError` if the list could not be read to its end."""
        collection = f"/apis/{GROUP}/{version}/{self._plural}"
        self.progress = MigrationProgress(self.progress.crd)
        tokens, token = PageTokens(collection), ""
        while True:
            page: list[Json] = []
            unread: list[Unreadable] = []

            def refuse(_kind: str, item: Unreadable, into: list[Unreadable] = unread) -> None:
                into.append(item)

            query = {"limit": str(_PAGE), **({"continue": token} if token else {})}
            metadata = await self._api.page(
                collection, query, take=page.append, unreadable=refuse, timeout_s=_PAGE_TIMEOUT_S
            )
            self.progress.failed += [f"an object that cannot be read: {item.why}" for item in unread]
            for first in range(0, len(page), _AT_ONCE):
                some = page[first : first + _AT_ONCE]
                await asyncio.gather(*(self._write(self._path_of(version, item)) for item in some))
            token = tokens.after(metadata)
            if not token:
                return
            self._say(self.progress.line())

    async def _write(self, path: str) -> None:
        """Have one object written in the storage version."""
        for attempt in range(1, _TRIES + 1):
            try:
                await self._api.patch(path, {}, MERGE_PATCH)
                self.progress.written += 1
                return
            except NotFoundError:
                self.progress.gone += 1
                return
            except (ConflictError, UnavailableError) as error:
                if attempt == _TRIES:
                    self.progress.failed.append(str(error))
                    return
                await backoff(attempt)
            except ApiError as error:
                self.progress.failed.append(str(error))
                return

    def _path_of(self, version: str, item: Json) -> str:
        metadata = item["metadata"]
        namespace = metadata.get("namespace")
        within = f"/namespaces/{quote(namespace, safe='')}" if namespace else ""
        return f"/apis/{GROUP}/{version}{within}/{self._plural}/{quote(metadata['name'], safe='')}"

    async def _drop_former(self, begun: Json, storage: str) -> None:
        """Take the former versions from `status.storedVersions`.

        Raise `MigrationError` if the CRD was changed meanwhile.
        """
        for attempt in range(1, _TRIES + 1):
            crd = await self._api.get(self._path)
            if crd["metadata"]["generation"] != begun["metadata"]["generation"]:
                raise MigrationError(f"{self.progress.crd} was changed meanwhile; run it again")
            body = {
                "metadata": {"resourceVersion": crd["metadata"]["resourceVersion"]},
                "status": {"storedVersions": [storage]},
            }
            try:
                await self._api.patch(f"{self._path}/status", body, MERGE_PATCH)
            except ConflictError:
                await backoff(attempt)
                continue
            self._say(f"{self.progress.crd}: all stored as {storage}")
            return
        raise MigrationError(f"{self.progress.crd} is changed all the time; run it again")


def _versions(crd: Json) -> tuple[str, list[str]]:
    """Return the storage version of a CRD, and the other versions in which objects may be stored."""
    storage = next(str(entry["name"]) for entry in crd["spec"]["versions"] if entry["storage"])
    return storage, [str(name) for name in crd["status"].get("storedVersions") or [] if name != storage]


def _served(crd: Json, storage: str) -> str:
    """Return a version in which objects can be read: the storage version if it is served. Raise `MigrationError`."""
    served = [str(entry["name"]) for entry in crd["spec"]["versions"] if entry["served"]]
    if not served:
        raise MigrationError(f"{crd['metadata']['name']} serves no version; set served: true on one of them")
    return storage if storage in served else served[0]


async def migrate(
    api: Connection, plurals: Sequence[str], say: Callable[[str], None], *, again: bool, settle_s: float
) -> bool:
    """Migrate these kinds, one after the other. Return whether all objects are stored in the storage version."""
    whole = True
    for plural in plurals:
        try:
            whole &= await Migration(api, plural, say, settle_s=settle_s).run(again=again)
        except (ApiError, MigrationError) as error:
            say(f"{plural}.{GROUP}: {error}")
            whole = False
    return whole


async def _run(given: argparse.Namespace) -> bool:
    api = await Connection.open(given.kubeconfig, "sharepod-migrate")
    try:
        return await migrate(api, given.kinds or (SHAREPODS, GPUNODES), _say, again=given.again, settle_s=given.settle)
    finally:
        await api.close()


def _say(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    """Run the command. Return its exit status: 0 if every object is stored in the storage version."""
    parser = argparse.ArgumentParser(
        prog="python -m sharepod.controller.migrate",
        description="Write all SharePods and GPUNodes in the storage version of their CRDs.",
    )
    parser.add_argument("kinds", nargs="*", help="default: both")
    parser.add_argument(
        "--kubeconfig", type=Path, help="without it, as the ServiceAccount of the pod that this runs in"
    )
    parser.add_argument("--again", action="store_true", help="write also where all are stored as they should be")
    parser.add_argument(
        "--settle",
        type=float,
        default=_SETTLE_S,
        help="seconds to wait until all API servers know the CRD (default: %(default)g)",
    )
    given = parser.parse_args()
    if unknown := set(given.kinds) - {SHAREPODS, GPUNODES}:
        parser.error(f"no kind of SharePod's: {', '.join(sorted(unknown))}; write {SHAREPODS}, {GPUNODES} or nothing")
    try:
        return 0 if asyncio.run(_run(given)) else 1
    except NoApiServerError as error:
        print(f"sharepod migrate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
