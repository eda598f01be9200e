"""Budgets: what namespaces have had of GPUs, summed over nodes and time. Pure."""
