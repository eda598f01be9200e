"""Sockets of the tenants' clients (processes with the hook): accepting connections, reading frames in fair turns, rate
limits, and the log of refusals."""
