"""Tests of the hook: the real libsharepod.so in real processes on simulated GPUs. See README.md."""
