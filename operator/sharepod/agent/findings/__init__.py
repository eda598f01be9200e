"""Conclusions from readings of the driver: which processes belong to which tenant, how busy they keep the GPUs, and
findings. Pure."""
