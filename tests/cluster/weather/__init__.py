"""Faults between operator and API server ("bad weather"): each fault is caused once on a real API server, and the
operator's delay is measured."""
