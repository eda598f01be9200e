"""Page of the fleet: GPUs, their tenants and waiting workloads in a browser, with the user's own rights."""
