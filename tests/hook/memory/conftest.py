"""Fixtures of the tests of device memory."""

from __future__ import annotations

import pytest
from hook.conftest import TENANT_MEMORY, MakeTenant, terms
from hook.world.ledger_check import LedgerCheck, MakeCheck


@pytest.fixture
def make_check(make_tenant: MakeTenant) -> MakeCheck:
    """Function that makes the `LedgerCheck` of a tenant with `memory` bytes of a GPU. `environment`: environment of the
    probe."""

    def make(memory: int = TENANT_MEMORY, **environment: str) -> LedgerCheck:
        return LedgerCheck(make_tenant(terms(memory=memory)), **environment)

    return make
