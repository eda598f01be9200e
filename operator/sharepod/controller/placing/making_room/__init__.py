"""Preemptions and moves. To free a place for a waiting request, a running tenant is lowered to request 0, moved to
other GPUs, or evicted."""
