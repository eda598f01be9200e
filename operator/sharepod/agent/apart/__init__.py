"""The agent as two processes: one with rights on the node, and an unprivileged one that serves tenants."""
