"""Reference definitions for placement and models for replays of traces, used by tests and benchmarks."""
