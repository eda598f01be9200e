"""DRA driver: prepares resource claims, by which containers get a tenant's directory and its GPUs as CDI devices."""
