"""Definitions that placement is checked against, and what replays of traces need beside it; for tests and
benchmarks."""
