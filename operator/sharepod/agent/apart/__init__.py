"""The agent as two processes: a privileged process with rights on the node, and an unprivileged process that serves
tenants."""
