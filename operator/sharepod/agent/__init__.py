"""Agent: one asyncio process per GPU node that enforces the tenants' shares and reports what it sees.

It reads the GPUs, keeps a socket for each tenant of the ledger, grants time, admits memory, and measures both.
"""
