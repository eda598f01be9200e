"""The agent in two processes: one with the node's rights, and one without any that serves tenants."""
