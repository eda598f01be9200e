"""Preemptions and moves. To make room for waiting requests, a tenant's request is lowered to 0, or the tenant moves or
is evicted."""
