"""Consumption of namespaces: the agents' counts, summed into GPUStatements."""
