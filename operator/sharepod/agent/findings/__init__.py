"""What readings of the driver show about tenants: which processes are theirs, how busy they keep the GPUs, and
findings. Pure."""
