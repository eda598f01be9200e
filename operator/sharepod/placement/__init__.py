"""Placement: chooses the node and the GPUs of each request for a share. Pure: no I/O, no clock."""
