"""DRA driver that prepares resource claims: a tenant's directory and its GPUs come into containers as CDI devices."""
