"""The agent: one asyncio process per node that owns the node's GPUs in the tenants' stead.

It reports what GPUs there are, keeps a socket for each tenant of the ledger, grants time, admits memory, and measures
both.
"""
