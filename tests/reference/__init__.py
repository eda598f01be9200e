"""Reference definitions for placement, and models for replays of traces; for tests and benchmarks."""
