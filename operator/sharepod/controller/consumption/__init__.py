"""Consumption of namespaces: what agents have counted, summed into GPUStatements."""
