"""Sockets of the tenants' clients: accepting, reading in fair turns, rate limits, and the log of refusals."""
