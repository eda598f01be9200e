"""DRA driver: prepares resource claims, which give containers a tenant's directory and GPUs as CDI devices."""
