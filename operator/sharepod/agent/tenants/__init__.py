"""Tenants of the node: the registry of rows in force, each tenant's runtime, and what readings say of them."""
