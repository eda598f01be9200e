"""Budgets: GPU consumption of namespaces, summed over nodes and time. Pure."""
