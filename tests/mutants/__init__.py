"""Mutation check of wake-ups and guards. See README.md."""
