"""Browser page: GPUs, their tenants and waiting workloads, as far as the user may read them."""
