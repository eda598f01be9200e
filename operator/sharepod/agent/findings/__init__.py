"""Conclusions from readings of the driver: tenants of processes, utilization, findings. Pure."""
