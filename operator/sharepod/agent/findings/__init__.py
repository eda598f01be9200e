"""Process attribution, utilization and findings, from the driver's readings. Pure."""
