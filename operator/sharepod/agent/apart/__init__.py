"""The agent as two processes: a privileged process with rights on the node, and a worker without rights, which serves
tenants."""
